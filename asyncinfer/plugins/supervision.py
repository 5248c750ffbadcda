"""`Supervisor`: calls one plugin, so that its faults harm only those who chose it.

Samplers, cache policies, scheduling policies, proposers and observers are called while an engine
runs. A supervisor times each call, catches whatever it raises, reports each kind of fault once, and
says when the plugin may not be called any more (`retired`). Each kind of plugin has its own
replacement.

A call that never returns cannot be ended from within the process. For whoever watches a thread,
`call_in_progress` names the call that it is in and `stack_of` shows its stack.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import PurePath
from threading import get_ident
from typing import Any, Final
from weakref import WeakSet

from asyncinfer.errors import PluginError

__all__ = [
    "Limits",
    "PluginFault",
    "Supervisor",
    "call_in_progress",
    "call_record",
    "interrupted",
    "read_attribute",
    "recorded",
    "stack_of",
]

#: Characters of an exception that a message quotes.
QUOTED: Final = 500
#: Frames of a stack that are shown, the deepest ones.
FRAMES: Final = 30

#: All supervisors; and, by thread, label and method of calls that no supervisor makes.
_supervisors: Final[WeakSet[Supervisor]] = WeakSet()
_recorded: Final[dict[int, tuple[str, str]]] = {}
# Reentrant: a finalizer may make or drop a supervisor while this thread has it.
_lock: Final = threading.RLock()


class PluginFault(PluginError):
    """A plugin raised, answered nonsense or took too long; the message names it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a kind of plugin may do before it is not called any more."""

    #: Seconds that a call may take.
    seconds: float = inf
    #: Seconds that a plugin may owe. Time that a call takes beyond `seconds` is a debt; time that
    #: later calls leave unused pays it off.
    debt: float = inf
    #: Calls of one method in a row that may take longer than `seconds`.
    late: float = inf
    #: Calls of one method in a row that may raise.
    raised: float = inf
    #: The name of the engine option that sets `seconds`, for messages.
    option: str = ""


class Supervisor:
    """Calls one plugin.

    Args:
        label: the plugin's name for messages.
        limits: those of its kind.
        consequence: what happens once it is retired, for messages.
        report: called with the first fault of each kind.
        clock: monotonic seconds; None: no call is ever too slow.
    """

    def __init__(
        self,
        label: str,
        limits: Limits,
        *,
        consequence: str,
        report: Callable[[PluginFault], object] | None,
        clock: Callable[[], float] | None = time.monotonic,
    ) -> None:
        self.label: Final = label
        #: Why the plugin may not be called any more; None while it may. A text, since an exception
        #: would keep its frames alive.
        self.retired: str | None = None
        self._limits = limits
        self._allowed = limits.seconds
        self._consequence = consequence
        self._report = report
        self._clock = clock or _stopped
        self._debt = 0.0
        #: The call in progress, for other threads: its method (None between two calls), thread and
        #: beginning.
        self.method: str | None = None
        self.thread = 0
        self.began = 0.0
        #: Whether a debt or a count of calls in a row has to be updated after a good call.
        self._owes = False
        #: By method: how many calls in a row were late, or raised.
        self._late: dict[str, int] = {}
        self._raised: dict[str, int] = {}
        self._reported: set[str] = set()
        with _lock:
            _supervisors.add(self)

    def call(
        self,
        plugin: object,
        method: str,
        *args: Any,
        check: Callable[[Any], Any] | None = None,
        seconds: float | None = None,
    ) -> Any:
        """`plugin.method(*args)`, or what `check` makes of the answer; `check` runs code of the
        plugin too if it looks into the answer. Both together may take `seconds`, by default those
        of the limits.

        Raises:
            PluginFault: one of them raised, be it a `CancelledError` or a `SystemExit`: only the
                plugin can raise these here.
        """
        allowed = self._allowed if seconds is None else seconds
        failed = "raised"
        self.thread = get_ident()
        self.method = method
        began = self.began = self._clock()
        try:
            answer = getattr(plugin, method)(*args)
            if check is not None:
                failed = "gave no usable answer"
                answer = check(answer)
        except BaseException as error:
            self._end(method, began, allowed)
            if isinstance(error, PluginFault) or interrupted(error):
                raise
            raise self._failed(method, failed, error) from error
        self.method = None
        spent = self._clock() - began
        if spent > allowed or self._owes:
            self._charge(method, spent, allowed)
            self._raised.pop(method, None)
        return answer

    def fault(self, what: str, cause: BaseException | None = None) -> PluginFault:
        """The error of a fault, reported if it is the first of its kind. The text of `what` before
        the first colon is the kind."""
        fault = PluginFault(f"{self.label}: {what}")
        fault.__cause__ = cause
        kind = what.partition(":")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            if self._report is not None:
                self._report(fault)
        return fault

    def retire(self, what: str, cause: BaseException | None = None) -> PluginFault:
        """Set `retired`, so that the plugin is not called any more; the first reason stays."""
        fault = self.fault(f"{what}; {self._consequence}", cause)
        if self.retired is None:
            self.retired = str(fault)
        return fault

    def _end(self, method: str, began: float, allowed: float) -> None:
        """End a call that raised."""
        self.method = None
        self._charge(method, self._clock() - began, allowed)

    def _failed(self, method: str, how: str, error: BaseException) -> PluginFault:
        self._owes = True
        times = self._raised[method] = self._raised.get(method, 0) + 1
        most, what = self._limits.raised, f"{method}() {how}: {_quoted(error)}{_place(error)}"
        if most == 1:
            return self.retire(what, error)
        fault = self.fault(what, error)
        if times >= most:
            self.retire(f"{method}() raised {times} times in a row")
        return fault

    def _charge(self, method: str, spent: float, allowed: float) -> None:
        limits = self._limits
        self._owes = True
        self._debt = max(0.0, self._debt + spent - allowed)
        if self._debt > limits.debt and self.retired is None:
            each = f"{limits.seconds * 1e3:g} ms each"
            self.retire(
                f"{method}() is too slow: it took {spent:.3g} s, "
                f"and its calls {self._debt:.1f} s more than {each}"
            )
        if spent <= allowed:
            self._late.pop(method, None)
            self._owes = bool(self._debt or self._late or self._raised)
        elif limits.late < inf:
            times = self._late[method] = self._late.get(method, 0) + 1
            self.fault(f"is too slow: {method}() took {spent:.3g} s")
            if times >= limits.late:
                self.retire(
                    f"{times} calls of {method}() in a row took more than "
                    f"{limits.option}={limits.seconds:g} s"
                )


def call_in_progress(thread: int) -> str | None:
    """The call into a plugin that a thread is in, such as "rank() of plugin 'mine'"; None if it is
    in none. From any thread; `thread` is a `threading.Thread.ident`."""
    call = call_record(thread)
    return None if call is None else f"{call[1]}() of {call[0]}"


def call_record(thread: int) -> tuple[str, str, object] | None:
    """Label and method of the call that a thread is in, and a value that differs for the next
    call."""
    special = _recorded.get(thread)
    if special is not None:
        return *special, id(special)
    with _lock:
        supervisors = list(_supervisors)
    for supervisor in supervisors:
        method = supervisor.method
        if method is not None and supervisor.thread == thread:
            return supervisor.label, method, supervisor.began
    return None


@contextmanager
def recorded(label: str, method: str) -> Iterator[None]:
    """Record a call that no supervisor makes, for as long as the context is open."""
    thread = get_ident()
    before = _recorded.get(thread)
    _recorded[thread] = (label, method)
    try:
        yield
    finally:
        _recorded.pop(thread, None)
        if before is not None:
            _recorded[thread] = before


def stack_of(thread: int) -> str:
    """The stack of a thread, the deepest frame last; "" if there is no such thread."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    return "".join(traceback.format_stack(frame)[-FRAMES:]).rstrip("\n")


def read_attribute(plugin: object, name: str, default: Any, label: str) -> Any:
    """An attribute that a plugin need not have. Raises `PluginError` where reading it raises."""
    try:
        return getattr(plugin, name, default)
    except BaseException as error:
        if interrupted(error):
            raise
        raise PluginError(f"{label}: {name} cannot be read: {_quoted(error)}") from error


def interrupted(error: BaseException) -> bool:
    """Whether an exception that came out of a plugin is the user's Ctrl-C, which Python raises on
    the main thread only, and not the plugin's."""
    return isinstance(error, KeyboardInterrupt) and (
        threading.current_thread() is threading.main_thread()
    )


def _quoted(error: BaseException) -> str:
    try:
        text = repr(error)
    # The exception's class may be the plugin's, and its repr may raise.
    except Exception:
        text = type(error).__name__
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}..."


def _place(error: BaseException) -> str:
    """The deepest line of the plugin's own file in the traceback."""
    # The first entry is the call in this module.
    entry = None if error.__traceback__ is None else error.__traceback__.tb_next
    if entry is None:
        return ""
    file, name, line = entry.tb_frame.f_code.co_filename, "", 0
    while entry is not None:
        if entry.tb_frame.f_code.co_filename == file:
            name, line = entry.tb_frame.f_code.co_name, entry.tb_lineno
        entry = entry.tb_next
    return f" ({PurePath(file).name}:{line}, in {name})"


def _stopped() -> float:
    return 0.0
