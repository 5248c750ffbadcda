"""LLVM's code that has a team of threads make recorded calls, one after the other.

Each thread goes through all calls. A region of OpenMP for each call would end when its last thread
does, and where another program has the core of one, the others would wait for its next turn. Here
whoever comes to a call first makes it, or takes the parts of its work that are left. Others wait
only for a thread that has begun a call, and not even then for parts that they can do themselves.
"""

from __future__ import annotations

from typing import Any, Final

from asyncinfer.kernels.native.tasks import Tasks

__all__ = [
    "ALONE",
    "CALL_FIELDS",
    "CLAIMED",
    "FIELDS",
    "FREE",
    "IN_PARTS",
    "READY",
    "SHARED",
    "STORING",
    "team_code",
]

#: The arguments of a run, 64 bits each: the address of the calls, how many, and the threads.
FIELDS: Final = ("calls", "count", "threads")
#: What a call has: the addresses of its function and of its task, its kind, its state, and how many
#: threads are inside of it. A call has a line of the cache to itself.
CALL_FIELDS: Final = ("function", "task", "kind", "state", "inside", "", "", "")

#: Kinds of calls, of which the first is 0: one thread makes it; all threads do, and it has ended
#: when none is inside; all threads do, and none comes back before all parts are ready, see
#: `blocked_code`.
ALONE: Final = 0
SHARED: Final = 1
IN_PARTS: Final = 2
#: States of a call or of a part of its work: nobody has it; a thread does; a thread writes its
#: result, which is one that nobody else may do; all is written. Calls have no `STORING`.
FREE: Final = 0
CLAIMED: Final = 1
STORING: Final = 2
READY: Final = 3


def team_code() -> str:
    """The assembly of `run(task)`, where `task` points to `FIELDS`, as int64. `calls` has
    `CALL_FIELDS` for each call, with `state` and `inside` 0."""
    return _TeamCode().text()


class _TeamCode(Tasks):
    def __init__(self) -> None:
        super().__init__("team", FIELDS)

    def text(self) -> str:
        self.on_task("run", self._work())
        return str(self.module)

    def _work(self) -> Any:
        function, b = self.begin("work", self.pointer)
        (task,) = function.args
        calls, count = self.address(b, task, "calls"), self.field(b, task, "count")

        def call(index: Any) -> None:
            size = self.integer(8 * len(CALL_FIELDS))
            self._call(b, self.at(b, calls, b.mul(index, size)))

        self.each(b, self.integer(0), count, 1, call)
        b.ret_void()
        return function

    def _call(self, b: Any, call: Any) -> None:
        """Emit a thread's part of a call."""
        state = self._of(b, call, "state")
        with b.if_then(b.icmp_signed("!=", self.seen(b, state), self.integer(READY))):
            kind = self._number(b, call, "kind")
            alone = b.icmp_signed("==", kind, self.integer(ALONE))
            with b.if_else(alone) as (one, several):
                with one:
                    self._alone(b, call, state)
                with several:
                    self._shared(b, call, state, kind)

    def _alone(self, b: Any, call: Any, state: Any) -> None:
        with b.if_else(self.takes(b, state, FREE, CLAIMED)) as (ours, others):
            with ours:
                self._make(b, call)
                self.tell(b, state, READY)
            with others:
                self.until(b, lambda b: self._is(b, state, READY))

    def _shared(self, b: Any, call: Any, state: Any, kind: Any) -> None:
        inside, one = self._of(b, call, "inside"), self.integer(1)
        # A thread that takes work is inside before. So where no work is left, all that is not done
        # yet is that of threads inside.
        b.atomic_rmw("add", inside, one, "acq_rel")
        self._make(b, call)
        b.atomic_rmw("sub", inside, one, "acq_rel")

        def ended(b: Any) -> Any:
            in_parts = b.icmp_signed("==", kind, self.integer(IN_PARTS))
            return b.or_(b.or_(self._is(b, inside, 0), in_parts), self._is(b, state, READY))

        self.until(b, ended)
        self.tell(b, state, READY)

    def _make(self, b: Any, call: Any) -> None:
        function, task = (self._number(b, call, name) for name in ("function", "task"))
        kind = self.ir.FunctionType(self.void, [self.pointer])
        # llvmlite calls what has a pointer of a function's type.
        b.call(b.inttoptr(function, kind.as_pointer()), [b.inttoptr(task, self.pointer)])

    def _number(self, b: Any, call: Any, name: str) -> Any:
        return b.load(self._of(b, call, name), typ=self.i64, align=8)

    def _is(self, b: Any, place: Any, value: int) -> Any:
        return b.icmp_signed("==", self.seen(b, place), self.integer(value))

    def _of(self, b: Any, call: Any, name: str) -> Any:
        return self.at(b, call, self.integer(8 * CALL_FIELDS.index(name)))
