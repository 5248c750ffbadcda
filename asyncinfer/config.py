"""`EngineConfig`: everything about an engine that is not about one request. Frozen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Final, Literal, get_args

from asyncinfer.bounds import MAX_BUFFER
from asyncinfer.checks import (
    check_boolean,
    check_choice,
    check_integer,
    check_real,
    check_seconds,
    checking_config,
)
from asyncinfer.errors import InvalidConfig, Size
from asyncinfer.plugins.chosen import Chosen, chosen_name
from asyncinfer.protocols.eviction import EvictionPolicy
from asyncinfer.protocols.observer import Observer
from asyncinfer.protocols.proposer import Proposer
from asyncinfer.protocols.scheduling import SchedulingPolicy
from asyncinfer.suggestions import suggesting

__all__ = [
    "HEAD",
    "KV",
    "LEAST_CONTEXT",
    "MOST_RUNNING",
    "PREDICTOR",
    "Attention",
    "EngineConfig",
    "Graphs",
    "KernelTrial",
    "KernelTuning",
    "Kernels",
    "OnFull",
    "Weights",
]

OnFull = Literal["pause", "coalesce", "cancel"]
Graphs = Literal["lazy", "start", "off"]
Kernels = Literal["auto", "triton", "torch"]
Attention = Literal["auto", "flashinfer"]
KernelTrial = Literal["cached", "process", "inline", "off"]
KernelTuning = Literal["cached", "measured", "off"]
Weights = Literal["plain", "floats", "int8", "fp8", "int4", "int4-128"]
KV = Literal["plain", "fp8", "int8", "int4"]


@suggesting("an engine")
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an `Engine`. Unknown names are a `TypeError`, bad values an `InvalidConfig`."""

    #: "auto" takes CUDA where there is one; else a torch device such as "cpu" or "cuda:1".
    device: str = "auto"
    #: "auto" takes the checkpoint's on a GPU and float32 on a CPU.
    dtype: str = "auto"
    #: How the layers' matrices are held: as the checkpoint has them; in `dtype` also where it is
    #: quantised ("floats"); in 8 bits with a scale per output, as whole numbers or as floats
    #: ("fp8"); or in 4 bits with a scale and an offset for 32 inputs, or 128; made when the model
    #: is loaded, of a quantised checkpoint too. Embedding, head and norms stay as they are.
    weights: Weights = "plain"
    #: How keys and values are held: in `dtype`; in 8 bits with a scale per token and head; or, on a
    #: CPU, in 4 bits with a scale and an offset for each 32 of a head's numbers.
    kv: KV = "plain"
    #: What computes on a GPU. "auto": Triton's kernels, if a trial on the device finds them right
    #: when the engine opens, else torch's operators, with a warning. "triton" refuses to open then.
    kernels: Kernels = "auto"
    #: Attention on a GPU. "auto": by `kernels`. "flashinfer": FlashInfer's, in steps that are not
    #: recorded and layers without sinks, if a trial finds them right, else "auto", with a warning.
    #: It needs plain `kv` in 16 bits and `pip install "asyncinfer[flashinfer]"`.
    attention: Attention = "auto"
    #: How Triton's kernels are tried. "cached": once for each device, driver, compiler and shapes,
    #: in a child process. "process": the same at each open. "inline": in this process at each open,
    #: where a crashing kernel takes the program with it. "off": not at all.
    kernel_trial: KernelTrial = "cached"
    #: Where Triton's kernels get their tiles: from a measurement kept for the device ("cached"), or
    #: made at open if there is none ("measured"), or from counts of bytes ("off").
    kernel_tuning: KernelTuning = "cached"
    #: Whether a GPU computes steps of every size at open: no kernel compiles while a stream waits.
    warm_up: bool = True
    #: The most threads that a step's operators use on a CPU; None takes torch's own number, or a
    #: container's quota. They use fewer while other programs keep cores busy.
    cpu_threads: int | None = None
    #: The most bytes of copies of weights in a CPU's layout, for later starts; None keeps none.
    weight_cache_bytes: int | None = None
    #: Hub ids only: a branch, tag or commit.
    revision: str | None = None
    #: Folders only: whether links to files outside are followed, as on volumes that models share.
    #: Set it for folders you trust, since a link may name any file that the process may read.
    follow_symlinks: bool = False

    #: Tokens per KV block.
    block_size: int = 16
    #: For models whose layers keep a state: how many blocks apart states are kept for prefix hits.
    #: A larger interval saves memory, and hits reach less far.
    state_interval: int = 1
    #: Bytes for the KV cache; None takes `kv_fraction` of the device's free memory. A CPU takes up
    #: to a quarter more, for contiguous copies of the pages of decoding requests.
    kv_bytes: int | None = None
    #: Share of free GPU memory for KV, when `kv_bytes` is None (a CPU takes 1 GiB at most).
    kv_fraction: float = 0.8
    #: Longest sequence, prompt and answer together; None takes the model's.
    max_context: int | None = None
    #: Sequences computed together at most: each of `n` answers counts, and a guide.
    max_running: int = 256
    #: Answers of all requests that are held, running ones included; the next one is `Overloaded`.
    max_requests: int = 4096
    #: The most bytes of host memory that all requests hold: prompts, and what streams may hold
    #: unread. A request beyond it is `Overloaded`.
    max_held_bytes: int = 1 << 30
    #: The most query tokens per step.
    max_step_tokens: int = 2048
    #: The target seconds of a step that answers wait for: prompts are computed in chunks that fit,
    #: by the speed of earlier steps. None: 0.1 on a CPU, inf on a GPU; inf: no bound but
    #: `max_step_tokens`.
    step_target: float | None = None
    #: LoRA adapters loaded at once at most; 0 takes none.
    max_adapters: int = 16
    #: The largest rank of an adapter. Memory is reserved for as many of this rank as may be loaded.
    max_adapter_rank: int = 64
    #: Bytes for adapters, which bound how many can be loaded. A GPU sets them aside when the engine
    #: opens; None sets nothing aside, and takes up to 1 GiB of what is free at the first load.
    adapter_bytes: int | None = None
    prefix_cache: bool = True
    #: Eviction policy of the prefix cache: a name, a name with arguments (`("ttl", {"seconds":
    #: 60})`) or an object.
    cache_policy: Chosen[EvictionPolicy] = "lru"
    #: The secret of the keys that name prefixes, 16 to 64 bytes; None draws one. Engines with one
    #: secret give equal prefixes equal keys, by which a router knows what each of them holds.
    prefix_secret: bytes | None = field(default=None, repr=False)
    #: Share of the KV blocks that open conversations may pin, so that the prefix cache gives up all
    #: others before; 0 pins none.
    pinned_share: float = 0.5
    #: Which request goes first: "fcfs", "priority", "deadline" or another policy, given likewise.
    scheduler: Chosen[SchedulingPolicy] = "fcfs"
    #: Observers, which are told of what happens to requests; each is given likewise.
    observers: Sequence[Chosen[Observer]] = ()
    #: Proposers, which guess the next tokens of answers; each is given likewise. The first that has
    #: a guess for an answer is taken. Guesses change no answer.
    proposers: Sequence[Chosen[Proposer]] = ()
    #: A small model of the same vocabulary, which guesses too, where no proposer does: a folder, a
    #: GGUF file, a hub id, "embedded", or an object with `load()`. "mtp": the layer that predicts
    #: further tokens, which some checkpoints have. A folder or hub id may be that of an EAGLE-3
    #: head for the model, too.
    draft: Any = None
    #: Steps in flight at once. None: one to eight on a CPU, two to eight on a GPU, see `Pace`.
    overlap: int | None = None
    #: When steps are recorded as CUDA graphs: when a size first occurs, all at open, or never. A
    #: CPU records calls of native code instead, when a size has occurred a few times, or never.
    cuda_graphs: Graphs = "lazy"
    #: Whether the same request gives the same tokens and logprobs to the last bit, whatever else is
    #: computed with it and however its prompt is cut into chunks. Slower, and without CUDA graphs.
    deterministic: bool = False

    #: Tokens a stream holds for a slow consumer before `on_full` applies.
    buffer: int = 256
    on_full: OnFull = "pause"
    #: Seconds without a chunk taken from a full stream before it fails with `StreamStalled`.
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
        with checking_config():
            self._check()

    def _check(self) -> None:
        # Kept as plain integers and floats: threads and native code take no others.
        kept: dict[str, float] = {}
        for name, most in _COUNTS.items():
            kept[name] = check_integer(name, getattr(self, name), 1, most)
        kept["max_adapters"] = check_integer("max_adapters", self.max_adapters, 0, MOST_ADAPTERS)
        for name, most in _OPTIONAL_COUNTS.items():
            if getattr(self, name) is not None:
                kept[name] = check_integer(name, getattr(self, name), 1, most)
        if self.max_context is not None and self.max_context < LEAST_CONTEXT:
            bound = f"must be >= {LEAST_CONTEXT}: a token of a prompt and one of an answer"
            raise InvalidConfig("max_context", self.max_context, bound)
        for name in ("stall_timeout", "drain_timeout", "sampler_timeout"):
            kept[name] = check_seconds(name, getattr(self, name))
        kept["step_timeout"] = check_seconds("step_timeout", self.step_timeout, open_low=True)
        if self.step_target is not None:
            kept["step_target"] = check_seconds("step_target", self.step_target, open_low=True)
        kept["kv_fraction"] = check_real("kv_fraction", self.kv_fraction, 0.0, 1.0, open_low=True)
        kept["pinned_share"] = check_real("pinned_share", self.pinned_share, 0.0, 1.0)
        for name, number in kept.items():
            object.__setattr__(self, name, number)
        for name in ("device", "dtype"):
            _check_name(name, getattr(self, name))
        if isinstance(self.draft, str):
            _check_name("draft", self.draft)
        elif not (self.draft is None or isinstance(self.draft, PathLike) or _loads(self.draft)):
            bound = 'must be a folder, a GGUF file, a hub id, "mtp" or an object with load()'
            raise InvalidConfig("draft", self.draft, bound)
        if self.draft == PREDICTOR and self.deterministic:
            bound = "must be another one with deterministic=True: it is not computed in tiles"
            raise InvalidConfig("draft", self.draft, bound)
        if self.attention == "flashinfer":
            self._check_flashinfer()
        secret = self.prefix_secret
        if secret is not None and not (isinstance(secret, bytes) and 16 <= len(secret) <= 64):
            raise InvalidConfig("prefix_secret", Size("not shown"), "must be 16 to 64 bytes")
        if self.revision is not None:
            _check_name("revision", self.revision)
        for name in ("follow_symlinks", "prefix_cache", "deterministic", "warm_up"):
            check_boolean(name, getattr(self, name))
        for name in ("cache_policy", "scheduler"):
            _check_chosen(name, getattr(self, name))
        for name in ("observers", "proposers"):
            object.__setattr__(self, name, _each_chosen(name, getattr(self, name)))
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)

    def _check_flashinfer(self) -> None:
        wants = {"kernels": self.kernels != "torch", "kv": self.kv == "plain"}
        for name, fits in (wants | {"deterministic": not self.deterministic}).items():
            if not fits:
                bound = f"cannot be with {name}={getattr(self, name)!r}"
                raise InvalidConfig("attention", self.attention, bound)

    def replace(self, **changes: object) -> EngineConfig:
        """A copy with some options changed, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


#: Methods of a draft: by a layer of the model itself, which `draft` names so; by a head beside it.
PREDICTOR: Final = "mtp"
HEAD: Final = "eagle3"
MOST_RUNNING: Final = 65_536
MOST_ADAPTERS: Final = 4096
MOST_ADAPTER_RANK: Final = 4096
#: Options that are integers from 1 on, and the most of those that memory is reserved for at once.
_COUNTS: Final[dict[str, int | None]] = {
    "block_size": None,
    "state_interval": None,
    "max_running": MOST_RUNNING,
    "max_requests": None,
    "max_held_bytes": None,
    "max_step_tokens": None,
    "max_adapter_rank": MOST_ADAPTER_RANK,
    "buffer": MAX_BUFFER,
    "max_prompt_chars": None,
}
#: Tokens of the smallest context: one of a prompt and one of an answer.
LEAST_CONTEXT: Final = 2
_OPTIONAL_COUNTS: Final[dict[str, int | None]] = {
    "cpu_threads": 1024,
    "weight_cache_bytes": None,
    "kv_bytes": None,
    "adapter_bytes": None,
    "max_context": None,
    "overlap": None,
}
_CHOICES: Final = {
    "on_full": get_args(OnFull),
    "cuda_graphs": get_args(Graphs),
    "weights": get_args(Weights),
    "kv": get_args(KV),
    "kernels": get_args(Kernels),
    "attention": get_args(Attention),
    "kernel_trial": get_args(KernelTrial),
    "kernel_tuning": get_args(KernelTuning),
}


def _check_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidConfig(name, value, "must be a non-empty string")


def _loads(value: object) -> bool:
    return not isinstance(value, type) and callable(getattr(value, "load", None))


def _each_chosen(name: str, value: object) -> tuple[object, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidConfig(name, value, "must be a list of names or objects")
    for index, entry in enumerate(value):
        _check_chosen(f"{name}[{index}]", entry)
    return tuple(value)


def _check_chosen(name: str, value: object) -> None:
    try:
        chosen_name(value)
    except ValueError as error:
        raise InvalidConfig(name, value, str(error)) from None
