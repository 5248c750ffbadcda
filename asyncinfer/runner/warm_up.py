"""Runs steps of every size before a GPU's runner serves anybody, so that no kernel compiles while a
stream waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from asyncinfer.kernels.dispatch import wants_triton
from asyncinfer.params import SamplingParams
from asyncinfer.runner.model_runner import ModelRunner
from asyncinfer.scheduler import Join, PageChanges, Step

__all__ = ["SIZES", "warm_up"]

#: Query tokens of a step, and rows that draw: one for each kind of tile, and more than any has.
SIZES: Final = (1, 2, 3, 4, 16, 32, 64, 65)
_WAYS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
)
#: One request for each way in which Triton's kernels draw, from the model's logits unchanged and
#: changed.
_DRAWS: Final = tuple(
    SamplingParams(presence_penalty=penalty, **way) for penalty in (0.0, 0.5) for way in _WAYS
)


def warm_up(runner: ModelRunner) -> None:
    """Have a new runner compute a step of each kind and size, eagerly and as it would be recorded;
    nothing is recorded. A kernel that cannot be launched is a fallback, as in any step.

    A step that lacks memory is left out, and so are larger ones. Raises `DeviceError` where the
    device fails, and `KernelError` in a deterministic runner, which has no fallback.
    """
    executor = runner.executor
    try:
        with executor.unrecorded():
            # A step is computed so if its recording fails.
            with executor.unreplayed() as replays:
                _every_step(runner)
            if replays:
                _every_step(runner)
    except MemoryError:
        return


def _every_step(runner: ModelRunner) -> None:
    spec = runner.spec
    pages = min(group.num_pages for group in spec.groups)
    most = min(spec.max_step_tokens, spec.max_context - 1, pages * spec.block_size - 1)
    for count in _up_to(most):
        for params in _DRAWS if count == 1 else _DRAWS[:1]:
            # One row that decodes, then a prompt.
            _compute(runner, [count], params)
            _compute(runner, [max(count, 2)], params)
    # Two tokens of a first row, so that it is no step of decode rows alone.
    for rows in _up_to(min(spec.max_slots, most - 1)):
        _compute(runner, [1] * rows, _DRAWS[0])
        _compute(runner, [2, *[1] * (rows - 1)], _DRAWS[0])


def _up_to(most: int) -> list[int]:
    """The sizes up to `most`, and `most` itself if it is below the last size."""
    return sorted({min(size, most) for size in SIZES if most > 0})


def _compute(runner: ModelRunner, counts: Sequence[int], params: SamplingParams) -> None:
    """A step of new sequences, whose rows have so many tokens. They share pages, since nobody reads
    their answers."""
    if not wants_triton():
        return
    groups = runner.spec.groups
    step = Step(0, groups=[PageChanges() for _ in groups])
    for slot, count in enumerate(counts):
        pages = list(range(-(-(count + 1) // runner.spec.block_size)))
        tokens = [1 % runner.spec.vocab_size] * count
        step.joins.append(Join(slot, tokens, count, [pages for _ in groups], params, slot))
        step.slots.append(slot)
        step.starts.append(0)
        step.counts.append(count)
        step.samples.append(1)
    runner.collect(runner.launch(step))
