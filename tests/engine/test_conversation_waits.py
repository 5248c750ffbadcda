"""A conversation waits for a tool, and is forked, from when its answer is read, also while a step
in flight computes a token past that answer."""

from __future__ import annotations

from itertools import pairwise

import pytest

from asyncinfer.cache import Conversation
from asyncinfer.engine.inbox import Command
from asyncinfer.testing import FakeModel, InlineEngine, InlineStream


def ask(engine: InlineEngine, conversation: Conversation, stop: list[int]) -> InlineStream:
    return engine.submit(
        [*range(40)],
        max_tokens=20,
        temperature=0.0,
        stop_token_ids=stop,
        conversation=conversation,
    )


@pytest.mark.parametrize("overlap", [1, 2, 4])
def test_waiting_outlasts_the_steps_in_flight(overlap: int) -> None:
    engine = InlineEngine(FakeModel(), overlap=overlap)
    conversation = Conversation()
    first = ask(engine, conversation, [])
    engine.run()
    first.read()
    stop = first.token_ids()[4]
    assert conversation.state == "live"
    answer = ask(engine, conversation, [stop])
    while answer.request.outcome is None:
        engine.pump()
    assert len(engine.scheduler.in_flight) == overlap - 1, "steps past the answer"
    engine.core.post(Command.WAITING, conversation)
    engine.run()
    assert conversation.entries
    assert conversation.state == "waiting"
    # The tool's result is answered.
    ask(engine, conversation, [stop])
    engine.run()
    assert conversation.state == "live"


def test_a_conversation_is_over_from_its_ttl_on() -> None:
    engine = InlineEngine(FakeModel())
    conversation = Conversation(ttl=5.0)
    ask(engine, conversation, [])
    engine.run()
    for engine.now, state in ((4.75, "live"), (5.0, "over")):
        engine.submit([1], max_tokens=1)
        engine.run()
        assert conversation.state == state


@pytest.mark.parametrize("overlap", [1, 2, 4])
@pytest.mark.parametrize("ended", ["none", "origin", "fork"])
def test_a_fork_pins_what_its_origin_holds(overlap: int, ended: str) -> None:
    engine = InlineEngine(FakeModel(), overlap=overlap)
    origin, fork, second = Conversation(), Conversation(), Conversation()
    first = ask(engine, origin, [])
    engine.run()
    first.read()
    answer = ask(engine, origin, [first.token_ids()[9]])
    while answer.request.outcome is None:
        engine.pump()
    assert origin.leaving == (overlap > 1)
    engine.core.post(Command.FORK, (origin, fork))
    engine.core.post(Command.FORK, (fork, second))
    if ended != "none":
        engine.core.post(Command.OVER, origin if ended == "origin" else fork)
    engine.run()
    held = 49 // 16
    assert len(second.entries) == held
    assert len(fork.entries) == (0 if ended == "fork" else held)
    assert engine.core.scheduler.stats().blocks_pinned == held
    assert not any(each.forks for each in (origin, fork, second))
    assert not any(each.leaving for each in (origin, second))


def test_a_long_line_of_forks_waits_for_one_step() -> None:
    engine = InlineEngine(FakeModel(), overlap=2)
    line = [Conversation() for _ in range(3000)]
    first = ask(engine, line[0], [])
    engine.run()
    first.read()
    answer = ask(engine, line[0], [first.token_ids()[9]])
    while answer.request.outcome is None:
        engine.pump()
    for pair in pairwise(line):
        engine.core.post(Command.FORK, pair)
    engine.run()
    assert all(len(each.entries) == len(line[0].entries) > 0 for each in line)


def test_one_whose_time_is_up_waits_no_more() -> None:
    engine = InlineEngine(FakeModel())
    conversation = Conversation(5.0)
    answer = ask(engine, conversation, [])
    engine.run()
    answer.read()
    engine.now += 10
    ask(engine, Conversation(), [])
    engine.run()
    assert conversation.state == "over"
    engine.core.post(Command.WAITING, conversation)
    engine.run()
    assert conversation.state == "over"
