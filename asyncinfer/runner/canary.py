"""A canary: a short answer in each way that a GPU's runner computes one, before anybody asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import torch

from asyncinfer.config import EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels.dispatch import KernelError, distrusted, use_triton
from asyncinfer.params import SamplingParams
from asyncinfer.runner.accelerator import DeviceError
from asyncinfer.runner.model_runner import ModelRunner
from asyncinfer.runner.warm_up import warm_up
from asyncinfer.scheduler import Join, PageChanges, Step, StepResult

__all__ = ["check_answer", "check_opened"]

_PROMPT: Final = 40
_ANSWER: Final = 8
#: Most nats that the answer's logprobs may be off, on average over its tokens. What is computed
#: wrongly is off by several, and rounding by hundredths.
_ALLOWED: Final = {torch.float32: 0.05, torch.float16: 0.5, torch.bfloat16: 0.5}
#: Logprobs of tokens, and of the likeliest one in their place.
_Scores = list[tuple[float, float]]


def check_opened(runner: ModelRunner, config: EngineConfig) -> None:
    """`warm_up`, then `check_answer` where `config` leaves a choice. Raises `ModelLoadError` if the
    device fails, if `config` requires Triton's kernels and the answer is wrong, and if a
    deterministic engine cannot launch a kernel."""
    if config.kernels == "torch":
        return
    if config.warm_up:
        try:
            warm_up(runner)
        except (DeviceError, KernelError) as error:
            raise ModelLoadError(str(error)) from error
    if config.deterministic:
        return
    if distrusted() is None:
        try:
            check_answer(runner)
        except DeviceError as error:
            raise ModelLoadError(str(error)) from error
    if config.kernels == "triton" and distrusted() is not None:
        raise ModelLoadError(f"kernels='triton': {distrusted()}")


def check_answer(runner: ModelRunner) -> str | None:
    """Have a runner that has served nobody answer a prompt of 40 tokens with 8, in recorded steps
    if it records any: two prompt chunks, of which the second is a replay. Triton's kernels and
    torch's operators then score the answer token by token, without replays.

    If the scores differ, the runner does without FlashInfer, and if they still differ, without
    Triton's kernels. If torch would not have drawn the answer, it does without recorded steps.
    Returns what is wrong. A runner is not checked if it is too small for such an answer, lacks
    memory for it, or has a model that torch's operators cannot compute. Raises `DeviceError` where
    the device fails."""
    spec, total = runner.spec, _PROMPT + _ANSWER
    pages = -(-total // spec.block_size)
    least = min(group.num_pages for group in spec.groups)
    if spec.max_context <= total or spec.max_step_tokens < _PROMPT or least < pages:
        return None
    try:
        answer = _answered(runner, pages)
        with runner.executor.unreplayed():
            found = _scored(runner, answer, pages)
        if distrusted() is not None:
            return distrusted()
        use_triton(False)
        try:
            with runner.executor.unreplayed():
                right = _scored(runner, answer, pages)
        except DeviceError:
            raise
        except RuntimeError:
            return None  # There is nothing to compare with.
        finally:
            use_triton(True)
    except MemoryError:
        return None
    if any(score == -torch.inf for score, _ in right):
        return None  # The model gives no numbers, whatever computes it.
    most = _ALLOWED[runner.decoder.dtype]
    off = _mean(abs(one - other) for (one, _), (other, _) in zip(found, right, strict=True))
    fault = None
    if not off <= most:
        fault = f"an answer's logprobs are off by {off:.2g} on average"
        if runner.leave_flashinfer(fault):
            return check_answer(runner)
        runner.distrust(fault)
    elif not (lost := _mean(best - one for one, best in right)) <= most:
        fault = f"an answer of recorded steps is {lost:.2g} nats a token worse than it should be"
        runner.stop_replaying(fault)
    return fault


def _answered(runner: ModelRunner, pages: int) -> list[int]:
    """The prompt in two chunks, then greedy tokens, one per step."""
    vocab = runner.spec.vocab_size
    tokens = [(7_919 * i + 11) % vocab for i in range(_PROMPT)]
    half = _PROMPT // 2
    step = _joining(runner, tokens, pages)
    _add_row(step, 0, half, 0)
    _computed(runner, step)
    step = _empty(runner, half)
    _add_row(step, half, _PROMPT - half, 1)
    tokens += _computed(runner, step).tokens
    for position in range(_PROMPT, _PROMPT + _ANSWER - 1):
        step = _empty(runner, position)
        _add_row(step, position, 1, 1)
        tokens += _computed(runner, step).tokens
    # A step that went wrong may give anything.
    return [min(max(token, 0), vocab - 1) for token in tokens]


def _scored(runner: ModelRunner, tokens: Sequence[int], pages: int) -> _Scores:
    """The answer's logprobs, read as the end of a prompt, a step for each token."""
    scores: _Scores = []
    for start in (0, *range(_PROMPT, _PROMPT + _ANSWER - 1)):
        step = _empty(runner, start) if start else _joining(runner, tokens, pages)
        _add_row(step, start, 1 if start else _PROMPT, 0)
        step.prompt_logprobs[0] = 1
        result = _computed(runner, step)
        if result.failed:
            return [(-torch.inf, 0.0)] * _ANSWER
        last = list(result.prompt_logprobs[0])[-1]
        scores.append((last.logprob, last.top[0][1]))
    return scores


def _empty(runner: ModelRunner, number: int) -> Step:
    return Step(number, groups=[PageChanges() for _ in runner.spec.groups])


def _joining(runner: ModelRunner, tokens: Sequence[int], pages: int) -> Step:
    step = _empty(runner, 0)
    tables = [list(range(pages)) for _ in runner.spec.groups]
    params = SamplingParams(temperature=0.0)
    step.joins.append(Join(0, list(tokens), len(tokens), tables, params, 0))
    return step


def _add_row(step: Step, start: int, count: int, samples: int) -> None:
    step.slots.append(0)
    step.starts.append(start)
    step.counts.append(count)
    step.samples.append(samples)


def _computed(runner: ModelRunner, step: Step) -> StepResult:
    return runner.collect(runner.launch(step))


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
