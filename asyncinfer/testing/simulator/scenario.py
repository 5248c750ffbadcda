"""What a simulated life is: the engine in it, what its consumers do, and everything that happens,
as plain data that a trace file can hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar

from asyncinfer.testing.oracle import STATE

__all__ = ["Action", "Ask", "Scenario"]

#: The name of a method `do_...` of `Actions`, followed by its arguments.
Action: TypeAlias = list[Any]
T = TypeVar("T", bound="PlainFields")


class PlainFields:
    """A dataclass of plain values."""

    def to_json(self) -> dict[str, Any]:
        """Every field that is not its default."""
        plain: dict[str, Any] = {}
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if value != default:
                plain[each.name] = value
        return plain

    @classmethod
    def from_json(cls: type[T], values: Mapping[str, Any]) -> T:
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(PlainFields):
    """An engine on a fake model, and the event loops around it. Times in seconds."""

    blocks: int = 64
    block_size: int = 4
    max_context: int = 40
    max_running: int = 4
    max_requests: int = 16
    max_held_bytes: int | None = None
    max_step_tokens: int = 16
    #: The target seconds of a step with answers; None: no bound.
    step_target: float | None = None
    overlap: int = 1
    window: int | None = None
    window_pages: int = 0
    #: Pages of layers with a state; 0: there are none.
    state_pages: int = 0
    #: About one draw in so many ends the text; None: none does.
    eos_every: int | None = None
    prefix_cache: bool = True
    cache_policy: str = "lru"
    scheduler: str = "fcfs"
    observers: list[str] = field(default_factory=list)
    stall_timeout: float = 5.0
    step_timeout: float = 3.0
    drain_timeout: float = 2.0
    #: What a step takes while time passes as usual.
    step_seconds: float = 0.01
    #: Event loops, each in a thread of its own.
    loops: int = 1
    #: Of the tokens guessed for every answer about one in so many is wrong; 0: none are guessed.
    wrong_drafts: int = 0
    #: Points at which loading the model can be interrupted.
    load_points: int = 0
    #: LoRA adapters that there is room for; None: the model takes none.
    adapters: int | None = None
    #: Whether requests may have sampler plugins.
    samplers: bool = False

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows and states of the fake model's layers, as its oracle takes them."""
        windows = () if self.window is None else (self.window,)
        return (*windows, STATE) if self.state_pages else windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(PlainFields):
    """One request, and what its consumer does with the answer. Times in seconds."""

    id: int
    loop: int = 0
    prompt: list[int] = field(default_factory=list)
    #: How the prompt is given; "worker" is text that an intake thread prepares.
    form: Literal["ids", "text", "worker", "chat"] = "ids"
    n: int = 1
    max_tokens: int | None = 8
    min_tokens: int = 0
    temperature: float = 0.0
    seed: int = 0
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    deadline: float | None = None
    scope: str = ""
    #: The name of its adapter, loaded or not.
    adapter: str | None = None
    #: What the answer has to fit: a name in `asyncinfer.testing.simulator.formats`.
    format: str | None = None
    #: Its sampler plugins: a name in `asyncinfer.testing.simulator.samplers`.
    sampler: str | None = None
    #: Its `guidance_scale` and `negative_prompt`; None: it has no guide.
    guidance: float | None = None
    negative: list[int] = field(default_factory=list)
    buffer: int = 8
    on_full: Literal["pause", "coalesce", "cancel"] = "pause"
    how: Literal["iterate", "await", "both"] = "iterate"
    #: Its pause after each chunk.
    pace: float = 0.0
    #: `asyncio.timeout` around each chunk; the consumer goes on reading after it.
    patience: float | None = None
    #: After so many chunks it does `then`.
    chunks: int | None = None
    then: Literal["stop", "leave", "raise", "drop", "sleep"] = "leave"

    @property
    def guide(self) -> list[int]:
        """The tokens of the sequence that guides each answer; empty without a guide."""
        if self.guidance is None or self.max_tokens == 0:
            return []
        return self.negative or self.prompt[-1:]
