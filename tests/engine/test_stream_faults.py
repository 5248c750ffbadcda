"""What consumers do to streams, at its worst."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from support import OpenEngine, TimedEngine, Until, is_closed, oracle, request_of

from asyncinfer import (
    DeadlineExceeded,
    Engine,
    EngineClosed,
    RequestFailed,
    StreamBusy,
    StreamStalled,
)
from asyncinfer.testing import FakeModel, StepGate

pytestmark = pytest.mark.anyio

LONG = {"max_tokens": 400, "temperature": 0.0}


# fault 1
@pytest.mark.parametrize("kth", [1, 2, 3, 5, 8, 13, 40])
async def test_cancelled_wait_loses_nothing(
    open_engine: OpenEngine, gate: StepGate, kth: int
) -> None:
    async with open_engine() as engine:
        want = oracle(engine, "hello", 60)
        got: list[int] = []
        stream = engine.stream("hello", max_tokens=60, temperature=0.0)
        gate.close()
        reads = 0
        while True:
            reads += 1
            with anyio.CancelScope() as scope:
                if reads % kth == 0:
                    # The cancellation is due before, while or after the token arrives.
                    gate.let()
                    scope.cancel()
                else:
                    gate.let()
                try:
                    chunk = await anext(stream)
                except StopAsyncIteration:
                    break
                got += chunk.token_ids
            if reads > 200:
                # With every read cancelled nothing is lost either: take what is there.
                gate.open()
                kth = 1_000_000
        assert got == want


# fault 1
async def test_cancelled_from_outside_while_waiting(
    open_engine: OpenEngine, gate: StepGate
) -> None:
    async with open_engine() as engine:
        gate.close()
        stream = engine.stream("hello", max_tokens=30, temperature=0.0)
        got: list[int] = []

        async def read_one(task_status: anyio.abc.TaskStatus[None]) -> None:
            task_status.started()
            got.extend((await anext(stream)).token_ids)

        for _ in range(5):
            async with anyio.create_task_group() as group:
                await group.start(read_one)
                group.cancel_scope.cancel()
        gate.open()
        async for chunk in stream:
            got.extend(chunk.token_ids)
        assert got == oracle(engine, "hello", 30)


# fault 2
async def test_break_without_closing_frees_the_pages(open_engine: OpenEngine, until: Until) -> None:
    async with open_engine() as engine:
        with pytest.warns(ResourceWarning, match="dropped before its end"):
            async for _ in engine.stream("hello", **LONG):
                break
            gc.collect()
        await until(lambda: engine.stats().aborted == 1)
        stats = engine.stats()
        assert stats.running == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


# fault 3
async def test_collected_on_another_thread(open_engine: OpenEngine, until: Until) -> None:
    async with open_engine(buffer=4) as engine:
        streams = [engine.stream("hello", **LONG)]
        await anext(streams[0])
        # Paused: the engine is idle, and the finalizer's post is all that can wake it.
        await until(lambda: engine.stats().paused == 1)
        with pytest.warns(ResourceWarning, match="dropped"):
            thread = threading.Thread(target=streams.clear)
            thread.start()
            thread.join()
            gc.collect()
        await until(lambda: engine.stats().aborted == 1)
        assert engine.stats().running == engine.stats().paused == 0


# fault 3
async def test_finalizer_runs_while_the_inbox_is_used(
    open_engine: OpenEngine, until: Until
) -> None:
    """A finalizer may interrupt a post: `put` is reentrant, nothing locks."""
    async with open_engine(buffer=2) as engine:
        with pytest.warns(ResourceWarning):
            for _ in range(50):
                stream: Any = engine.stream("hello", **LONG)
                await anext(stream)
                cycle: list[Any] = [stream]
                cycle.append(cycle)
                del stream, cycle
            gc.collect()
        await until(lambda: engine.stats().aborted == 50)


# fault 4
async def test_unread_stream_stalls(open_engine: OpenEngine, until: Until) -> None:
    async with open_engine(buffer=4, stall_timeout=0.05) as engine:
        stream = engine.stream("hello", **LONG)
        got = list((await anext(stream)).token_ids)
        await until(lambda: engine.stats().failed == 1)
        with pytest.raises(StreamStalled, match=r"not read for 0\.05 s"):
            async for chunk in stream:
                got += chunk.token_ids
        assert 4 <= len(got) <= 8
        assert got == oracle(engine, "hello", 400)[: len(got)]


# fault 5
async def test_slow_consumer_parks_alone(open_engine: OpenEngine, until: Until) -> None:
    async with open_engine() as engine:
        slow = engine.stream("slow", **LONG, buffer=8)
        first = await anext(slow)
        peer = await engine.generate("peer", **LONG)
        assert list(peer.token_ids) == oracle(engine, "peer", 400)
        await until(lambda: engine.stats().paused == 1)
        request = request_of(slow)
        assert 8 <= request.delivered <= 9
        rest = [token async for chunk in slow for token in chunk.token_ids]
        assert [*first.token_ids, *rest] == oracle(engine, "slow", 400)


# fault 5
async def test_coalescing_bounds_chunks_and_keeps_tokens(
    open_engine: OpenEngine, until: Until
) -> None:
    async with open_engine() as engine:
        stream = engine.stream("slow", **LONG, buffer=8, on_full="coalesce")
        chunks = [await anext(stream)]
        await until(lambda: engine.stats().finished == 1)
        assert len(request_of(stream).buffer.chunks) <= 10
        chunks += [chunk async for chunk in stream]
        assert [t for chunk in chunks for t in chunk.token_ids] == oracle(engine, "slow", 400)
        whole = await engine.generate("slow", **LONG)
        assert "".join(chunk.text for chunk in chunks) == whole.text


# fault 5
async def test_cancel_on_full(open_engine: OpenEngine, until: Until) -> None:
    async with open_engine() as engine:
        stream = engine.stream("slow", **LONG, buffer=8, on_full="cancel")
        got = list((await anext(stream)).token_ids)
        await until(lambda: engine.stats().failed == 1)
        with pytest.raises(RequestFailed, match="buffer=8"):
            async for chunk in stream:
                got += chunk.token_ids
        assert got == oracle(engine, "slow", 400)[: len(got)]


# fault 6
async def test_the_body_raises(open_engine: OpenEngine, until: Until) -> None:
    async with open_engine() as engine:
        with pytest.raises(ZeroDivisionError):
            async with engine.stream("hello", **LONG) as stream:
                async for _ in stream:
                    raise ZeroDivisionError
        await until(lambda: engine.stats().aborted == 1)
        assert engine.stats().running == 0


# fault 7
async def test_fail_after(open_engine: OpenEngine, gate: StepGate, until: Until) -> None:
    async with open_engine() as engine:
        gate.close()
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.05):
                async with engine.stream("hello", **LONG) as stream:
                    await anext(stream)
        gate.open()
        await until(lambda: engine.stats().aborted == 1)


# fault 7
async def test_the_deadline_of_the_scope_reaches_the_scheduler(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        with anyio.fail_after(100):
            async with engine.stream("hello", **LONG) as stream:
                sequence = request_of(stream).outputs[0].sequence
                assert sequence.deadline is not None
                # Sums of times on different clocks are rounded.
                assert 90 < sequence.deadline - request_of(stream).submitted <= 100 + 1e-6
        async with engine.stream("hello", **LONG) as stream:
            assert request_of(stream).outputs[0].sequence.deadline is None


# fault 7
async def test_own_deadline(until: Until) -> None:
    async with TimedEngine(FakeModel(), drain_timeout=0.0) as engine:
        stream = engine.stream("hello", max_tokens=4000, temperature=0.0, deadline=0.05, buffer=4)
        got = list((await anext(stream)).token_ids)
        engine.time.go_by(1.0)
        await until(lambda: engine.stats().failed == 1)
        with pytest.raises(DeadlineExceeded, match="deadline"):
            async for chunk in stream:
                got += chunk.token_ids
        assert got == oracle(engine, "hello", 400)[: len(got)]


# fault 8
async def test_two_tasks_read_one_stream(open_engine: OpenEngine, gate: StepGate) -> None:
    async with open_engine() as engine:
        gate.close()
        async with engine.stream("hello", max_tokens=5, temperature=0.0) as stream:
            async with anyio.create_task_group() as group:

                async def read() -> None:
                    async for _ in stream:
                        pass

                group.start_soon(read)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(StreamBusy, match="another task"):
                    await anext(stream)
                with pytest.raises(StreamBusy, match="another task"):
                    await stream
                gate.open()


# fault 9
async def test_aclose_twice_and_after_the_end(open_engine: OpenEngine, until: Until) -> None:
    async with open_engine() as engine:
        stream = engine.stream("hello", max_tokens=3)
        await stream.aclose()
        await stream.aclose()
        ended = engine.stream("hello", max_tokens=3)
        assert len([chunk async for chunk in ended]) == 3
        await ended.aclose()
        await ended.aclose()
        assert [chunk async for chunk in ended] == []
        async with engine.stream("hello", **LONG) as left:
            await anext(left)
        await left.aclose()
        assert [chunk async for chunk in left] == []
        await until(lambda: engine.stats().aborted == 1)


# fault 9
async def test_aclose_by_several_tasks(
    open_engine: OpenEngine, gate: StepGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one of them is told of the end, and so is who awaits the stream meanwhile."""
    limits: list[anyio.CancelScope] = []

    def noted(*args: Any, **kwargs: Any) -> anyio.CancelScope:
        limits.append(anyio.CancelScope(*args, **kwargs))
        return limits[-1]

    async with open_engine() as engine:
        # A step that passed it later could end the stream before all of the tasks close it.
        gate.close()
        stream = engine.stream("hello", **LONG)
        gate.let(1)
        await anext(stream)
        with monkeypatch.context() as patched:
            patched.setattr(
                "anyio.move_on_after",
                lambda seconds, shield: noted(
                    deadline=anyio.current_time() + seconds, shield=shield
                ),
            )
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(stream.aclose)
                await anyio.wait_all_tasks_blocked()

                async def complete() -> None:
                    assert (await stream).finish_reason == "aborted"

                group.start_soon(complete)
                await anyio.wait_all_tasks_blocked()
                gate.open()
        assert [limit.cancelled_caught for limit in limits] == [False] * 3
        assert engine.stats().aborted == 1


async def test_a_reader_with_much_to_read_gives_others_a_turn(
    open_engine: OpenEngine, until: Until
) -> None:
    async with open_engine(buffer=100) as engine, engine.stream("hello", **LONG) as stream:
        await until(lambda: engine.stats().paused == 1)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(other)
            for _ in range(70):
                await anext(stream)
            # Twice, but trio may let the reader go first.
            assert turns
            group.cancel_scope.cancel()


async def test_aclose_while_a_reader_gives_others_a_turn(
    open_engine: OpenEngine, until: Until
) -> None:
    async with open_engine(buffer=100) as engine:
        stream = engine.stream("hello", **LONG)
        await anext(stream)
        await until(lambda: engine.stats().paused == 1)
        late = 0
        async with anyio.create_task_group() as group:
            group.start_soon(stream.aclose)
            async for _ in stream:
                late += is_closed(stream)
        assert is_closed(stream)
        assert late == 0


# fault 10
async def test_abort_races_the_last_token(open_engine: OpenEngine, until: Until) -> None:
    async with open_engine() as engine:
        for length in range(1, 40):
            async with engine.stream("hello", max_tokens=length % 4 + 1) as stream:
                for _ in range(length % 5):
                    async for _ in stream:
                        break
        await until(lambda: engine.stats().finished + engine.stats().aborted == 39)
        assert engine.stats().failed == 0


# fault 11
async def test_closing_the_engine_ends_streams_with_a_reason(until: Until) -> None:
    engine = await Engine.open(FakeModel(), buffer=8)
    stream = engine.stream("hello", **LONG)
    got = list((await anext(stream)).token_ids)
    await until(lambda: engine.stats().paused == 1)
    want = oracle(engine, "hello", 400)
    await engine.aclose(drain_timeout=0)
    with pytest.raises(EngineClosed):
        async for chunk in stream:
            got += chunk.token_ids
    assert len(got) >= 8
    assert got == want[: len(got)]


# fault 12
@pytest.mark.parametrize("foreign", ["asyncio", "trio"])
@pytest.mark.parametrize("state", ["with news", "waiting"])
async def test_used_from_another_thread_and_loop(
    open_engine: OpenEngine, gate: StepGate, until: Until, state: str, foreign: str
) -> None:
    problems: list[BaseException] = []
    answers: list[list[int]] = []

    def elsewhere(work: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                answers.append(anyio.run(work, backend=foreign))
            except BaseException as error:
                problems.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(120)
        assert not thread.is_alive()

    async with open_engine() as engine:
        stream = engine.stream("hello", max_tokens=30, temperature=0.0)
        if state == "waiting":
            gate.close()
            gate.let(1)
        await anext(stream)
        if state == "with news":
            await until(lambda: engine.stats().finished == 1)

        async def foreign_read() -> None:
            await anext(stream)

        async def own_stream() -> list[int]:
            done = await engine.generate("hello", max_tokens=30, temperature=0.0)
            return list(done.token_ids)

        elsewhere(foreign_read)
        assert [type(problem) for problem in problems] == [StreamBusy]
        gate.open()
        elsewhere(own_stream)
        assert answers == [oracle(engine, "hello", 30)]
        # stop() works from any thread.
        thread = threading.Thread(target=stream.stop)
        thread.start()
        thread.join()
        assert (await stream).finish_reason in ("stopped", "length")


# fault 12
def test_while_another_thread_imports_trio(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is to be seen of a module until its import is done.
    monkeypatch.setitem(sys.modules, "trio", types.ModuleType("trio"))

    async def use() -> int:
        async with Engine(FakeModel()) as engine:
            return len((await engine.generate("x", max_tokens=3)).token_ids)

    assert asyncio.run(use()) == 3
