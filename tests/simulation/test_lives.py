"""Random lives of an engine: none fails, the same seed gives the same one, a failure is made small
and can be lived again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncinfer.engine.deadlines import Deadlines
from asyncinfer.protocols import CachedBlock
from asyncinfer.testing import SimulationTrace, simulate
from asyncinfer.testing.simulator import live
from asyncinfer.testing.simulator.life import Life

#: Of the model. Some ten seconds.
STEPS = 10_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1_000_000])
def test_none_fails(seed: int) -> None:
    # faults 1, 4, 5, 6, 7, 9, 10, 11, 16, 17, 20, 21, 22, 23, 24, 26, 28, 50, 51, 52
    report = simulate(seed, STEPS // 2)
    assert not report.failures, report.failures[0].failure
    # Without this the lives might prove nothing.
    for event, least in {
        "ended: whole": 250,
        "ended: cancelled": 40,
        "ended: DeadlineExceeded": 15,
        "ended: RequestFailed": 5,
        "ended: Overloaded": 20,
        "ended: EngineClosed": 5,
        "ended: EngineDead": 5,
        "ended: left": 20,
        "ended: raised": 10,
        "interrupted: decode": 30,
        "fault": 20,
        "jump": 2,
        "deaths": 1,
        "adapter: loaded": 2,
        "answers with an adapter": 3,
        "answers with a format": 5,
        "answers with guidance": 5,
        "late": 20,
        "said: whole": 3,
        "pin: entered": 1,
    }.items():
        assert report.events[event] >= least, f"{event}: {report.events[event]}"


def test_the_same_seed_gives_the_same_life() -> None:
    for seed in (1, 2, 4):
        first, second = live(seed), live(seed)
        assert first.events == second.events
        assert first.events["turn"] > 10


def test_lives_use_one_thread_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads took a fifth of the time, in which they waited for one another."""
    torch = pytest.importorskip("torch")
    used: list[int] = []
    run = Life.run

    def counted(self: Life) -> None:
        used.append(torch.get_num_threads())
        run(self)

    monkeypatch.setattr(Life, "run", counted)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        live(1)
        assert (used, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)


def plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines keep their requests."""
    monkeypatch.setattr(Deadlines, "discard", lambda self, request: None)


def test_a_failure_is_small_and_can_be_lived_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        plant(patch)
        (trace,) = simulate(0, 1000).failures
        assert trace.failure.startswith(("I9", "I13"))
        assert len(trace.actions) <= 8
        assert sum(action[0] == "submit" for action in trace.actions) == 1
        path = tmp_path / "trace.json"
        trace.save(path)
        loaded = SimulationTrace.load(path)
        assert loaded == trace
        assert str(loaded.run()) == trace.failure
    assert loaded.run() is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "seed": 1, "scenario": {"no": 1}}']
)
def test_a_file_that_is_no_trace(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is no trace of a simulation"):
        SimulationTrace.load(path)


class Raising:
    """A cache policy that gives up."""

    def published(self, block: CachedBlock) -> None: ...

    def released(self, block: CachedBlock) -> None:
        raise LookupError("lost")

    def reused(self, block: CachedBlock) -> None: ...

    def removed(self, block: CachedBlock) -> None: ...

    def victims(self, count: int) -> Sequence[int]:
        return []


def test_a_plugin_that_fails_is_named(tmp_path: Path) -> None:
    (trace,) = simulate(0, 2000, cache_policy=Raising, shrink=100).failures
    assert "Raising" in trace.failure
    assert "released" in trace.failure
    path = tmp_path / "trace.json"
    trace.save(path)
    assert "Raising" in json.loads(path.read_text())["plugins"]["cache_policy"]["object"]
    loaded = SimulationTrace.load(path)
    with pytest.raises(ValueError, match=r"cache_policy: .*Raising.* is not in the file"):
        loaded.run()
    assert "Raising" in str(loaded.run(cache_policy=Raising))


def test_a_plugin_that_works_takes_part() -> None:
    report = simulate(0, 300, cache_policy=("ttl", {"seconds": 60.0}), scheduler="priority")
    assert not report.failures
    assert report.steps >= 300


@pytest.mark.parametrize(("steps", "jobs"), [(0, 1), (1, 0)])
def test_bounds(steps: int, jobs: int) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        simulate(0, steps, jobs=jobs)


@pytest.mark.slow
def test_several_processes() -> None:
    one, two = simulate(0, 200), simulate(0, 200, jobs=2)
    assert two.lives % 4 == 0
    assert two.lives >= one.lives
    lives = Counter[str]()
    for seed in range(two.lives):
        lives.update(live(seed).events)
    assert two.events == lives


TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_what_failed_once_fails_no_more(path: Path) -> None:
    assert SimulationTrace.load(path).run() is None
