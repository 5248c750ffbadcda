"""`examine_machine`: what the engine finds on this machine, as one report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from asyncinfer import SyncEngine
from asyncinfer.doctor.machine import Machine
from asyncinfer.doctor.products import ProductTimes, product_times, read_bandwidth
from asyncinfer.doctor.trials import Trial, trials
from asyncinfer.doctor.tuning import TunedKernel, tuned_kernels
from asyncinfer.kernels.figures import KernelFigures
from asyncinfer.kernels.flashinfer import flashinfer_is_missing
from asyncinfer.kernels.trial import TrialShapes
from asyncinfer.kernels.trust import find_flashinfer_fault, find_triton_fault
from asyncinfer.models import ModelConfig, parse_config
from asyncinfer.models.layouts import scheme_layouts
from asyncinfer.planner import config_of
from asyncinfer.runner.device import choose_dtype, trial_shapes, use_cpu_threads

__all__ = ["Report", "examine_machine"]

#: Tokens of a step that products are timed at.
ROWS: Final = (1, 4, 16, 64)
#: The largest difference between a token's logprob when drawn and as part of a prompt.
_AGREE: Final = 1e-3
_SLOW: Final = "torch's operators, several times as slow"
_OWN: Final = "Triton's kernels, where attention='flashinfer' was asked for"
_TEXT, _DRAWN = "Once upon a time there was a small engine that", 24
#: A Llama of a billion parameters, where no model is named.
_BILLION: Final = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was looked at."""

    machine: Machine
    #: Threads that products and bandwidth were measured with.
    threads: int
    #: Bytes a second that they read of memory.
    bandwidth: float
    trials: tuple[Trial, ...]
    #: Whose matrices were timed.
    model: str
    products: tuple[ProductTimes, ...]
    #: Empty unless asked for, and without a GPU.
    tuned: tuple[TunedKernel, ...] = ()
    #: Seconds that it all took.
    seconds: float

    @property
    def fallbacks(self) -> tuple[Trial, ...]:
        """What the engine does without, though this machine should have it."""
        return tuple(trial for trial in self.trials if trial.fell_back)

    def best(self, rows: int) -> ProductTimes:
        """What weights are best held as for steps of so many tokens."""
        return max(self.products, key=lambda each: each.tokens_per_second(rows))


def examine_machine(
    model: str | Path | None = None,
    *,
    threads: int | None = None,
    rows: tuple[int, ...] = ROWS,
    tune: bool = False,
    told: Callable[[str], object] = lambda what: None,
) -> Report:
    """Look at this machine, try what the engine computes with, and time it.

    Args:
        model: a folder, a GGUF file, a hub id or a name, whose shapes products are timed at; only
            its config or header is read. None: a Llama of a billion parameters.
        threads: of products; None: torch's number.
        rows: the tokens of a step, 1 among them.
        tune: measure what each GPU's kernels are fastest with, and keep it for engines that open.
        told: called with what is done next.

    Raises `ModelLoadError` where the model's config cannot be read.
    """
    began = time.perf_counter()
    config, title = _config(model)
    machine = Machine.now()
    told("trials")
    tried = tuple(all_trials(config))
    tuned = tuple(tuned_kernels(config, told)) if tune else ()
    # Once before each kind of products: another program may have the memory at one moment.
    bandwidths = []
    over = threading.Event()

    def next_kind(held: str) -> None:
        if over.is_set():
            raise CancelledError
        told("memory bandwidth")
        bandwidths.append(read_bandwidth())
        told(f"products, {held}")

    threads = torch.get_num_threads() if threads is None else threads
    # A thread of its own, since a number of threads is chosen for good.
    with ThreadPoolExecutor(1, initializer=use_cpu_threads, initargs=(threads,)) as pool:
        timed = pool.submit(product_times, config, rows, next_kind)
        try:
            products = timed.result()
        finally:
            # After a Ctrl-C the thread is waited for.
            over.set()
    return Report(
        machine=machine,
        threads=threads,
        bandwidth=max(bandwidths),
        trials=tried,
        model=title,
        products=products,
        tuned=tuned,
        seconds=time.perf_counter() - began,
    )


def _config(model: str | Path | None) -> tuple[ModelConfig, str]:
    if model is None:
        return parse_config(_BILLION), "a Llama of 1.2 B parameters"
    return config_of(model), str(model)


def all_trials(config: ModelConfig) -> Iterator[Trial]:
    """The trials of this CPU, of each GPU at the model's own shapes, and of a whole engine."""
    yield from trials()
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        yield from _gpu_trials(config, torch.device("cuda", index))
    yield _engine_trial()


def _gpu_trials(config: ModelConfig, device: torch.device) -> Iterator[Trial]:
    """Triton's kernels, tried as by an opening engine but without its cached verdicts: each right
    one, then all of them. New verdicts are kept for the next engine. FlashInfer's kernels are tried
    where it is installed."""
    dtype = choose_dtype("auto", config.dtype or "bfloat16", device)
    shapes = trial_shapes(config, dtype, dtype, scheme_layouts(config))
    yield from _tried(find_triton_fault, "Triton's kernels", _SLOW, shapes, device)
    if flashinfer_is_missing() is None and dtype is not torch.float32:
        yield from _tried(find_flashinfer_fault, "FlashInfer's attention", _OWN, shapes, device)


def _tried(
    find_fault: Callable[..., str | None],
    name: str,
    instead: str,
    shapes: TrialShapes,
    device: torch.device,
) -> Iterator[Trial]:
    kernels = list[KernelFigures]()
    fault = find_fault(shapes, device, "process", measured=kernels.append)
    of = "" if find_fault is find_triton_fault else " by FlashInfer"
    for each in kernels:
        yield Trial(
            name=f"{each.kernel}{of} on {device}",
            verdict="right",
            error=each.error,
            allowed=each.allowed,
            seconds=each.seconds,
            floor=each.floor,
        )
    trial = Trial(name=f"{name} on {device}, in {shapes.dtype}", verdict="right")
    if fault is not None:
        trial = replace(trial, verdict="wrong", instead=f"{instead} ({fault})")
    yield trial


def _engine_trial() -> Trial:
    """Whether decode steps give the logprobs that a prompt's step gives for the same tokens."""
    trial = Trial(name="an engine: decode steps and prompts agree", verdict="right")
    with SyncEngine(device="cpu", dtype="float32") as engine:
        drawn = engine.generate(_TEXT, max_tokens=_DRAWN, temperature=0.0, logprobs=0)
        (score,) = engine.score(_TEXT, [drawn.token_ids])
    one_by_one = (token.logprob for token in drawn.logprobs or ())
    pairs = zip(one_by_one, score.logprobs, strict=True)
    error = float(torch.tensor([abs(one - other) for one, other in pairs]).max())
    if not error <= _AGREE:
        trial = replace(trial, verdict="wrong", instead="nothing: answers are not to be trusted")
    return replace(trial, error=error, allowed=_AGREE)
