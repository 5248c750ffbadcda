"""LLVM's code that has a team of threads make recorded calls, one after the other.

Each thread goes through all calls. A region of OpenMP for each call would end when its last thread
does, and where another program has the core of one, the others would wait for its next turn. Here
whoever comes to a call first makes it, or takes the parts of its work that are left. Others wait
only for a thread that has begun a call, and not even then for parts that they can do themselves.

A thread that serves a queue runs them for others, who need not wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from asyncinfer.kernels.native.tasks import Tasks

__all__ = [
    "ALONE",
    "CALL_FIELDS",
    "CLAIMED",
    "FIELDS",
    "FREE",
    "IN_PARTS",
    "JOB_FIELDS",
    "QUEUE_FIELDS",
    "READY",
    "SHARED",
    "STORING",
    "SYMBOLS",
    "team_code",
]

#: The arguments of a run, 64 bits each: the address of the calls, how many, and the threads.
FIELDS: Final = ("calls", "count", "threads")
#: What a call has: the addresses of its function and of its task, its kind, its state, and how many
#: threads are inside of it. A call has a line of the cache to itself.
CALL_FIELDS: Final = ("function", "task", "kind", "state", "inside", "", "", "")
#: What each thread of a queue has: the addresses of its ring of jobs and of the semaphore that
#: counts those that wait, and the size of the ring. A ring has addresses of jobs; 0 is the end.
QUEUE_FIELDS: Final = ("ring", "waiting", "size")
#: What a job has: the address of a run's arguments; how many threads have not left it; the address
#: of the semaphore that the last of them posts; in nanoseconds when the first one began and ended,
#: and for how long all together had no core; how many jobs came before, and the address of the
#: number of those whose calls are made. A job has a line of the cache to itself.
JOB_FIELDS: Final = ("run", "inside", "done", "began", "ended", "away", "number", "made")
#: Functions of the C library that threads of a queue call.
SYMBOLS: Final = ("sem_wait", "sem_post", "clock_gettime")
#: Linux's numbers of its clocks: `time.perf_counter`, and the time that a thread computes.
_CLOCK, _COMPUTED = 1, 3

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
    """The assembly of two functions. `run(task)` makes the calls of a task, which points to
    `FIELDS`, as int64. `calls` has `CALL_FIELDS` for each call, with `state` and `inside` 0.
    `serve(queue)` is what a thread of a queue does until the end: its part of one job after the
    other. `queue` points to `QUEUE_FIELDS`."""
    return _TeamCode().text()


class _TeamCode(Tasks):
    def __init__(self) -> None:
        super().__init__("team", FIELDS)

    def text(self) -> str:
        work = self._work()
        self.on_task("run", work)
        self._serve(work)
        return str(self.module)

    def _serve(self, work: Any) -> None:
        """Emit `serve`."""
        wait = self.declare("sem_wait", self.i32, self.pointer)
        function, b = self.begin("serve", self.pointer, public=True)
        (queue,) = function.args
        ring, waiting, size = (
            b.load(self._place(b, queue, QUEUE_FIELDS, name), typ=self.i64, align=8)
            for name in QUEUE_FIELDS
        )
        ring, waiting = (b.inttoptr(each, self.pointer) for each in (ring, waiting))
        before = b.block
        look, take, make, over = (b.append_basic_block() for _ in range(4))
        b.branch(look)
        b.position_at_end(look)
        turn = b.phi(self.i64)
        turn.add_incoming(self.integer(0), before)
        # A signal may end the wait before.
        come = b.icmp_signed("==", b.call(wait, [waiting]), self.ir.Constant(self.i32, 0))
        turn.add_incoming(turn, look)
        b.cbranch(come, take, look)
        b.position_at_end(take)
        place = self.at(b, ring, b.mul(turn, self.integer(8)))
        job = b.load(place, typ=self.i64, align=8)
        b.cbranch(b.icmp_signed("==", job, self.integer(0)), over, make)
        b.position_at_end(make)
        b.call(self._job(work), [b.inttoptr(job, self.pointer)])
        following = b.add(turn, self.integer(1))
        last = b.icmp_signed("==", following, size)
        turn.add_incoming(b.select(last, self.integer(0), following), make)
        b.branch(look)
        b.position_at_end(over)
        b.ret_void()

    def _job(self, work: Any) -> Any:
        """`job(job)`: do a thread's part of a job."""
        post = self.declare("sem_post", self.i32, self.pointer)
        function, b = self.begin("job", self.pointer)
        (job,) = function.args

        def field(name: str) -> Any:
            return self._place(b, job, JOB_FIELDS, name)

        def address(name: str) -> Any:
            return b.inttoptr(b.load(field(name), typ=self.i64, align=8), self.pointer)

        now, made, number = (
            self._clock(),
            address("made"),
            b.load(field("number"), typ=self.i64, align=8),
        )
        # The one before may have other threads, which are not done yet.
        self.until(b, lambda b: b.icmp_signed(">=", self.seen(b, made), number))
        wall, core = (self.ir.Constant(self.i32, number) for number in (_CLOCK, _COMPUTED))
        began, computed = b.call(now, [wall]), b.call(now, [core])
        b.call(work, [address("run")])
        computed = b.sub(b.call(now, [core]), computed)
        ended = b.call(now, [wall])
        b.atomic_rmw("min", field("began"), began, "acq_rel")
        b.atomic_rmw("min", field("ended"), ended, "acq_rel")
        b.atomic_rmw("add", field("away"), b.sub(b.sub(ended, began), computed), "acq_rel")
        b.atomic_rmw("max", made, b.add(number, self.integer(1)), "acq_rel")
        # The job belongs to whoever waits for it once the last thread has left it.
        done = address("done")
        left = b.atomic_rmw("sub", field("inside"), self.integer(1), "acq_rel")
        with b.if_then(b.icmp_signed("==", left, self.integer(1))):
            b.call(post, [done])
        b.ret_void()
        return function

    def _clock(self) -> Any:
        """`now(clock)`: the time of a clock of the system, int64 nanoseconds."""
        read = self.declare("clock_gettime", self.i32, self.i32, self.pointer)
        kind = self.ir.FunctionType(self.i64, [self.i32])
        function = self.ir.Function(self.module, kind, "now")
        function.linkage = "internal"
        b = self.ir.IRBuilder(function.append_basic_block())
        time = b.alloca(self.i64, self.integer(2))
        b.call(read, [function.args[0], time])
        seconds = b.load(time, typ=self.i64, align=8)
        rest = b.load(self.at(b, time, self.integer(8)), typ=self.i64, align=8)
        b.ret(b.add(b.mul(seconds, self.integer(10**9)), rest))
        return function

    def _place(self, b: Any, pointer: Any, fields: Sequence[str], name: str) -> Any:
        """The address of one of the fields at `pointer`."""
        return self.at(b, pointer, self.integer(8 * fields.index(name)))

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
        return self._place(b, call, CALL_FIELDS, name)
