"""`SimulatedModel`: the fake model with faults that are put in by hand, and points at which others
may run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from asyncinfer.cache import STATE_WINDOW, KVGroupSpec
from asyncinfer.config import EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.engine.source import Progress
from asyncinfer.errors import ModelLoadError
from asyncinfer.scheduler import RunnerSpec, Step
from asyncinfer.stats import LoadProgress
from asyncinfer.testing.fake_adapters import FakeAdapters
from asyncinfer.testing.simulator.scenario import Scenario
from asyncinfer.testing.simulator.vocabulary import VOCAB, simulated_tokenizer
from asyncinfer.testing.strict_runner import StrictRunner
from asyncinfer.text import ChatTemplate, Tokenizer

__all__ = ["Fault", "SimulatedModel"]

#: The next step finds no room; its row of this number fails; launching or collecting it raises;
#: or loading the model or an adapter raises.
Fault = Literal["memory", "row", "launch", "collect", "load", "adapter"]

#: What is said, and nothing else.
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@cache
def _template() -> ChatTemplate:
    """Compiled once, for no render changes it."""
    return ChatTemplate(_TEMPLATE, shield=simulated_tokenizer().shield)


class SimulatedModel:
    """A `ModelSource`.

    Args:
        point: called where others may run.
        before_launch: called with every step before it is launched.
        encoding: called with every text that is tokenised.
        struck: called with a step and its rows that are about to fail.
        broke: called when the runner is about to raise.
        clock: by which sampler plugins are timed.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        point: Callable[[], None],
        before_launch: Callable[[Step], None],
        encoding: Callable[[str], None],
        struck: Callable[[Step, list[int]], None],
        broke: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._scenario = scenario
        self._point = point
        self._before_launch = before_launch
        self._encoding = encoding
        self._struck = struck
        self._broke = broke
        self._clock = clock
        #: What goes wrong next, and with which row.
        self.faults: dict[Fault, int] = {}
        #: Steps that there was no room for.
        self.retractions = 0
        self.runner: StrictRunner | None = None
        self.adapters: FakeAdapters | None = None
        if scenario.adapters is not None:
            self.adapters = FakeAdapters(scenario.adapters, self._reading)
        groups = [KVGroupSpec(scenario.blocks)]
        if scenario.window is not None:
            groups.append(KVGroupSpec(scenario.window_pages, scenario.window))
        if scenario.state_pages:
            groups.append(KVGroupSpec(scenario.state_pages, STATE_WINDOW, state=True))
        self.spec = RunnerSpec(
            groups=tuple(groups),
            block_size=scenario.block_size,
            max_slots=scenario.max_running,
            max_context=scenario.max_context,
            vocab_size=VOCAB,
            max_step_tokens=scenario.max_step_tokens,
            step_target=scenario.step_target,
            masks=True,
            drafts=True,
            guides=True,
            samplers=scenario.samplers,
        )

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        scenario, tokenizer = self._scenario, simulated_tokenizer()
        for done in range(scenario.load_points):
            self._point()
            if progress is not None:
                progress(LoadProgress(done, scenario.load_points))
        if self.faults.pop("load", None) is not None:
            raise RuntimeError("fault: the model cannot be loaded")
        self.runner = StrictRunner(
            self.spec,
            eos_every=scenario.eos_every,
            gate=self.gate,
            failing=self._failing,
            no_room=self._no_room,
        )
        self.runner.adapters = self.adapters
        if scenario.samplers:
            # Imported here: other lives need no torch.
            from asyncinfer.testing.sampled_rows import SampledRows

            self.runner.samplers = SampledRows(self.spec, config.sampler_timeout, self._clock)
        watched = _WatchedTokenizer(tokenizer, self._encoding, self._point)
        return Loaded(self.runner, watched, _template())

    def gate(self, phase: Literal["launch", "collect"], plan: Step) -> None:
        """What the runner calls in each step: here faults happen."""
        if phase == "launch":
            self._before_launch(plan)
        self._point()
        if self.faults and self.faults.pop(phase, None) is not None:
            self._broke()
            raise RuntimeError(f"fault: the runner broke at {phase}")

    def _reading(self) -> None:
        self._point()
        if self.faults.pop("adapter", None) is not None:
            raise ModelLoadError("fault: the adapter cannot be read")

    def _no_room(self, plan: Step) -> bool:
        lacking = self.faults.pop("memory", None) is not None
        self.retractions += lacking
        return lacking

    def _failing(self, plan: Step) -> Mapping[int, Exception]:
        row = self.faults.pop("row", None)
        if row is None:
            return {}
        rows = [row % len(plan.slots)]
        self._struck(plan, rows)
        return {row: ArithmeticError("fault: NaN logits") for row in rows}


class _WatchedTokenizer(Tokenizer):
    """The same tokenizer, seen at work."""

    def __init__(
        self, tokenizer: Tokenizer, encoding: Callable[[str], None], point: Callable[[], None]
    ) -> None:
        # Immutable, so that nothing can tell them apart.
        self.__dict__.update(tokenizer.__dict__)
        self._tokenizer = tokenizer
        self._encoding = encoding
        self._point = point

    def encode(self, text: str, **options: Any) -> list[int]:
        self._begin(text)
        return self._tokenizer.encode(text, **options)

    def encode_inner(self, text: str, field: str = "prompt") -> list[int]:
        # Asked for by a grammar that is being made, under a lock: others would wait for ever.
        return self._tokenizer.encode_inner(text, field)

    def encode_chat(self, text: str, *, inner: bool = False) -> list[int]:
        self._begin(text)
        return self._tokenizer.encode_chat(text, inner=inner)

    def _begin(self, text: str) -> None:
        self._encoding(text)
        self._point()
