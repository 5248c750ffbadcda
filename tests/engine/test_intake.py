"""Prompts on their way in: what is refused before it costs anything, and what nobody waits for."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from support import OpenEngine, Until, admission_of, places

from asyncinfer import (
    DeadlineExceeded,
    Engine,
    EngineConfig,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    SamplingParams,
)
from asyncinfer.engine import Loaded, prompt_workers
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.deadlines import Deadlines
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.preparer import Preparer
from asyncinfer.engine.prompt_reader import PromptReader
from asyncinfer.engine.prompt_workers import HUGE, PromptWorkers, Task
from asyncinfer.engine.request import End, Request
from asyncinfer.engine.stream import Stream
from asyncinfer.engine.turn_limit import MOST
from asyncinfer.scheduler import Step
from asyncinfer.testing import FakeModel, StepGate
from asyncinfer.text import ChatTemplate, Tokenizer

pytestmark = pytest.mark.anyio

LONG_PROMPT = "x" * 1500


class Held:
    """Holds prompts on their workers, and counts them."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.let_go = threading.Event()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held, tokenise = Held(), PromptReader.read

    def slow(reader: PromptReader, prompt: Any, *options: Any) -> Any:
        if len(prompt) > 1024:
            held.begun.append(prompt)
            assert held.let_go.wait(120)
        return tokenise(reader, prompt, *options)

    monkeypatch.setattr(PromptReader, "read", slow)
    yield held
    held.let_go.set()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the decode thread has sent an end to an event loop."""
    sent, flush = threading.Event(), LoopBridge.flush

    def spied(bridge: LoopBridge) -> None:
        ends = bool(bridge.batch.news)
        flush(bridge)
        if ends:
            sent.set()

    monkeypatch.setattr(LoopBridge, "flush", spied)
    return sent


# fault 50
async def test_prompts_that_nobody_waits_for(
    open_engine: OpenEngine, held: Held, until: Until
) -> None:
    """Those that wait are dropped at once; those in work keep their place until they are dropped,
    which is before anything else is done for them."""
    async with open_engine(max_requests=4) as engine:
        ends: Counter[str] = Counter()

        async def impatient(enough: anyio.CancelScope) -> None:
            try:
                with enough:
                    await engine.generate(LONG_PROMPT)
                ends["left"] += enough.cancelled_caught
            except Overloaded:
                ends["refused"] += 1

        async def crowd(size: int, condition: Callable[[], object]) -> None:
            """So many ask, and have enough when the condition holds."""
            scopes = [anyio.CancelScope() for _ in range(size)]
            async with anyio.create_task_group() as group:
                for scope in scopes:
                    group.start_soon(impatient, scope)
                await until(condition)
                for scope in scopes:
                    scope.cancel()

        with anyio.fail_after(120):
            await crowd(4, lambda: places(engine) == 4 and len(held.begun) == 2)
            # Two are in work.
            assert places(engine) == 2
            await crowd(40, lambda: ends["refused"] == 38)
            assert places(engine) == 2
            assert ends == {"left": 6, "refused": 38}
            stats = engine.stats()
            # Each is counted once: the two in work are over, though they keep their place.
            assert (stats.aborted, stats.refused, stats.waiting) == (6, 38, 0)
            held.let_go.set()
            await until(lambda: places(engine) == 0)
            done = await engine.generate(LONG_PROMPT, max_tokens=2)
        assert done.usage.completion_tokens == 2
        assert len(held.begun) == 3
        assert engine.stats().steps <= 3


async def test_the_workers_end_at_a_close(held: Held, until: Until) -> None:
    def workers() -> int:
        return sum(thread.name == "asyncinfer-intake" for thread in threading.enumerate())

    before = workers()
    engine = await Engine.open(FakeModel())
    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(engine.generate, LONG_PROMPT)
        await until(lambda: len(held.begun) == 2)
        group.cancel_scope.cancel()
    await engine.aclose()
    held.let_go.set()
    await until(lambda: workers() <= before)
    # The eight others were not begun.
    assert len(held.begun) == 2


async def test_what_was_dropped_is_let_go_of(
    open_engine: OpenEngine, held: Held, until: Until
) -> None:
    """The prompt of a request that waits for a worker is gone with it."""

    class Prompt(str):
        pass

    async with open_engine() as engine:
        prompts = [Prompt(LONG_PROMPT) for _ in range(5)]
        seen = [weakref.ref(prompt) for prompt in prompts]
        async with anyio.create_task_group() as group:
            while prompts:
                group.start_soon(engine.generate, prompts.pop())
            await until(lambda: len(held.begun) == 2)
            group.cancel_scope.cancel()

        def kept() -> int:
            gc.collect()
            return sum(ref() is not None for ref in seen)

        await until(lambda: kept() == 2)
        held.begun.clear()
        held.let_go.set()
        await until(lambda: kept() == 0)


async def test_huge_prompts_hold_up_no_other(
    open_engine: OpenEngine, held: Held, monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    monkeypatch.setattr(prompt_workers, "HUGE", 3000)
    prepared = PromptReader.read

    def slow(reader: PromptReader, prompt: Any, *options: Any) -> Any:
        if len(prompt) >= 3000:
            return prepared(reader, prompt, *options)
        return [1, 2, 3], None

    monkeypatch.setattr(PromptReader, "read", slow)
    async with open_engine() as engine:
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(engine.generate, "y" * 3500)
            await until(lambda: held.begun)
            with anyio.fail_after(120):
                for _ in range(3):
                    await engine.generate(LONG_PROMPT, max_tokens=1)
            assert len(held.begun) == 1
            group.cancel_scope.cancel()
            held.let_go.set()


async def test_a_huge_prediction_goes_where_huge_prompts_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def given(workers: PromptWorkers, task: Task, size: int) -> None:
        sizes.append(size)
        raise Overloaded("no thread")

    monkeypatch.setattr(PromptWorkers, "give", given)
    async with Engine(FakeModel()) as engine:
        for prompt, prediction in (("x", "x" * HUGE), ("x" * HUGE, "x"), ("x", "x" * (HUGE - 1))):
            with pytest.raises(Overloaded):
                await engine.generate(prompt, prediction=prediction)
    assert [size >= HUGE for size in sizes] == [True, True, False]


@pytest.fixture
def nothing_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("was looked at")

    monkeypatch.setattr(Tokenizer, "encode", refuse)
    monkeypatch.setattr(Tokenizer, "encode_chat", refuse)
    monkeypatch.setattr(ChatTemplate, "render", refuse)


class Chatty(FakeModel):
    """With a chat template."""

    def load(self, config: EngineConfig, progress: Any = None) -> Loaded:
        loaded = super().load(config, progress)
        template = ChatTemplate("{{ messages[0].content }}", shield=loaded.tokenizer.shield)
        return Loaded(loaded.runner, loaded.tokenizer, template)


def say(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


# fault 40
@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        # The longest token of this vocabulary is `</s>`.
        ("x" * 16_385, "<16385 characters>: at most 16384 can fit"),
        (say("x" * 16_385), "<16385 characters of messages>: at most 16384 can fit"),
        (say([{"type": "text", "text": "x" * 16_385}]), "<16385 characters of messages>"),
        (say("x" * 20_001, "assistant"), "<20001 characters of messages>: must have <= max_p"),
        ([0] * 4096, "<4096 tokens>: at most 4095 fit"),
        (["not a token"] * 3, "must be a string, a list of token ids or"),
        ([], r"\[\]: is empty"),
        (say(""), "is empty: no message has any content"),
        ([{"role": "user"}], "is empty: no message has any content"),
    ],
)
@pytest.mark.usefixtures("nothing_is_encoded")
async def test_refused_before_it_is_looked_at(
    open_engine: OpenEngine, prompt: Any, told: str
) -> None:
    async with open_engine(Chatty(), max_prompt_chars=20_000) as engine:
        with pytest.raises(InvalidRequest, match=f"^prompt=.*{told}"):
            await engine.generate(prompt)
        assert places(engine) == admission_of(engine).pending == 0


async def test_an_image_is_called_one_also_without_a_text(open_engine: OpenEngine) -> None:
    async with open_engine(Chatty()) as engine:
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        told = r"^messages\[0\].content\[0\].type='image_url': must be 'text': images cannot be"
        with pytest.raises(InvalidRequest, match=told):
            await engine.generate(say([image]))


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (say(5), r"messages\[0\].content=5: must be a string or a list of text parts"),
        (say({"type": "text"}), r"messages\[0\].content={'type': 'text'}: must be a string or"),
        (say(["x"]), r"messages\[0\].content\[0\]='x': must be a mapping with type and text"),
        (say([{"type": "text"}]), r"messages\[0\].content\[0\].text=None: must be a string"),
        ([*say(""), "x"], r"messages\[1\]='x': must be a mapping with role and content"),
    ],
)
async def test_what_is_no_text_is_not_called_empty(
    open_engine: OpenEngine, messages: Any, told: str
) -> None:
    async with open_engine(Chatty()) as engine:
        with pytest.raises(InvalidRequest, match=f"^{told}"):
            await engine.generate(messages)


async def test_a_prompt_at_the_bound_is_tokenised(open_engine: OpenEngine) -> None:
    async with open_engine(Chatty()) as engine:
        # Four characters a token: as many as can be, and one too many.
        with pytest.raises(InvalidRequest, match=r"<4096 tokens>: at most 4095 fit"):
            await engine.generate("</s>" * 4096)
        done = await engine.generate("</s>" * 4000, max_tokens=2)
        assert done.usage.prompt_tokens == 4000


async def test_integers_of_numpy_are_token_ids(open_engine: OpenEngine) -> None:
    async with open_engine(Chatty()) as engine:
        right = await engine.generate([5, 6, 7], max_tokens=3, seed=1)
        for prompt in (list(np.array([5, 6, 7])), [5, np.uint8(6), 7]):
            assert (await engine.generate(prompt, max_tokens=3, seed=1)).text == right.text
        for wrong in (np.bool_(True), np.float32(6)):
            with pytest.raises(InvalidRequest, match=r"^prompt\[1\]=.*: must be an integer token"):
                await engine.generate([5, wrong])
        with pytest.raises(InvalidRequest, match=r"^prompt\[0\]=.*: must be in \[0, "):
            await engine.generate([np.int64(-1)])


def test_what_calls_a_tool_needs_no_content() -> None:
    message = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    PromptReader(Chatty().load(EngineConfig()), EngineConfig()).check_messages([message])


def test_a_crowd_leaves_the_loop_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand requests submitted at once, a turn of the loop prepares a few."""
    turns, prepared, made = 0, Counter[int](), Counter[int]()
    prepare, stream = Preparer.prepare, Engine.stream

    def made_in(*arguments: Any, **options: Any) -> Any:
        made[turns] += 1
        return stream(*arguments, **options)

    monkeypatch.setattr(Engine, "stream", made_in)

    def counted(*arguments: Any) -> None:
        prepared[turns] += 1
        prepare(*arguments)

    monkeypatch.setattr(Preparer, "prepare", counted)

    async def main() -> None:
        nonlocal turns
        async with Engine(FakeModel(), drain_timeout=0.0) as engine:
            work = asyncio.gather(*(engine.generate("x", max_tokens=1) for _ in range(1000)))
            while not work.done():
                turns += 1
                await asyncio.sleep(0)
            assert len(work.result()) == 1000

    asyncio.run(main())
    assert sum(prepared.values()) == 1000
    assert max(prepared.values()) <= MOST
    assert sum(made.values()) == 1000
    assert max(made.values()) <= MOST


async def test_a_crowd_that_leaves(open_engine: OpenEngine, gate: StepGate, until: Until) -> None:
    """Also those that wait in line: with a deadline they are registered there."""
    async with open_engine() as engine:
        gate.close()
        async with anyio.create_task_group() as group:
            for _ in range(200):
                group.start_soon(partial(engine.generate, "x", deadline=1000.0))
            await until(lambda: places(engine) == 200)
            group.cancel_scope.cancel()
        gate.open()
        await until(lambda: places(engine) == 0)
        # Counters are published at the end of the turn in which the places are given back.
        await until(lambda: engine.stats().aborted == 200)
        async with anyio.create_task_group() as group:
            for _ in range(200):
                group.start_soon(engine.generate, "x")
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await until(lambda: places(engine) == 0)


def request(deadline: float) -> Request:
    from asyncinfer.engine.options import RequestOptions

    options = RequestOptions(0, deadline, "", 1, "pause")
    return Request("r", None, SamplingParams(), options, 0.0, None)  # type: ignore[arg-type]


def test_a_deadline_keeps_no_request_that_has_ended(seed: int) -> None:
    deadlines = Deadlines()
    requests = [request(3600.0 + index % 7) for index in range(1000)]
    for each in requests:
        deadlines.add(each)
    assert [each.deadline for each in deadlines.due(3601.0)] == sorted(
        each.deadline for each in requests if each.deadline is not None and each.deadline <= 3601.0
    )
    last = requests.pop()
    for each in requests:
        deadlines.discard(each)
        deadlines.discard(each)
    assert len(deadlines) == 1
    assert deadlines.next == last.deadline
    del each
    # The list, the loop's variable and `getrefcount` itself.
    assert [sys.getrefcount(each) for each in requests] == [3] * len(requests)
    deadlines.discard(last)
    assert deadlines.next == float("inf")


async def test_a_misspelt_option_is_named() -> None:
    with pytest.raises(TypeError, match=r"max_runing=3: is no option of an engine; did you mean m"):
        Engine(FakeModel(), max_runing=3)
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match=r"max_token=3: .*; did you mean max_tokens\?"):
            engine.stream("x", max_token=3)


async def test_an_answer_that_fails_while_its_loop_is_late_is_read_before_its_error(
    open_engine: OpenEngine, held: Held, until: Until, sent: threading.Event
) -> None:
    """The loop learns at once that the prompt is prepared, what was drawn, and that the request
    failed."""

    def failing(step: Step) -> dict[int, Exception]:
        return {0: ValueError("broken")} if step.starts[0] > len(LONG_PROMPT) + 2 else {}

    async with open_engine(FakeModel(failing=failing)) as engine:
        stream, found = engine.stream(LONG_PROMPT, max_tokens=8), list[int]()

        async def read() -> None:
            with pytest.raises(RequestFailed, match="broken"):
                async for chunk in stream:
                    found.extend(chunk.token_ids)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await until(lambda: held.begun)
            held.let_go.set()
            assert sent.wait(60)
        assert len(found) == 4
        assert stream.usage is not None
        assert stream.usage.completion_tokens == 4


async def test_a_stream_that_fails_while_its_loop_is_late_has_ended(
    open_engine: OpenEngine, held: Held, until: Until, sent: threading.Event
) -> None:
    """Its request was taken and has failed: that is the end, and no other request is made."""

    def failing(step: Step) -> dict[int, Exception]:
        return {0: ValueError("broken")}

    async with open_engine(FakeModel(failing=failing)) as engine:
        stream = engine.stream(LONG_PROMPT, max_tokens=8)

        async def begin() -> None:
            with pytest.raises(RequestFailed, match="broken"):
                await stream.__aenter__()

        async with anyio.create_task_group() as group:
            group.start_soon(begin)
            await until(lambda: held.begun)
            held.let_go.set()
            assert sent.wait(60)
        assert stream.usage is not None
        for again in (stream.__aenter__, partial(anext, stream), partial(awaited, stream)):
            with pytest.raises(RequestFailed, match="broken"):
                await again()
        assert stream.request_id.count(".") == 0
        assert engine.stats().failed == 1
        await stream.aclose()


async def awaited(stream: Stream) -> object:
    return await stream


@pytest.mark.parametrize("prompt", ["x", LONG_PROMPT], ids=["here", "on a worker"])
@pytest.mark.parametrize("broken", ["prepare", "at_hand"])
async def test_a_preparation_that_fails_at_its_deadline_has_missed_it(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, until: Until, prompt: str, broken: str
) -> None:
    """The watchdog ends the request while it is prepared. Its consumer is told of that end, which
    the log has, and of no other."""
    ended = threading.Event()
    end = Admission.end

    def spied(admission: Admission, request: Request, how: End, *rest: Any, **counted: Any) -> Any:
        outcome = end(admission, request, how, *rest, **counted)
        ended.set()
        return outcome

    def late(*_: Any) -> None:
        assert ended.wait(60)
        raise InvalidRequest("prompt", "x", "is no prompt")

    monkeypatch.setattr(Admission, "end", spied)
    monkeypatch.setattr(Preparer, broken, late)
    async with open_engine() as engine:
        with anyio.fail_after(120), pytest.raises(DeadlineExceeded):
            await engine.generate(prompt, deadline=0.01)
        await until(lambda: places(engine) == 0)
        assert engine.stats().failed == 1
