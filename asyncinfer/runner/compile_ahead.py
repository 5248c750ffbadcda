"""Compiles kernels on separate threads while a model's weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from asyncinfer.config import PREDICTOR, EngineConfig
from asyncinfer.kernels.choices import current_choices, use_choices
from asyncinfer.kernels.dispatch import wants_triton
from asyncinfer.kernels.rehearsal import Launch, rehearsing
from asyncinfer.machine import usable_cores
from asyncinfer.models.load import outline_model
from asyncinfer.runner.rehearsal import rehearse
from asyncinfer.stats import LoadProgress
from asyncinfer.weights import OnProgress

__all__ = ["CompileAhead", "compiling"]

#: The most compilers at once: each takes a core, and the GIL for a part of its time.
_MOST_THREADS: Final = 4
#: Seconds between two reports while kernels compile: the callback may cancel the opening.
_REPORT_EVERY: Final = 0.1


class CompileAhead:
    """Compiles on a few threads the kernels that a rehearsal asks for, each once.

    Failures here are ignored: the warm-up compiles whatever is missing once the model is loaded,
    and its failures become fallbacks.

    Args:
        device: whose kernels they are.
        rehearse: called on one of the threads, in a rehearsal for `device`.
        progress: called with the bytes of `loaded`, and the kernels so far.
    """

    def __init__(
        self,
        device: torch.device,
        rehearse: Callable[[], object],
        progress: OnProgress | None,
    ) -> None:
        self._device = device
        self._progress = progress
        self._last = LoadProgress(0, 0)
        self._seen: set[Hashable] = set()
        self._kernels: list[Future[object]] = []
        threads = 1 + min(_MOST_THREADS, usable_cores())
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="asyncinfer-compile")
        self._rehearsal: Future[object] = self._pool.submit(self._rehearse, rehearse)

    def loaded(self, step: LoadProgress) -> None:
        """Note how far the weights are loaded, and report it. Raises what `progress` raises."""
        self._last = step
        if self._progress is not None:
            done = [kernel.done() for kernel in self._kernels]
            self._progress(replace(step, kernels_done=sum(done), kernels_total=len(done)))

    def wait(self) -> None:
        """Wait until all is compiled, and report it. Raises what `progress` raises."""
        while pending := [each for each in (self._rehearsal, *self._kernels) if not each.done()]:
            self.loaded(self._last)
            wait(pending, _REPORT_EVERY, FIRST_COMPLETED)
        self.loaded(self._last)

    def close(self) -> None:
        """Compile nothing more. Running compilations are not awaited."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _rehearse(self, rehearse: Callable[[], object]) -> None:
        with rehearsing(self._device, self._want):
            rehearse()

    def _want(self, launch: Launch) -> None:
        if launch.key not in self._seen:
            self._seen.add(launch.key)
            self._kernels.append(self._pool.submit(self._compiled, launch))

    def _compiled(self, launch: Launch) -> None:
        # Triton compiles for the thread's current device.
        with torch.cuda.device(self._device):
            launch.compile()


@contextmanager
def compiling(
    folder: Path,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    vocab_size: int,
    progress: OnProgress | None,
    head: Path | None = None,
) -> Iterator[OnProgress | None]:
    """Compile the kernels for steps of the model in `folder`, while the block loads its weights;
    leaving the block waits for the compilers. Yields the callback for the weights' progress.
    Nothing is compiled where no warm-up would do so, nor for a deterministic engine, which tries
    its tiles at once."""
    warms_up = config.warm_up and not config.deterministic and wants_triton()
    if device.type != "cuda" or not warms_up:
        yield progress
        return

    # The rehearsal has a thread of its own, which must launch what this thread will.
    choices = current_choices()

    def rehearsal() -> None:
        use_choices(choices)
        decoder = outline_model(
            folder,
            device,
            dtype,
            max_context=config.max_context,
            storage=config.weights,
            predictor=config.draft == PREDICTOR,
            head=head,
        )
        rehearse(decoder, config, device, vocab_size)

    ahead = CompileAhead(device, rehearsal, progress)
    try:
        yield ahead.loaded
        ahead.wait()
    finally:
        ahead.close()
