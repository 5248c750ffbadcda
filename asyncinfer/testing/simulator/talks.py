"""`Talk`: a conversation of a simulated life, and what its prompts must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncinfer.testing.invariants import hold
from asyncinfer.testing.oracle import EOS_ID
from asyncinfer.testing.simulator.scenario import Ask
from asyncinfer.testing.simulator.vocabulary import simulated_tokenizer

if TYPE_CHECKING:
    from asyncinfer.engine import Session, SessionStream
    from asyncinfer.testing.simulator.consumer import Consumer

__all__ = ["Talk"]


class _SpokenPart(NamedTuple):
    """A message, or what a consumer says."""

    tokens: tuple[int, ...]
    #: Whether the model said it.
    answer: bool = False


class Talk:
    """A session, with its messages as the tokens that they must be in its next prompt.

    Args:
        loop, scope: the event loop and the cache scope of all its requests.
    """

    def __init__(self, session: Session, loop: int, scope: str) -> None:
        self.session = session
        self.loop = loop
        self.scope = scope
        self._closed = False
        self._parts: list[_SpokenPart] = []
        #: Computed tokens, one sequence after another.
        self._computed: list[tuple[int, ...]] = []
        #: The consumer that speaks, until `ended` has handled its answer.
        self.consumer: Consumer | None = None
        self._asked: Ask | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The conversation."""
        return tuple(token for part in self._parts for token in part.tokens)

    def whole(self, ask: Ask) -> Ask:
        """The request that saying `ask.prompt` must be."""
        prompt = [*self.tokens, *ask.prompt]
        return replace(ask, prompt=prompt, form="chat", n=1, loop=self.loop, scope=self.scope)

    def new_text(self, said: Sequence[int]) -> str:
        """The text that the engine tokenises: what comes after the last answer."""
        after = next((i for i, p in enumerate(reversed(self._parts)) if p.answer), len(self._parts))
        parts = self._parts[len(self._parts) - after :]
        return "".join(map(simulated_tokenizer().decode, [*(part.tokens for part in parts), said]))

    def begin(self, said: Sequence[int], **options: Any) -> SessionStream:
        """What a consumer calls in the place of `Engine.stream`."""
        return self.session.stream(simulated_tokenizer().decode(said), **options)

    def speaks(self, consumer: Consumer, ask: Ask) -> None:
        """A consumer is about to say `ask.prompt`."""
        self.consumer, self._asked = consumer, ask

    def ended(self, consumer: Consumer, block_size: int, kept: bool) -> int:
        """The consumer has ended: its answer is part of the conversation, or nothing is. Returns
        how many tokens must have been cached, which is known if `kept`: nothing was ever evicted.
        """
        ask, self._asked, self.consumer = self._asked, None, None
        assert ask is not None
        prompt, least = (*self.tokens, *ask.prompt), 0
        # One that was stopped before it was computed at all took nothing from the cache.
        if consumer.tokens[0] and consumer.outcome == "whole" and consumer.usage and kept:
            shared = max((_common(prompt, each) for each in self._computed), default=0)
            least = min(shared, len(prompt) - 1) // block_size * block_size
            found = consumer.usage.cached_tokens
            hold("I15", found >= least, "{}: {} tokens cached, not {}", consumer, found, least)
        messages = self.session.messages
        if self._closed:
            return least
        grown = len(messages) - len(self._parts)
        hold("I15", grown in (0, 2), "{}: the session has {} messages more", consumer, grown)
        whole = consumer.outcome == "whole" and not consumer.closed
        hold("I15", grown == 2 or not whole, "{} is not part of its session", consumer)
        if grown:
            said, drawn = messages[-1]["content"], consumer.tokens[0]
            hold("I15", said == consumer.texts[0], "{}: the session has {!r}", consumer, said)
            ended = drawn[-1:] == [EOS_ID]
            self._parts.append(_SpokenPart(tuple(ask.prompt)))
            self._parts.append(_SpokenPart(tuple(drawn[:-1] if ended else drawn), answer=True))
            if drawn:
                # The last token that was drawn is not computed.
                self._computed.append((*prompt, *drawn[:-1]))
        return least

    def fork(self) -> Talk:
        """A second conversation that begins as this one."""
        made = Talk(self.session.fork(), self.loop, self.scope)
        made._parts, made._computed = [*self._parts], [*self._computed]
        return made

    def rewind(self, count: int) -> None:
        """Take back the last messages, as many of them as there are."""
        count = min(count, len(self._parts))
        self.session.rewind(count)
        del self._parts[len(self._parts) - count :]

    def close(self) -> None:
        """Close the session, perhaps while it is answered."""
        self._closed = True
        self.session.close()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
