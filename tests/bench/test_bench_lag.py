"""`asyncinfer bench lag`, small: that what is said to go on really goes on. No times."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace

import anyio
import pytest

from asyncinfer.bench import FAKE_MODELS, BenchError, LagOptions, available_loops, measure_lag
from asyncinfer.bench import lag as lag_module
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.ticker import ticking

SMALL = {"streams": 3, "prompt_bytes": 4000, "senders": 1, "seconds": 0.3, "step_ms": 0.5}


@pytest.mark.parametrize("loop", available_loops())
def test_streams_decode_while_prompts_arrive(loop: str) -> None:
    (lag,) = measure_lag(LagOptions(models=["fake-bytes"], loop=loop, repeat=1, **SMALL)).models
    assert lag.tokens > 3
    assert lag.prompts >= 1
    assert lag.refused == 0
    # As many as the machine has time for.
    assert lag.idle.count > 0
    assert lag.busy.count > 0


def test_both_fake_models_have_their_figures() -> None:
    result = measure_lag(LagOptions(repeat=1, freeze=True, **SMALL))
    assert [lag.model for lag in result.models] == list(FAKE_MODELS)
    figures = result.figures()
    assert len({figure.name for figure in figures}) == len(figures) == 10
    assert sorted(figure.target for figure in figures if figure.target) == [5, 5, 50, 50]


@pytest.mark.parametrize(("frozen", "calls"), [(0, ["freeze", "unfreeze"]), (7, ["freeze"])])
def test_what_a_caller_froze_stays_frozen(
    frozen: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    collector = SimpleNamespace(
        collect=gc.collect,
        get_objects=gc.get_objects,
        get_freeze_count=lambda: frozen,
        freeze=lambda: called.append("freeze"),
        unfreeze=lambda: called.append("unfreeze"),
    )
    monkeypatch.setattr(lag_module, "gc", collector)
    measure_lag(LagOptions(models=["fake-bytes"], repeat=1, freeze=True, **SMALL))
    assert called == calls


def test_a_window_without_prompts_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag_module, "LONGEST_WAIT", 0.0)
    # One prompt takes hundreds of steps of 10 ms: none is answered in a tenth of a second.
    options = {**SMALL, "prompt_bytes": 1_000_000, "step_ms": 10.0, "seconds": 0.1}
    with pytest.raises(BenchError, match="0 long prompts"):
        measure_lag(LagOptions(models=["fake-bytes"], repeat=1, **options))


def test_on_a_slow_machine_it_goes_on_until_a_prompt_is_answered() -> None:
    options = {**SMALL, "prompt_bytes": 200_000, "seconds": 0.05}
    (lag,) = measure_lag(LagOptions(models=["fake-bytes"], repeat=1, **options)).models
    assert lag.prompts >= 1


@pytest.mark.parametrize("loop", available_loops())
def test_a_blocked_loop_is_seen(loop: str) -> None:
    async def block() -> list[float]:
        async with ticking() as ticker:
            await anyio.sleep(0.01)
            time.sleep(0.05)  # noqa: ASYNC251 - blocking is the point
            await anyio.sleep(0.01)
        return ticker.late

    late = run_on(loop, block)
    assert max(late) > 40
