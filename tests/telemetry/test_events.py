"""Events: silent until the host listens, and never in its way."""

from __future__ import annotations

import contextvars
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from asyncinfer.telemetry import EVENTS, emit

LOGGER = logging.getLogger("asyncinfer")


class Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def listener() -> Iterator[Listener]:
    handler = Listener()
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
    yield handler
    LOGGER.setLevel(logging.NOTSET)
    LOGGER.removeHandler(handler)


def test_importing_and_emitting_changes_and_prints_nothing() -> None:
    program = """
import logging, structlog
root = logging.getLogger()
def state():
    kind = logging.getLoggerClass()
    return root.handlers[:], root.level, root.filters[:], kind, logging.raiseExceptions

before = state()
config = structlog.get_config().copy()
import asyncinfer
from asyncinfer.telemetry import EVENTS, emit
for name in EVENTS:
    emit(name, request_id="r", error="e")
assert before == state()
assert config == structlog.get_config() and not structlog.is_configured()
assert logging.getLogger("asyncinfer").level == logging.NOTSET
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_event_is_a_message_and_data(listener: Listener) -> None:
    emit("request_failed", request_id="req-1", error="100 % broken")
    (record,) = listener.records
    assert record.getMessage() == "request_failed request_id='req-1' error='100 % broken'"
    assert record.levelno == logging.WARNING
    assert vars(record)["asyncinfer"] == {
        "event": "request_failed",
        "request_id": "req-1",
        "error": "100 % broken",
    }


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_levels(listener: Listener, name: str) -> None:
    LOGGER.setLevel(EVENTS[name].level)
    emit(name, request_id="r")
    LOGGER.setLevel(EVENTS[name].level + 1)
    emit(name, request_id="r")
    assert [record.levelno for record in listener.records] == [EVENTS[name].level]


def test_an_unknown_event_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        emit("request_vanished")


def test_the_callers_context_variables_join(listener: Listener) -> None:
    with structlog.contextvars.bound_contextvars(trace="abc", event="checkout", request_id="web-1"):
        context = contextvars.copy_context()
    emit("request_finished", context, request_id="r")
    # Also while the host itself runs in that context.
    context.run(emit, "request_finished", context, request_id="s")
    emit("request_finished", request_id="t")
    traces = [vars(record)["asyncinfer"].get("trace") for record in listener.records]
    assert traces == ["abc", "abc", None]
    # The event's own name and fields go before variables of the same name.
    data = vars(listener.records[0])["asyncinfer"]
    assert (data["event"], data["request_id"]) == ("request_finished", "r")
    assert listener.records[0].getMessage() == "request_finished trace='abc' request_id='r'"


def test_the_hosts_structlog_configuration_is_its_own(listener: Listener) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("the host's processors are not for us")

    structlog.configure(processors=[refuse])
    try:
        emit("engine_loaded", model="m", blocks=1)
    finally:
        structlog.reset_defaults()
    assert len(listener.records) == 1


def test_a_handler_or_filter_that_raises_does_not_reach_the_engine(
    listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: logging.LogRecord) -> bool:
        raise OSError("disk full")

    LOGGER.addFilter(broken)
    try:
        emit("request_failed", request_id="r", error="e")
    finally:
        LOGGER.removeFilter(broken)
    assert listener.records == []
    assert "disk full" in capsys.readouterr().err


def test_an_event_imports_nothing() -> None:
    """It may be told by the decode thread, between two steps."""
    program = """
import logging, sys
from asyncinfer.telemetry import emit
logging.getLogger("asyncinfer").addHandler(logging.StreamHandler())
before = set(sys.modules)
emit("request_failed", request_id="r", error="e")
assert {name.partition(".")[0] for name in {*sys.modules} - before} <= {"asyncinfer"}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stderr) == (0, "request_failed request_id='r' error='e'\n")
