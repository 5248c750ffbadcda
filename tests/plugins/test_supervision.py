"""One supervisor for plugins of every kind: what it catches, times, reports and names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from asyncinfer.errors import PluginError
from asyncinfer.plugins.supervision import (
    Limits,
    PluginFault,
    Supervisor,
    call_in_progress,
    read_attribute,
    stack_of,
)


class Plugin:
    """Does as it is told, and takes so long by the clock of the test."""

    def __init__(self, work: Callable[[], Any] = lambda: None) -> None:
        self.work = work
        self.now = self.seconds = 0.0

    def act(self) -> Any:
        self.now += self.seconds
        return self.work()

    other = act


def supervised(
    plugin: Plugin, limits: Limits | None = None, reports: list[str] | None = None
) -> Supervisor:
    told: list[str] = [] if reports is None else reports
    return Supervisor(
        "plugin 'mine'",
        limits or Limits(),
        consequence="something else takes over",
        report=lambda fault: told.append(str(fault)),
        clock=lambda: plugin.now,
    )


def raising(error: BaseException) -> Callable[[], Any]:
    def work() -> Any:
        raise error

    return work


class Unprintable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("v"),
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
        Unprintable(),
        StopIteration(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_plugin_raises_is_its_fault(error: BaseException) -> None:
    plugin, reports = Plugin(raising(error)), list[str]()
    supervisor = supervised(plugin, reports=reports)
    for _ in range(3):
        with pytest.raises(PluginFault) as caught:
            supervisor.call(plugin, "act")
        assert caught.value.__cause__ is error
        assert isinstance(caught.value, PluginError)
    (report,) = reports
    assert report.startswith("plugin 'mine': act() raised: ")
    assert type(error).__name__ in report
    assert report.endswith(", in work)"), "the deepest line of the plugin's own file"
    assert "(test_supervision.py:" in report


def test_a_ctrl_c_is_the_users_on_the_main_thread_alone() -> None:
    plugin = Plugin(raising(KeyboardInterrupt()))
    supervisor, caught = supervised(plugin), list[BaseException]()
    with pytest.raises(KeyboardInterrupt):
        supervisor.call(plugin, "act")

    def elsewhere() -> None:
        try:
            supervisor.call(plugin, "act")
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    (fault,) = caught
    assert isinstance(fault, PluginFault)


def test_a_long_message_is_cut() -> None:
    plugin = Plugin(raising(ValueError("x" * 100_000)))
    with pytest.raises(PluginFault) as caught:
        supervised(plugin).call(plugin, "act")
    assert len(str(caught.value)) < 1000


def test_a_method_that_is_not_there_or_whose_look_up_raises() -> None:
    class Hollow:
        @property
        def act(self) -> Any:
            raise OSError("gone")

    supervisor = supervised(Plugin())
    with pytest.raises(PluginFault, match=r"act\(\) raised: OSError"):
        supervisor.call(Hollow(), "act")
    with pytest.raises(PluginFault, match=r"observe\(\) raised: AttributeError"):
        supervisor.call(Hollow(), "observe")
    with pytest.raises(PluginError, match="plugin 'mine': act cannot be read: OSError"):
        read_attribute(Hollow(), "act", None, "plugin 'mine'")
    assert read_attribute(Hollow(), "other", 3, "plugin 'mine'") == 3


def test_the_answer_is_checked_as_part_of_the_call() -> None:
    plugin, reports = Plugin(lambda: "seven"), list[str]()
    supervisor = supervised(plugin, reports=reports)
    assert supervisor.call(plugin, "act", check=len) == 5
    with pytest.raises(PluginFault, match=r"act\(\) gave no usable answer: ValueError"):
        supervisor.call(plugin, "act", check=int)
    assert len(reports) == 1


def test_debts_are_paid_off() -> None:
    plugin, reports = Plugin(), list[str]()
    supervisor = supervised(plugin, Limits(seconds=1.0, debt=10.0), reports)
    for _ in range(20):
        plugin.seconds = 10.0
        supervisor.call(plugin, "act")
        plugin.seconds = 0.0
        for _ in range(9):
            supervisor.call(plugin, "other")
    assert supervisor.retired is None
    plugin.seconds = 6.5
    supervisor.call(plugin, "act")
    assert supervisor.retired is None
    supervisor.call(plugin, "act", seconds=1.9)
    assert supervisor.retired is not None
    assert reports == [supervisor.retired]
    assert "mine': act() is too slow: it took 6.5 s, and its calls 10.1 s more" in reports[0]
    assert reports[0].endswith("; something else takes over")


def test_a_call_that_raises_late_owes_its_time() -> None:
    plugin = Plugin(raising(ValueError("v")))
    supervisor = supervised(plugin, Limits(seconds=1.0, debt=10.0))
    plugin.seconds = 30.0
    with pytest.raises(PluginFault):
        supervisor.call(plugin, "act")
    assert supervisor.retired is not None


def test_late_calls_in_a_row_are_counted_by_method() -> None:
    plugin, reports = Plugin(), list[str]()
    limits = Limits(seconds=1.0, late=3, option="sampler_timeout")
    supervisor = supervised(plugin, limits, reports)
    for late in (True, True, False, True, True):
        plugin.seconds = 2.0 * late
        supervisor.call(plugin, "act")
        plugin.seconds = 0.0
        # What another method leaves of its time excuses nothing.
        supervisor.call(plugin, "other")
    assert supervisor.retired is None
    plugin.seconds = 2.0
    supervisor.call(plugin, "act")
    assert supervisor.retired is not None
    slow, retired = reports
    assert "is too slow: act() took 2 s" in slow
    assert "3 calls of act() in a row took more than sampler_timeout=1 s; something" in retired


def test_calls_in_a_row_that_raise() -> None:
    plugin, reports = Plugin(), list[str]()
    supervisor = supervised(plugin, Limits(raised=3), reports)
    for error in (True, True, False, True, True, True):
        plugin.work = raising(ValueError("v")) if error else lambda: None
        assert supervisor.retired is None
        try:
            supervisor.call(plugin, "act")
        except PluginFault:
            assert error
    assert supervisor.retired == reports[1]
    assert reports[1] == "plugin 'mine': act() raised 3 times in a row; something else takes over"


def test_one_fault_may_be_enough() -> None:
    plugin, reports = Plugin(raising(ValueError("v"))), list[str]()
    supervisor = supervised(plugin, Limits(raised=1), reports)
    with pytest.raises(PluginFault, match="something else takes over"):
        supervisor.call(plugin, "act")
    assert reports == [supervisor.retired]


def test_the_call_that_a_thread_is_in_is_named_and_shown() -> None:
    begun, let_go = threading.Event(), threading.Event()

    def stuck_in_here() -> None:
        begun.set()
        assert let_go.wait(120)

    plugin = Plugin(stuck_in_here)
    supervisor = supervised(plugin)
    thread = threading.Thread(target=lambda: supervisor.call(plugin, "act"))
    thread.start()
    assert begun.wait(120)
    assert thread.ident is not None
    assert call_in_progress(thread.ident) == "act() of plugin 'mine'"
    assert call_in_progress(threading.get_ident()) is None
    stack = stack_of(thread.ident)
    assert "in stuck_in_here" in stack
    assert stack.index("in stuck_in_here") > stack.index("in call")
    let_go.set()
    thread.join()
    assert call_in_progress(thread.ident) is None
    assert stack_of(-1) == ""
