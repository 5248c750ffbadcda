"""A consumer that reads slowly or not at all, turn by turn. Faults 4 and 5."""

from __future__ import annotations

from typing import Any

import pytest

from asyncinfer import DeadlineExceeded, EngineClosed, RequestFailed, StreamStalled
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.loop_bridge import Batch
from asyncinfer.engine.request import End, Request
from asyncinfer.engine.stream_buffer import Coalescing
from asyncinfer.scheduler import Scheduler, Sequence
from asyncinfer.testing import FakeModel, InlineEngine, InlineStream

LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0.0}


def right(engine: InlineEngine, count: int) -> list[int]:
    whole = engine.submit("hello", **LONG)
    while not whole.ended:
        engine.pump()
        whole.read()
    return whole.token_ids()[:count]


def used(stream: InlineStream) -> int:
    outcome = stream.request.buffer.outcome
    assert outcome is not None
    return outcome.usage.completion_tokens


# fault 4
def test_whoever_reads_steadily_is_not_stalled() -> None:
    engine = InlineEngine(FakeModel(), buffer=100, stall_timeout=1.0)
    stream = engine.submit("hello", **LONG)
    engine.pump(200)
    assert engine.stats().paused == 1
    while not stream.ended:
        # Half of the buffer takes longer than the stall timeout.
        engine.now += 0.025
        engine.pump()
        stream.read(1)
    assert stream.error is None
    assert len(stream.token_ids()) == 400


# fault 4
def test_whoever_stops_reading_is_stalled_from_then_on() -> None:
    engine = InlineEngine(FakeModel(), buffer=100, stall_timeout=1.0)
    stream = engine.submit("hello", **LONG)
    engine.pump(200)
    for _ in range(5):
        engine.now += 0.9
        engine.pump()
        stream.read(1)
    # Looks are a 64th of the timeout apart.
    engine.now += 0.02
    engine.pump()
    engine.now += 0.99
    engine.pump()
    assert stream.error is None
    engine.now += 0.02
    engine.pump()
    assert isinstance(stream.error, StreamStalled)


# fault 4
def test_a_stream_is_unread_since_its_first_answer_paused() -> None:
    """Its second one waits for a place, and pauses later."""
    engine = InlineEngine(FakeModel(), buffer=8, stall_timeout=1.0, max_running=1)
    stream = engine.submit("hello", n=2, **LONG)
    first, second = stream.request.outputs
    while not stream.request.paused:
        engine.pump()
    assert stream.request.paused == [first]
    engine.now += 0.9
    while len(stream.request.paused) < 2:
        engine.pump()
    assert stream.request.paused == [first, second]
    assert stream.error is None
    engine.now += 0.2
    engine.pump()
    assert isinstance(stream.error, StreamStalled)


def test_whoever_empties_the_buffer_before_it_can_see_the_pause_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = InlineEngine(FakeModel(), buffer=8)
    stream = engine.submit("hello", **LONG)
    pause = Scheduler.pause

    def read_meanwhile(scheduler: Scheduler, sequence: Sequence) -> None:
        stream.read()
        pause(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "pause", read_meanwhile)
    engine.pump(450)
    stream.read()
    assert len(stream.token_ids()) == 400


def test_a_stop_ends_the_answers_that_have_not_ended() -> None:
    engine = InlineEngine(FakeModel())
    options: dict[str, Any] = {"n": 2, "max_tokens": 40, "seed": 3}
    plain = engine.submit("hello", **options)
    engine.run()
    plain.read()
    last = next(each for each in plain.token_ids() if each not in plain.token_ids(1))
    ended = plain.token_ids().index(last) + 1
    stream = engine.submit("hello", stop_token_ids=[last], **options)
    engine.pump(ended + 4)
    stream.stop()
    engine.run()
    stream.read()
    reasons = [(chunk.index, chunk.finish_reason) for chunk in stream.chunks if chunk.finish_reason]
    assert reasons == [(0, "stop"), (1, "stopped")]
    assert stream.token_ids() == plain.token_ids()[:ended]
    assert ended < len(stream.token_ids(1)) < 40


# fault 5
def test_streams_that_nobody_reads_slow_no_step_down(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(request: Request, now: float) -> float:
        nonlocal looks
        looks += 1
        return request.paused_at or now

    monkeypatch.setattr(Request, "unread_since", counted)
    engine = InlineEngine(FakeModel(), buffer=2, stall_timeout=60.0)
    for _ in range(20):
        engine.submit("hello", **LONG)
    engine.pump(50)
    assert engine.stats().paused == 20
    looks = 0
    for _ in range(100):
        engine.now += 0.001
        engine.pump()
    assert 20 <= looks <= 40


@pytest.mark.parametrize("answers", [1, 3])
@pytest.mark.parametrize("buffer", [1, 2, 8])
# fault 5
def test_cancel_on_full_spares_whoever_reads(buffer: int, answers: int) -> None:
    engine = InlineEngine(FakeModel(), on_full="cancel", buffer=buffer)
    stream = engine.submit("hello", n=answers, **LONG)
    while not stream.ended:
        engine.pump()
        stream.read()
    assert stream.error is None
    assert [len(stream.token_ids(index)) for index in range(answers)] == [400] * answers


# fault 5
@pytest.mark.parametrize("buffer", [1, 8])
def test_cancel_on_full_means_that_a_token_does_not_fit(buffer: int) -> None:
    engine = InlineEngine(FakeModel(), on_full="cancel", buffer=buffer)
    stream = engine.submit("hello", **LONG)
    engine.pump(buffer)
    assert stream.error is None
    engine.pump()
    assert isinstance(stream.error, RequestFailed)
    assert f"buffer={buffer} " in str(stream.error)
    stream.read()
    assert len(stream.token_ids()) == used(stream)


def late(engine: InlineEngine) -> None:
    engine.now = 100.0


def closed(engine: InlineEngine) -> None:
    engine.core.post(Command.CLOSE, 0.0)


@pytest.mark.parametrize(
    ("end", "error"), [(late, DeadlineExceeded), (closed, EngineClosed)], ids=["deadline", "close"]
)
@pytest.mark.parametrize("read_before", [0, 5, 33])
# fault 5
def test_coalescing_loses_no_token_at_an_end(end: Any, error: Any, read_before: int) -> None:
    engine = InlineEngine(FakeModel(), on_full="coalesce", buffer=32)
    expected = right(engine, 400)
    stream = engine.submit("hello", deadline=50.0, **LONG)
    engine.pump(90)
    stream.read(read_before)
    engine.pump(90)
    end(engine)
    engine.pump()
    stream.read()
    assert isinstance(stream.error, error)
    assert len(stream.token_ids()) == used(stream) >= 150
    assert stream.token_ids() == expected[: used(stream)]


def test_a_failed_row_delivers_what_was_coalesced() -> None:
    failing = False
    model = FakeModel(failing=lambda plan: {0: ArithmeticError("NaN")} if failing else {})
    engine = InlineEngine(model, on_full="coalesce", buffer=2)
    stream = engine.submit("hello", **LONG)
    engine.pump(50)
    failing = True
    engine.pump()
    stream.read()
    assert isinstance(stream.error, RequestFailed)
    assert len(stream.token_ids()) == used(stream) == 50


def test_the_possible_beginning_of_a_stop_string_is_text_when_a_stream_fails() -> None:
    engine = InlineEngine(FakeModel())
    plain = engine.submit("hello", **{**LONG, "max_tokens": 40})
    engine.run()
    plain.read()
    text = plain.text()
    # Held back from the fourth character on, and never complete.
    stopped = engine.submit("hello", stop=text[3:] + "\u2603", deadline=5.0, **LONG)
    engine.pump(41)
    engine.now += 6.0
    engine.pump()
    stopped.read()
    assert isinstance(stopped.error, DeadlineExceeded)
    assert len(stopped.text()) >= len(text) - 1
    assert stopped.text().startswith(text[:-1])


def test_what_an_awaited_stream_has_drawn_is_not_held_when_another_thread_ends_it() -> None:
    """Its chunks would refer to the request until another one has news."""
    engine = InlineEngine(FakeModel())
    stream = engine.submit("hello", **LONG)
    request = stream.request
    request.buffer.quiet = True
    engine.pump(5)
    assert engine.bridge.batch.contents
    outcome = engine.admission.end(request, End.FAILED, DeadlineExceeded("late"))
    engine.bridge.send(Batch((request.buffer, outcome)))
    engine.core.post(Command.RELEASE, request)
    engine.pump()
    assert not engine.bridge.batch.contents
    assert isinstance(stream.error, DeadlineExceeded)


@pytest.mark.parametrize("most", [1, 3, 100])
def test_what_waits_is_merged_by_answer(most: int) -> None:
    queue = Coalescing(most)
    for number in range(12):
        reason = "stop" if number >= 10 else None
        queue.append((f"{number}\r\n", (number,), (), number % 2, reason, reason and "a"))
    assert len(queue) == min(12, most + 2)
    found: dict[int, list[int]] = {0: [], 1: []}
    texts = ""
    taken = []
    while queue:
        chunk = queue.popleft()
        taken.append(chunk)
        found[chunk[3]] += chunk[1]
        texts += chunk[0]
    assert found == {0: list(range(0, 12, 2)), 1: list(range(1, 12, 2))}
    assert sorted(texts.split()) == sorted(map(str, range(12)))
    assert "\r\n" in texts
    assert [chunk[4:] for chunk in taken[-2:]] == [("stop", "a"), ("stop", "a")]
    with pytest.raises(IndexError):
        queue.popleft()
    queue.append(("x", (7,), (), 0, None, None))
    assert queue.popleft() == ("x", (7,), (), 0, None, None)


# fault 4
def test_a_process_that_was_stopped_stalls_nobody() -> None:
    engine = InlineEngine(FakeModel(), buffer=8, stall_timeout=5.0)
    stream = engine.submit("hello", **LONG)
    engine.pump(30)
    engine.now += 50.0
    engine.pump()
    assert stream.error is None
    for _ in range(6):
        engine.now += 0.9
        engine.pump()
    assert isinstance(stream.error, StreamStalled)
