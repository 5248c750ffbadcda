"""`asyncinfer bench http`, small: what is counted, and what must not be left. No times."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from asyncinfer.bench import BenchError, HttpOptions, Record, measure_http
from asyncinfer.bench.http.calls import TURN, measure_calls
from asyncinfer.bench.http.streams import measure_http_streams
from asyncinfer.cli import main


def test_clients_in_another_process_stay_and_leave() -> None:
    options = HttpOptions(streams=6, rate=600.0, seconds=0.3, tokens=8)
    run = anyio.run(measure_http_streams, options)
    assert run.seen.open == 6
    assert run.seen.whole > 0
    assert run.seen.left > 0
    # A role and an end beside what is text, of answers that were read whole alone.
    assert run.seen.events > run.seen.whole
    assert run.kept == 0
    assert run.event_cpu > 0


def test_calls_are_told_apart_from_the_client_s_own() -> None:
    whole, streamed = anyio.run(measure_calls, TURN)
    assert [whole.streamed, streamed.streamed] == [False, True]
    for cost in (whole, streamed):
        assert cost.calls == TURN
        assert min(cost.engine, cost.client, cost.alone) > 0
        # One turn: what is said of it adds up.
        assert cost.added == pytest.approx(cost.client - cost.engine)


def test_a_record(tmp_path: Path) -> None:
    file = tmp_path / "http.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "http", "--quick", "--seconds", "0.1", "--json", str(file)])
    assert ended.value.code == 0
    record = Record.load(file)
    assert record.options["streams"] == 8
    targets = {figure.name: figure.target for figure in record.figures if figure.target is not None}
    assert list(targets.values()) == [10.0, 0.0, 1.0, 300.0, 300.0]


def test_trio_is_refused() -> None:
    with pytest.raises(BenchError, match="uvicorn runs on asyncio and uvloop"):
        measure_http(HttpOptions(loop="trio"))
