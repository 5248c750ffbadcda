"""`Tasks`: what all generators of LLVM's code share: addresses, loops, tasks, threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

__all__ = ["Tasks", "share_of"]

#: How often a waiting thread looks before others of its core get a turn: some tens of microseconds.
_SPINS = 1000

#: A loop's body: takes a builder, an index and values, and returns the values after it.
_Body = Callable[[Any, Any, Sequence[Any]], Sequence[Any]]


def share_of(name: str) -> str:
    """The name of the function that does one thread's share of the function `name`."""
    return f"{name}_share"


class Tasks:
    """Builds a module of LLVM's assembly, whose functions work on tasks: fields of 64 bits. In all
    methods `b` is an `IRBuilder` of llvmlite."""

    def __init__(self, name: str, fields: Sequence[str] = ()) -> None:
        """`fields`: those of a task, 64 bits each."""
        self._fields = tuple(fields)
        ir: Any = import_module("llvmlite.ir")
        self.ir = ir
        self.byte, self.float = ir.IntType(8), ir.FloatType()
        self.bit, self.i32, self.i64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
        self.pointer, self.void = ir.PointerType(), ir.VoidType()
        self.module = ir.Module(name)
        self.module.triple = import_module("llvmlite.binding").get_process_triple()
        self._arm = self.module.triple.startswith(("aarch64", "arm64"))

    def declare(self, name: str, result: Any, *kinds: Any) -> Any:
        return self.ir.Function(self.module, self.ir.FunctionType(result, kinds), name)

    def begin(self, name: str, *kinds: Any, public: bool = False) -> tuple[Any, Any]:
        """A function of these arguments that gives nothing, and a builder at its beginning."""
        function = self.declare(name, self.void, *kinds)
        if not public:
            function.linkage = "internal"
        return function, self.ir.IRBuilder(function.append_basic_block())

    def integer(self, value: int) -> Any:
        return self.ir.Constant(self.i64, value)

    def at(self, b: Any, pointer: Any, count: Any) -> Any:
        """The address `count` bytes on."""
        return b.gep(pointer, [count], source_etype=self.byte)

    def field(self, b: Any, task: Any, name: str) -> Any:
        """One of the fields of the task at that address, as int64."""
        return b.load(self.place(b, task, name), typ=self.i64, align=8)

    def address(self, b: Any, task: Any, name: str) -> Any:
        """One of the fields of a task, as an address."""
        return b.inttoptr(self.field(b, task, name), self.pointer)

    def place(self, b: Any, task: Any, name: str) -> Any:
        """The address of a field of a task."""
        return self.at(b, task, self.integer(8 * self._fields.index(name)))

    def counted(self, b: Any, task: Any, name: str) -> Any:
        """Increment a counter that threads share, and return its value before that."""
        return b.atomic_rmw("add", self.place(b, task, name), self.integer(1), "acq_rel")

    def next_item(self, b: Any, task: Any, count: Any) -> tuple[Any, Any]:
        """Take an item that no other thread has; the function returns once all `count` are taken.
        Returns the item's number, and the block to branch to for the next item."""
        fetch, run, end = (b.append_basic_block() for _ in range(3))
        b.branch(fetch)
        b.position_at_end(fetch)
        index = self.counted(b, task, "next")
        b.cbranch(b.icmp_signed("<", index, count), run, end)
        b.position_at_end(end)
        b.ret_void()
        b.position_at_end(run)
        return index, fetch

    def on_task(self, name: str, work: Any) -> None:
        """Two public functions: `name(task)` runs `work(task)` on the task's threads, and
        `name_share(task)` on the thread that calls it, which may be one of several."""
        function, b = self.begin(name, self.pointer, public=True)
        (task,) = function.args
        self.on_threads(b, work, task, b.trunc(self.field(b, task, "threads"), self.i32))
        b.ret_void()
        share, b = self.begin(share_of(name), self.pointer, public=True)
        b.call(work, share.args)
        b.ret_void()

    def on_threads(self, b: Any, work: Any, task: Any, threads: Any) -> None:
        """Call `work(task)` on `threads` threads by OpenMP's `GOMP_parallel`. A single thread is
        the caller's own."""
        # void GOMP_parallel(void (*function)(void *), void *data, unsigned, unsigned)
        kinds = [self.pointer, self.pointer, self.i32, self.i32]
        region = self.module.globals.get("GOMP_parallel")
        if region is None:
            region = self.declare("GOMP_parallel", self.void, *kinds)
        none = self.ir.Constant(self.i32, 0)
        with b.if_else(b.icmp_unsigned(">", threads, self.ir.Constant(self.i32, 1))) as each:
            for several, inside in zip((True, False), each, strict=True):
                with inside:
                    b.call(*((region, [work, task, threads, none]) if several else (work, [task])))

    def seen(self, b: Any, place: Any) -> Any:
        """An int64 that other threads change, and all that they wrote before it."""
        return b.load_atomic(place, "acquire", 8, typ=self.i64)

    def tell(self, b: Any, place: Any, value: int) -> None:
        """Change an int64 that other threads see, after all that this one wrote."""
        # llvmlite has no atomic store to an opaque pointer.
        b.atomic_rmw("xchg", place, self.integer(value), "release")

    def takes(self, b: Any, place: Any, before: int, after: int) -> Any:
        """Whether this thread is the one that changes an int64 from `before` to `after`."""
        values = self.integer(before), self.integer(after)
        return b.extract_value(b.cmpxchg(place, *values, "acq_rel", "acquire"), 1)

    def until(self, b: Any, ready: Callable[[Any], Any]) -> None:
        """Wait until `ready` gives true. After a while other threads of this core get a turn."""
        before = b.block
        wait, again, leave, following, end = (b.append_basic_block() for _ in range(5))
        b.branch(wait)
        b.position_at_end(wait)
        tries = b.phi(self.i64)
        tries.add_incoming(self.integer(0), before)
        b.cbranch(ready(b), end, again)
        b.position_at_end(again)
        self.pause(b)
        b.cbranch(b.icmp_signed(">", tries, self.integer(_SPINS)), leave, following)
        b.position_at_end(leave)
        name = "sched_yield"
        b.call(self.module.globals.get(name) or self.declare(name, self.i32), [])
        b.branch(following)
        b.position_at_end(following)
        tries.add_incoming(b.add(tries, self.integer(1)), following)
        b.branch(wait)
        b.position_at_end(end)

    def pause(self, b: Any) -> None:
        """Tell the processor that this thread waits for memory to change."""
        name, kinds, values = "llvm.x86.sse2.pause", [], []
        if self._arm:
            name, kinds, values = "llvm.aarch64.hint", [self.i32], [self.ir.Constant(self.i32, 1)]
        pause = self.module.globals.get(name) or self.declare(name, self.void, *kinds)
        b.call(pause, values)

    def ticks(self, b: Any) -> Any:
        """The time, int64, in ticks of a clock of the processor."""
        name, kinds, values = "llvm.readcyclecounter", [], []
        if self._arm:
            # On arm64 a program may not read the counter of cycles.
            name, kinds = "llvm.read_volatile_register.i64", [self.ir.MetaDataType()]
            values = [self.module.add_metadata(["cntvct_el0"])]
        clock = self.module.globals.get(name) or self.declare(name, self.i64, *kinds)
        return b.call(clock, values)

    def loop(
        self, b: Any, end: Any, step: int, body: _Body, values: Sequence[Any]
    ) -> Sequence[Any]:
        """Emit a loop of `body` over the multiples of `step` below `end`, run at least once;
        returns the values after it."""
        before, head = b.block, b.append_basic_block()
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(self.i64)
        index.add_incoming(self.integer(0), before)
        carried = [b.phi(value.type) for value in values]
        for phi, value in zip(carried, values, strict=True):
            phi.add_incoming(value, before)
        results = body(b, index, carried)
        following = b.add(index, self.integer(step))
        index.add_incoming(following, b.block)
        for phi, value in zip(carried, results, strict=True):
            phi.add_incoming(value, b.block)
        done = b.append_basic_block()
        b.cbranch(b.icmp_signed("<", following, end), head, done)
        b.position_at_end(done)
        return results

    def loop_or_not(
        self, b: Any, end: Any, step: int, body: _Body, values: Sequence[Any]
    ) -> Sequence[Any]:
        """`loop`, which does not run at all where `end` is at most 0."""
        before = b.block
        run, done = b.append_basic_block(), b.append_basic_block()
        b.cbranch(b.icmp_signed(">", end, self.integer(0)), run, done)
        b.position_at_end(run)
        results = self.loop(b, end, step, body, values)
        after = b.block
        b.branch(done)
        b.position_at_end(done)
        carried = [b.phi(value.type) for value in values]
        for phi, value, result in zip(carried, values, results, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(result, after)
        return carried

    def each(self, b: Any, start: Any, end: Any, step: int, body: Callable[[Any], None]) -> None:
        """Emit a loop of `body` over `start`, `start + step` and so on below `end`, which may not
        run at all."""

        def one(b: Any, index: Any, values: Sequence[Any]) -> Sequence[Any]:
            body(b.add(start, index))
            return values

        span = b.sub(end, start)
        with b.if_then(b.icmp_signed(">", span, self.integer(0))):
            self.loop(b, span, step, one, [])
