"""`SpokenMessages`: a chat whose last answer stays the tokens that the model drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncinfer.cache import Conversation
from asyncinfer.text.messages import check_messages, joined, plain

__all__ = ["Answered", "SpokenMessages", "chat_messages"]


@dataclass(frozen=True, slots=True)
class Answered:
    """A chat up to the end of an answer."""

    #: Messages, the answer's included.
    messages: int
    #: Tokens of the prompt and of the answer, without the one that ended it.
    token_ids: tuple[int, ...]


class SpokenMessages(list[Mapping[str, Any]]):
    """Chat messages as a prompt."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        answered: Answered | None = None,
        conversation: Conversation | None = None,
    ) -> None:
        super().__init__(messages)
        self.conversation = conversation
        self.answered = answered
        #: Whether the answer goes on with the last message.
        self.continued = False
        #: Token ids of the whole chat as a prompt, written by the intake.
        self.prompt_ids: tuple[int, ...] = ()

    def with_answer(self, said: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """The chat with this message as its answer, or as more of its last message."""
        if not self.continued:
            return (*self, said)
        begun = joined(self[-1])
        told = ("content", "reasoning_content")
        texts = {name: (begun.get(name) or "") + said[name] for name in told if name in said}
        return (*self[:-1], {**begun, **said, **texts})


def chat_messages(
    messages: Sequence[str | Mapping[str, Any]], *, texts: bool = True
) -> list[Mapping[str, Any]]:
    """Copies of messages, checked: a program may use its dicts again for the next ones. With
    `texts` a string is a message of the user. Raises `InvalidRequest`."""
    if messages == () or messages == []:
        return []
    if texts:
        messages = [
            {"role": "user", "content": it} if isinstance(it, str) else it for it in messages
        ]
    check_messages(messages)
    return [plain(f"messages[{at}]", message) for at, message in enumerate(messages)]
