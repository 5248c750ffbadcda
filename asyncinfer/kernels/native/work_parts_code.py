"""LLVM's code by which threads share the parts of a product's work.

Each thread takes the next part until none is left. Where each part has a state, a thread does what
others have left, too, so that nobody waits for a thread that is not running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncinfer.kernels.native.tasks import Tasks
from asyncinfer.kernels.native.team_code import CLAIMED, FREE, READY

__all__ = ["WorkParts", "part_state"]

#: How many times as long as this thread another one may take for a part of the work.
_PATIENCE = 2


def part_state(code: Tasks, b: Any, states: Any, index: Any) -> Any:
    """The address of a part's state."""
    return code.at(b, states, b.mul(index, code.integer(8)))


class WorkParts:
    """Emits what a thread does. A task has the fields "states", which is 0 or the address of an
    int64 for each part, and "next", the counter that threads share.

    Args:
        count: emits how many parts a task has.
        room: emits room for a thread's results, and gives its address.
        make: `make(task, index, after, room)`: do a part, and prefetch the part `after`.
        store: `store(task, index, room)`: store the results of a part.
    """

    def __init__(
        self,
        code: Tasks,
        count: Callable[[Any, Any], Any],
        room: Callable[[Any], Any],
        make: Any,
        store: Any,
    ) -> None:
        self._code, self._count, self._room = code, count, room
        self._make, self._store = make, store
        self._finish = self._finishing()

    def work(self) -> Any:
        """`work(task)`: do a part of the work, then the next, until none is left. With states,
        the function comes back when all parts are ready."""
        c = self._code
        function, b = c.begin("work", c.pointer)
        (task,) = function.args
        room, states = self._room(b), c.field(b, task, "states")
        parts, several = self._count(b, task), b.icmp_signed("!=", states, c.integer(0))
        states = b.inttoptr(states, c.pointer)
        started = c.counted(b, task, "next")
        before = b.block
        fetch, run, free, end = (b.append_basic_block() for _ in range(4))
        b.branch(fetch)
        b.position_at_end(fetch)
        index, longest = b.phi(c.i64), b.phi(c.i64)
        index.add_incoming(started, before)
        longest.add_incoming(c.integer(0), before)
        b.cbranch(b.icmp_signed("<", index, parts), run, end)
        b.position_at_end(run)
        # The next part is chosen now, so that it can be prefetched.
        following = c.counted(b, task, "next")
        last = b.icmp_signed(">=", following, parts)
        after = b.select(last, index, following)
        with b.if_then(several):
            taken = c.takes(b, part_state(c, b, states, index), FREE, CLAIMED)
            left = b.append_basic_block()
            go_on = b.append_basic_block()
            b.cbranch(taken, go_on, left)
            b.position_at_end(left)
            index.add_incoming(following, left)
            longest.add_incoming(longest, left)
            b.branch(fetch)
            b.position_at_end(go_on)
        b.branch(free)
        b.position_at_end(free)
        began = c.ticks(b)
        b.call(self._make, [task, index, after, room])
        b.call(self._store, [task, index, room])
        index.add_incoming(following, b.block)
        took = b.sub(c.ticks(b), began)
        longest.add_incoming(b.select(b.icmp_signed(">", took, longest), took, longest), b.block)
        b.branch(fetch)
        b.position_at_end(end)
        with b.if_then(several):
            b.call(self._finish, [task, room, longest])
        b.ret_void()
        return function

    def _finishing(self) -> Any:
        """`finish(task, room, ticks)`: do what other threads have left, and come back when all
        parts are ready. `ticks` is how long this thread's longest part took, or 0 if it had none. A
        thread that takes `_PATIENCE` times as long is not running, and its part is done here as
        well."""
        c = self._code
        function, b = c.begin("finish", c.pointer, c.pointer, c.i64)
        task, room, ticks = function.args
        parts, states = self._count(b, task), c.address(b, task, "states")
        longest = b.alloca(c.i64)
        b.store(ticks, longest)

        def made(b: Any, index: Any) -> None:
            b.call(self._make, [task, index, index, room])
            b.call(self._store, [task, index, room])

        def free(index: Any) -> None:
            state = part_state(c, b, states, index)
            is_free = b.icmp_signed("==", c.seen(b, state), c.integer(FREE))
            with b.if_then(is_free), b.if_then(c.takes(b, state, FREE, CLAIMED)):
                began = c.ticks(b)
                made(b, index)
                b.store(b.sub(c.ticks(b), began), longest)

        c.each(b, c.integer(0), parts, 1, free)
        ticks = b.load(longest)
        patience = b.mul(ticks, c.integer(_PATIENCE))
        began = c.ticks(b)

        def late(index: Any) -> None:
            state = part_state(c, b, states, index)

            def ready(b: Any) -> Any:
                found = c.seen(b, state)
                waited = b.icmp_signed(">", b.sub(c.ticks(b), began), patience)
                over = b.and_(waited, b.icmp_signed(">", ticks, c.integer(0)))
                claimed = b.icmp_signed("==", found, c.integer(CLAIMED))
                with b.if_then(b.and_(over, claimed)):
                    made(b, index)
                return b.icmp_signed("==", c.seen(b, state), c.integer(READY))

            c.until(b, ready)

        c.each(b, c.integer(0), parts, 1, late)
        b.ret_void()
        return function
