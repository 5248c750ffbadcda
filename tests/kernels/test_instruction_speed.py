"""How fast the instruction for pairs of bfloat16 numbers is."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

from asyncinfer.kernels.native import instruction_speed as module
from asyncinfer.kernels.native.host import compiled, host
from asyncinfer.kernels.native.instruction_speed import pairs_are_fast, speed_code

pytestmark = pytest.mark.skipif(
    (here := host()) is None or not here.rounds, reason="no instructions for bfloat16"
)


def test_the_loops_do_what_is_measured() -> None:
    """Each of 16 sums begins as the numbers, and so many products are added to it."""
    here = host()
    assert here is not None
    text = speed_code(here.lanes)
    for place in compiled("speed", lambda: text, here, ("pairs", "fused"), {}):
        numbers = (ctypes.c_float * here.lanes)(*[1.5] * here.lanes)
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(place)
        call(ctypes.addressof(numbers), 8)
        # Half of a float32 number 1.5 is the bfloat16 number 1.5, the other half 0.
        assert list(numbers) == [1.5 + 16 * (1.5 + 8 * 1.5 * 1.5)] * here.lanes


@pytest.mark.parametrize(("pairs", "fast"), [(1.0, True), (2.0, True), (3.0, False)])
def test_the_least_time_decides(pairs: float, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    here = host()
    assert here is not None
    # One call of each is disturbed.
    durations = itertools.cycle([9.0, 9.0, *[pairs, 1.0] * 9])
    times = []
    clock = 0.0
    for duration in itertools.islice(durations, 20):
        times += [clock, clock + duration]
        clock += duration
    told = iter(times)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(told))
    assert pairs_are_fast.__wrapped__(here) is fast


def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host()
    assert here is not None
    first = pairs_are_fast(here)
    assert first is not None

    def refuse(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(module, "compiled", refuse)
    assert pairs_are_fast(here) is first
