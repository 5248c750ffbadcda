"""`asyncinfer bench company`, small: that there is company, and that its end ends it. No times."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from support import children, computed

from asyncinfer.bench import CompanyOptions, measure_company
from asyncinfer.bench.company import CompanyRates, CompanyResult
from asyncinfer.bench.interference import half_busy_program, half_busy_thread
from asyncinfer.builtin import DRAFT_PATH
from asyncinfer.cli import main


def test_every_figure_is_measured() -> None:
    heard: list[str] = []
    options = CompanyOptions(model=str(DRAFT_PATH), streams=(2,), tokens=5, repeat=2, quick=True)
    result = measure_company(options, heard.append)
    (rates,) = result.rates
    assert [len(each) for each in (rates.alone, rates.thread, rates.program)] == [2, 2, 2]
    assert all(rate > 0 for rate in (*rates.alone, *rates.thread, *rates.program))
    assert len(result.figures()) == 3
    assert "streams 2, thread (2 of 2)" in heard


def test_what_is_kept() -> None:
    # The machine became half as fast, and the third repetition beside a thread was disturbed.
    rates = CompanyRates(1, (80.0, 40.0, 40.0), (64.0, 32.0, 10.0), (40.0, 20.0, 20.0))
    alone, thread, program = CompanyResult((rates,)).figures()
    assert (alone.name, alone.value) == ("1 stream, alone", 40.0)
    assert (thread.value, thread.target, thread.met) == (0.8, 0.75, True)
    assert (program.value, program.target) == (0.5, None)


def test_a_thread_computes_inside_the_block_only() -> None:
    def half_busy() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "half busy"]

    with half_busy_thread():
        (thread,) = half_busy()
        while computed(f"self/task/{thread.native_id}") < 0.1:
            pass
    assert not half_busy()


def test_a_program_computes_inside_the_block_only() -> None:
    before = children()
    with half_busy_program():
        (program,) = children() - before
        # To start takes a few hundredths of a second.
        while computed(program) < 0.2:
            pass
    assert children() == before


def test_a_record(tmp_path: Path) -> None:
    file = tmp_path / "company.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "company", "--quick", "-m", str(DRAFT_PATH), "--json", str(file)])
    assert ended.value.code == 0
    record = json.loads(file.read_text("utf-8"))
    assert record["benchmark"] == "company"
    assert record["options"]["streams"] == [1, 2]
    assert [each["streams"] for each in record["detail"]["rates"]] == [1, 2]
