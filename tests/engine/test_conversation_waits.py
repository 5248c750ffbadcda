"""A conversation waits for a tool from when its answer is read, also while a step in flight
computes a token past that answer."""

from __future__ import annotations

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
