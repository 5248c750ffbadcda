"""Wherever in a launch memory runs out, the step is taken back and done again. Faults 23, 24."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncinfer.errors import RequestFailed
from asyncinfer.runner.step_memory import graph_bytes
from asyncinfer.samplers import mirostat
from asyncinfer.scheduler import ChosenSampler

PROMPT = [5, 17, 3, 44, 9, 9, 21, 30, 2, 50, 11]
#: More than a history holds at first.
LONG = [1 + i % 50 for i in range(300)]


class OutOfMemory(TorchDispatchMode):
    """The n-th tensor that takes memory of its own has none; counts them."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.fails = fails
        self.taken = 0
        self.in_model = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_place(leaf) for leaf in tree_leaves((args, kwargs))}
        # The model changes nothing but KV, which is written again: one of its tensors is enough.
        counts = not self.in_model or self.taken == 0
        if counts and any(_place(leaf) not in given for leaf in tree_leaves(result)):
            self.taken += 1
            if self.taken == self.fails:
                raise torch.OutOfMemoryError("not enough")
        return result


def _place(value: Any) -> int:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    return value.untyped_storage()._cdata


def scene(hand: Any, launching: Callable[[Callable[[], object]], object]) -> Any:
    """Steps of two requests, of which the second one joins in a step that `launching` launches."""
    hand.join(0, PROMPT, temperature=1.0, seed=3, min_tokens=1)
    hand.plan.joins[0].samplers = (ChosenSampler(mirostat.Mirostat(tau=2.0), "mirostat"),)
    hand.row(0, 0, len(PROMPT))
    tokens = hand.step().tokens + hand.decode(0, len(PROMPT), 2)
    position = len(PROMPT) + 2

    def both() -> None:
        hand.join(1, LONG, temperature=0.9, top_k=9, seed=5, logprobs=2, prompt_logprobs=1)
        hand.row(0, position, 1)
        hand.row(1, 0, len(LONG))
        hand.plan.prompt_logprobs[1] = 1

    both()
    try:
        flight = launching(hand.launch)
    except MemoryError:
        # As the scheduler does.
        hand.leave(1)
        both()
        flight = hand.launch()
    result = hand.runner.collect(flight)
    if result.failed:
        return result.failed
    tokens += result.tokens
    for step in range(1, 4):
        hand.row(0, position + step, 1)
        hand.row(1, len(LONG) + step - 1, 1)
        tokens += hand.step().tokens
    scores = result.prompt_logprobs[1], result.logprobs[1]
    return tokens, scores


@pytest.fixture(params=["cpu", "gpu"])
def make(request: pytest.FixtureRequest, make_hand: Any) -> Any:
    if request.param == "cpu":
        yield make_hand
    else:
        with FakeDevice() as device:
            yield lambda **options: make_hand(accelerator=device, **options)


def test_a_step_without_memory_is_done_again_whatever_lacked_it(make: Any, make_hand: Any) -> None:

    def run(mode: OutOfMemory) -> Any:
        hand = make()
        decoder = hand.runner.decoder

        def forward(*arguments: Any, real: Any = decoder.forward) -> torch.Tensor:
            mode.in_model = True
            try:
                return real(*arguments)  # type: ignore[no-any-return]
            finally:
                mode.in_model = False

        def launching(launch: Callable[[], object]) -> object:
            with mode:
                return launch()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder, "forward", forward)
            return scene(hand, launching)

    undisturbed = OutOfMemory(0)
    expected = run(undisturbed)
    assert undisturbed.taken > 60
    plugins_own = 0
    tried = range(1, undisturbed.taken + 1, 3)
    if make is not make_hand:
        # The fake device takes its time.
        tried = range(2, undisturbed.taken + 1, 17)
    for fails in tried:
        found = run(OutOfMemory(fails))
        if isinstance(found, dict):
            # What a sampler lacks is its own fault, and costs its own row.
            assert all(isinstance(error, RequestFailed) for error in found.values())
            assert "mirostat" in str(found[0])
            plugins_own += 1
        else:
            assert found == expected, f"tensor {fails} of {undisturbed.taken}"
    assert plugins_own <= len(tried) / 3


def test_without_pinned_memory_a_step_is_done_again(make_hand: Any) -> None:
    """Where changes wait for memory, none of them is lost."""
    with FakeDevice() as device:
        expected = scene(make_hand(accelerator=device), lambda launch: launch())
        fails = 0
        while True:
            fails += 1
            taken = 0

            def pinned(size: int, real: Any = device.pinned, most: int = fails) -> torch.Tensor:
                nonlocal taken
                taken += 1
                if taken == most:
                    raise RuntimeError("CUDA error: out of memory")
                return real(size)  # type: ignore[no-any-return]

            def launching(launch: Callable[[], object], patched: Any = pinned) -> object:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(device, "pinned", patched)
                    return launch()

            assert scene(make_hand(accelerator=device), launching) == expected, fails
            if taken < fails:
                break
        assert fails > 2


def test_what_is_no_lack_of_memory_is_raised(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hand = make()
    monkeypatch.setattr(
        hand.runner.history, "stage", lambda _: (_ for _ in ()).throw(RuntimeError("broken"))
    )
    hand.join(0, PROMPT)
    hand.row(0, 0, len(PROMPT))
    with pytest.raises(RuntimeError, match="broken"):
        hand.launch()


def test_a_history_on_a_device_never_grows_and_is_counted(make_hand: Any, decoder: Any) -> None:
    from asyncinfer.config import EngineConfig

    with FakeDevice() as device:
        for options in ({}, {"graphs": "off"}, {"deterministic": True}):
            hand = make_hand(accelerator=device, **options)
            assert hand.runner.history.capacity == hand.spec.max_context + 1
    bare = EngineConfig(cuda_graphs="off", max_running=6)
    assert graph_bytes(bare, decoder.config, torch.float32) == 4 * 7 * 641


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_chunk_that_is_not_finite_fails_before_it_is_published(  # fault 26
    make_hand: Any, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It draws nothing, so that nobody looked at it; its blocks went into the prefix cache."""
    hand = make_hand()
    decoder = hand.runner.decoder
    forward = decoder.forward

    def broken(*arguments: Any) -> torch.Tensor:
        hidden: torch.Tensor = forward(*arguments)
        # Rows of one token come first.
        hidden[1 + 4 + 3, 5] = bad
        return hidden

    hand.join(0, PROMPT)
    hand.row(0, 0, 11)
    hand.step()
    monkeypatch.setattr(decoder, "forward", broken)
    for slot in (1, 2, 3):
        hand.join(slot, PROMPT)
        hand.row(slot, 0, 4, samples=0)
    hand.row(0, 11, 1)
    result = hand.step()
    assert list(result.failed) == [1]
    assert "not finite" in str(result.failed[1])
    assert len(result.tokens) == 1
