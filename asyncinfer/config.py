"""`EngineConfig`: everything about an engine that is not about one request. Frozen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from asyncinfer.protocols.eviction import EvictionPolicy
from asyncinfer.protocols.observer import Observer
from asyncinfer.protocols.scheduling import SchedulingPolicy

__all__ = ["KV", "MOST_RUNNING", "ChosenObserver", "EngineConfig", "Graphs", "OnFull", "Weights"]

#: A name, a name with arguments, or an object.
ChosenObserver: TypeAlias = str | tuple[str, Mapping[str, Any]] | Observer
OnFull = Literal["pause", "coalesce", "cancel"]
Graphs = Literal["lazy", "start", "off"]
Weights = Literal["plain", "int8"]
KV = Literal["plain", "fp8", "int8"]
#: Most tokens a stream holds unread.
MAX_BUFFER = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an `Engine`. Unknown names are a `TypeError`, bad values a `ValueError`."""

    #: "auto" takes CUDA where there is one; else a torch device such as "cpu" or "cuda:1".
    device: str = "auto"
    #: "auto" takes the checkpoint's on a GPU and float32 on a CPU.
    dtype: str = "auto"
    #: How the layers' matrices are held: in `dtype`, or in 8 bits with a scale per output, made
    #: when the model is loaded. Embedding, head and norms stay as they are.
    weights: Weights = "plain"
    #: How keys and values are held: in `dtype`, or in 8 bits with a scale per token and head.
    kv: KV = "plain"
    #: Threads that a step's operators take on a CPU; None takes torch's own number. One leaves the
    #: other cores to the program around, and is the faster where it keeps them busy.
    cpu_threads: int | None = None
    #: Hub ids only: a branch, tag or commit.
    revision: str | None = None

    #: Tokens per KV block.
    block_size: int = 16
    #: Bytes for the KV cache; None takes `kv_fraction` of the device memory that is free. On a CPU
    #: up to a quarter more keeps the pages of requests that decode side by side.
    kv_bytes: int | None = None
    #: Share of free GPU memory for KV, when `kv_bytes` is None (a CPU takes 1 GiB at most).
    kv_fraction: float = 0.8
    #: Longest sequence, prompt and answer together; None takes the model's.
    max_context: int | None = None
    #: Requests computed together at most.
    max_running: int = 256
    #: Requests held at most, running ones included; the next one is `Overloaded`.
    max_requests: int = 4096
    #: Query tokens per step: the longest a decode step waits for a prompt's chunk.
    max_step_tokens: int = 2048
    prefix_cache: bool = True
    #: Eviction policy of the prefix cache: a name or an object.
    cache_policy: str | EvictionPolicy = "lru"
    #: "fcfs", "priority", "deadline" or an object.
    scheduler: str | SchedulingPolicy = "fcfs"
    #: Told of what happens: each by name, by name with arguments (`("prometheus", {"port": 9000})`)
    #: or as an object.
    observers: Sequence[ChosenObserver] = ()
    #: Steps in flight at once. None: one on a CPU; on a GPU two, up to four where they are short.
    overlap: int | None = None
    #: When decode steps are recorded as CUDA graphs: as each size of batch comes up, all when the
    #: engine opens, or never. A CPU has none.
    cuda_graphs: Graphs = "lazy"
    #: The same request gives the same tokens and logprobs, to the last bit, whatever is computed
    #: with it and however its prompt is cut. Slower, and without CUDA graphs.
    deterministic: bool = False

    #: Tokens a stream holds for a slow consumer before `on_full` applies.
    buffer: int = 256
    on_full: OnFull = "pause"
    #: Seconds a full stream may go unread before it fails with `StreamStalled`.
    stall_timeout: float = 300.0
    #: Seconds that a clean close waits for running requests; 0 aborts them at once.
    drain_timeout: float = 30.0
    #: Seconds a step may take before the engine is declared dead; inf never.
    step_timeout: float = 300.0
    #: Seconds a sampler plugin may take in a step; after three steps in a row that took longer
    #: it is not called again.
    sampler_timeout: float = 0.25
    #: Characters of a prompt, checked before tokenising.
    max_prompt_chars: int = 16_000_000

    def __post_init__(self) -> None:
        for name, most in _COUNTS.items():
            _count(name, getattr(self, name), most)
        for name, most in _OPTIONAL_COUNTS.items():
            if getattr(self, name) is not None:
                _count(name, getattr(self, name), most)
        for name in ("stall_timeout", "drain_timeout", "step_timeout", "sampler_timeout"):
            seconds = _number(name, getattr(self, name))
            if math.isnan(seconds) or seconds < 0:
                raise ValueError(f"{name}={seconds!r}: must be >= 0 seconds")
        if not self.step_timeout:
            raise ValueError(f"step_timeout={self.step_timeout!r}: must be > 0 seconds")
        if not 0.0 < _number("kv_fraction", self.kv_fraction) <= 1.0:
            raise ValueError(f"kv_fraction={self.kv_fraction!r}: must be in (0, 1]")
        for name in ("device", "dtype"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be a non-empty string")
        if self.revision is not None and not isinstance(self.revision, str):
            raise ValueError(f"revision={self.revision!r}: must be a string")
        for name in ("prefix_cache", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        object.__setattr__(self, "observers", _observers(self.observers))
        for name, choices in (
            ("on_full", get_args(OnFull)),
            ("cuda_graphs", get_args(Graphs)),
            ("weights", get_args(Weights)),
            ("kv", get_args(KV)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {choices}")

    def replace(self, **changes: object) -> EngineConfig:
        """A copy with some options changed, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


MOST_RUNNING: Final = 65_536
#: Integers from 1 on, and the most of those that are allocated whole when an engine opens.
_COUNTS: Final[dict[str, int | None]] = {
    "block_size": None,
    "max_running": MOST_RUNNING,
    "max_requests": None,
    "max_step_tokens": None,
    "buffer": MAX_BUFFER,
    "max_prompt_chars": None,
}
_OPTIONAL_COUNTS: Final[dict[str, int | None]] = {
    "cpu_threads": 1024,
    "kv_bytes": None,
    "max_context": None,
    "overlap": None,
}


def _count(name: str, value: object, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: must be an integer")
    if value < 1:
        raise ValueError(f"{name}={value!r}: must be >= 1")
    if most is not None and value > most:
        raise ValueError(f"{name}={value!r}: must be <= {most}")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r}: must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}={value!r}: must be a float") from None


def _observers(value: object) -> tuple[object, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"observers={value!r}: must be a list of names or objects")
    for index, entry in enumerate(value):
        if isinstance(entry, tuple | list) and not _is_named(entry):
            bound = "must be a pair (name, mapping of arguments)"
            raise ValueError(f"observers[{index}]={entry!r}: {bound}")
    return tuple(value)


def _is_named(entry: tuple[object, ...] | list[object]) -> bool:
    match entry:
        case (str(), Mapping() as args) if isinstance(entry, tuple):
            return all(isinstance(name, str) for name in args)
    return False
