"""`asyncinfer bench soak`, small: what has to come out on any machine. Counts only, no times."""

from __future__ import annotations

import random
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from asyncinfer import SamplingParams
from asyncinfer.bench import Record, SoakOptions, SoakResult, measure_soak
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.soak.checker import Case, Counts, Reader
from asyncinfer.bench.soak.lateness import Lateness
from asyncinfer.bench.soak.overload import LEAST, measure_overload
from asyncinfer.cli import bench_soak

SMALL: dict[str, Any] = {
    "streams": 60,
    "rate": 3000.0,
    "seconds": 1.0,
    "overload_seconds": 0.3,
    "aborts": 60,
    "cycles": 10,
    "live": 30,
}
LONGER = {**SMALL, "streams": 80, "seconds": 2.0, "aborts": 100, "cycles": 20, "live": 100}
FAULTS = ("lost", "doubled", "wrong", "late")


def check(result: SoakResult, options: dict[str, Any]) -> None:
    load, aborts = result.load, result.aborts
    assert not [figure for figure in result.counts() if figure.value], load.errors
    # Something went on: nothing of nothing is lost. How much is the machine's affair.
    assert load.counts.delivered > 100
    assert load.counts.requests
    assert load.counts.aborted
    assert max(sample.held for sample in load.samples) >= 0.9 * options["streams"]
    assert aborts.freed.count >= options["aborts"] // 2
    assert aborts.left.count >= options["aborts"] // 2
    assert result.cycles.while_opening == options["cycles"] // 10
    assert result.close.told == options["live"]
    assert result.overload.refused.count > result.overload.admitted.count >= 32
    # Of the first sixteen callers, who come in one turn of the event loop, four have a place. On a
    # busy machine these give up before the last callers come.
    assert 12 <= result.impatient.refused <= 36


@pytest.mark.slow
def test_nothing_is_lost() -> None:
    result = measure_soak(SoakOptions(**LONGER))
    check(result, LONGER)
    check_figures(result)


def test_an_overload_has_its_callers_whatever_the_machine_does_meanwhile() -> None:
    run = run_on("asyncio", measure_overload, 0.0)
    assert run.refused.count + run.admitted.count >= LEAST
    assert run.refused.count > run.admitted.count >= 32
    assert run.offered > 0


@pytest.mark.slow
def test_nothing_is_lost_on_uvloop() -> None:
    check(measure_soak(SoakOptions(loop="uvloop", **SMALL)), SMALL)


@pytest.mark.slow
def test_the_command_on_trio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plot = tmp_path / "soak.json", tmp_path / "soak.png"
    options = [f"--{name}={value}" for name, value in SMALL.items() if name != "overload_seconds"]
    options += ["--backend=trio", f"--json={path}", f"--plot={plot}"]
    # No option of the command.
    short = partial(SoakOptions, overload_seconds=SMALL["overload_seconds"])
    monkeypatch.setattr(bench_soak, "SoakOptions", short)
    bench_soak.soak.main(options, standalone_mode=False)
    record = Record.load(path)
    assert record.options == {**record.options, "loop": "trio", "seed": 1, "streams": 60}
    counts = [figure for figure in record.figures if figure.target == 0.0]
    assert len(counts) == 13
    assert not [figure for figure in counts if figure.value]
    assert "tokens after an abort" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_two_lengths_of_the_load_are_refused() -> None:
    """The minutes were taken."""
    with pytest.raises(click.UsageError, match="--seconds and --minutes"):
        bench_soak.soak.main(["--seconds=60", "--minutes=1"], standalone_mode=False)


def check_figures(result: SoakResult) -> None:
    figures = {figure.name: figure for figure in result.figures()}
    assert len(figures) == len(result.figures())
    assert figures["tokens lost"].met
    # Of so short a run the growth of an hour would be a guess.
    assert figures["memory's growth"].target is None
    sample = replace(result.load.samples[0], long_prompt=False, in_use=50.0, kept=None)
    samples = [
        replace(sample, rss=100.0 + 10.0 * late, python_blocks=10**6 * (1 + late), seconds=20.0 * i)
        for i in range(100)
        for late in [i >= 80]
    ]
    # What a long prompt takes for a moment does not count.
    samples[25::10] = [replace(s, rss=900.0, long_prompt=True) for s in samples[25::10]]
    hour = replace(result, load=replace(result.load, samples=tuple(samples), seconds=2000.0))
    (growth,) = [figure for figure in hour.figures() if figure.name == "memory's growth"]
    # Ten MiB between the middles of the first and the last fifth of 80 samples, 1,280 s apart.
    assert (growth.unit, growth.target) == ("MiB/h", 5.0)
    assert growth.value == pytest.approx(10 * 3600 / 1280, rel=0.1)
    assert [f.value for f in hour.figures() if f.name.endswith("from malloc")] == [0.0]
    # Of what the system does not say there is no figure.
    assert not [f for f in hour.figures() if f.name.endswith("keeps for later")]
    (blocks,) = [f for f in hour.figures() if f.name.endswith("memory blocks")]
    assert (blocks.unit, blocks.target) == ("blocks/h", None)
    assert blocks.value == pytest.approx(1e6 * 3600 / 1280, rel=0.1)


CASE = Case("x", SamplingParams(), (1, 2, 3, 4, 5, 6, 7, 8))


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ([(1, 2, 3), (4,), (5, 6, 7, 8)], {}),
        ([(1, 2), (5, 6, 7, 8)], {"lost": 2}),
        ([(1, 2, 3, 4, 5)], {"lost": 3}),
        ([(1, 2), (2, 3, 4, 5, 6, 7, 8)], {"doubled": 1}),
        ([(1, 2), (1, 2), (3, 4, 5, 6, 7, 8)], {"doubled": 2}),
        ([(1, 2, 3, 4), (50, 6), (7, 8)], {"wrong": 2}),
        ([(1, 2, 3, 4, 5, 6, 7, 8), (8,)], {"doubled": 1}),
    ],
)
def test_what_is_missing_or_too_much_is_counted(
    chunks: list[tuple[int, ...]], found: dict[str, int]
) -> None:
    counts = Counts()
    reader = Reader(CASE, counts)
    for chunk in chunks:
        reader.take(chunk)
    reader.end(whole=True)
    told = asdict(counts)
    assert {
        name: told[name] for name in ("lost", "doubled", "wrong", "late") if told[name]
    } == found
    assert counts.delivered == sum(map(len, chunks))


def test_an_answer_that_was_left_is_not_lost() -> None:
    counts = Counts()
    reader = Reader(CASE, counts)
    reader.take((1, 2))
    reader.end(whole=False)
    assert (counts.lost, counts.aborted, counts.requests) == (0, 1, 1)


def test_quantiles_of_lateness() -> None:
    draw = random.Random(1)
    samples = [draw.expovariate(0.5) for _ in range(5000)]
    lateness, other = Lateness(), Lateness()
    for index, sample in enumerate(samples):
        (lateness if index % 2 else other).add(sample)
    lateness.merge(other)
    assert lateness.max == max(samples)
    for share in (0.5, 0.9, 0.99):
        assert lateness.quantile(share) == pytest.approx(np.quantile(samples, share), abs=0.1)
    assert Lateness().quantile(0.99) == 0.0
