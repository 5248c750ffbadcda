"""Conversations of simulated lives: each token is computed once, nothing stays pinned, and what
breaks that is found."""

from __future__ import annotations

from typing import Any

import pytest

from asyncinfer.cache.block_manager import BlockManager
from asyncinfer.engine.chats import Chats
from asyncinfer.engine.hold import Hold
from asyncinfer.engine.session import Session, SessionStream
from asyncinfer.testing.simulator.life import Life
from asyncinfer.testing.simulator.scenario import Action, Scenario
from asyncinfer.testing.simulator.trace import quiet

ROOMY = Scenario(blocks=512, max_context=128)


def say(talk: int, id: int, prompt: list[int], **ask: Any) -> list[Action]:
    asked = {"id": id, "prompt": prompt, "temperature": 1.0, "seed": id, **ask}
    return [["say", talk, asked], ["time", 1.0]]


#: Two turns, a branch from there on, a turn said otherwise, and one that is dropped.
ACTIONS: list[Action] = [
    ["time", 0.5],
    ["talk", 1, 0, "", None],
    *say(1, 10, [1, 2, 3, 4, 5, 6]),
    *say(1, 11, [2, 3, 1], how="await"),
    ["fork", 1, 2],
    *say(2, 12, [5, 5, 6, 7]),
    ["rewind", 1, 2],
    *say(1, 13, [6, 6], max_tokens=20),
    *say(1, 14, [1], chunks=1, then="drop"),
    *say(1, 15, [3]),
    ["part", 2, False],
    *say(1, 16, [1, 2], max_tokens=30),
    ["part", 1, True],
]


def lived() -> Life:
    """A life of these actions; raises what does not hold."""
    actions = iter(ACTIONS)
    life = Life(ROOMY, lambda life: next(actions, None))
    with quiet():
        life.run()
    return life


def test_each_token_is_computed_once() -> None:
    seen = lived().seen
    assert seen["said: whole"] == 6
    assert seen["said: left"] == 1
    assert seen["tokens said again"] > 60


def retokenised(patch: pytest.MonkeyPatch) -> None:
    encode = Chats.encode
    patch.setattr(Chats, "encode", lambda self, messages, *rest: encode(self, [*messages], *rest))


def answers_not_published(patch: pytest.MonkeyPatch) -> None:
    publish = BlockManager.publish

    def of_prompts(self: BlockManager, sequence: Any, length: int) -> None:
        publish(self, sequence, min(length, sequence.prompt_len))

    patch.setattr(BlockManager, "publish", of_prompts)


def rewound_in_part(patch: pytest.MonkeyPatch) -> None:
    def rewind(self: Any, count: int) -> None:
        self._messages = self._messages[: len(self._messages) - count]

    patch.setattr(Session, "rewind", rewind)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (retokenised, "I7"),
        (answers_not_published, "I15.*tokens cached"),
        (rewound_in_part, "I7"),
        (lambda patch: patch.setattr(Hold, "close", lambda self: None), "blocks are pinned"),
        (lambda patch: patch.delattr(SessionStream, "__del__"), "StreamBusy"),
        (
            lambda patch: patch.setattr(Session, "end_answer", lambda self, *_: None),
            "I15.*not part of its session|StreamBusy",
        ),
    ],
)
def test_what_breaks_that_is_found(plant: Any, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception, match=found):
        lived()
