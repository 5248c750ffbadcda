"""The protocol of proposers, which guess how an answer continues.

The engine computes the guessed tokens in one pass with the token before them, draws at each of
their positions as it would have drawn anyway, and keeps the guesses that it has drawn. So a bad
guess costs time and never changes an answer.

Thread: the engine's decode thread only. Time: each call may take 1 ms; what it takes beyond is a
debt that later calls pay off. A proposer that raises three times in a row or owes a second is
reported once and not asked any more; its requests go on without it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from asyncinfer.params import SamplingParams

__all__ = ["PROPOSER_PROTOCOL_VERSION", "DraftRequest", "Proposer"]

PROPOSER_PROTOCOL_VERSION = 1


class DraftRequest(Protocol):
    """One answer, as a proposer sees it: the same object in every call for that answer."""

    #: The proposer's own state for this answer between two calls, None at first. Nobody else reads
    #: it.
    state: Any

    @property
    def length(self) -> int:
        """How many tokens are known: those of the prompt, and of the answer so far."""

    @property
    def prompt_len(self) -> int: ...

    @property
    def most(self) -> int:
        """The most tokens wanted, 1 or more."""

    @property
    def scope(self) -> str:
        """`cache_scope` of the request: what is learned from one answer may be used for others of
        the same scope only."""

    @property
    def seed(self) -> int:
        """Key of the answer's random numbers, 64 bits."""

    @property
    def params(self) -> SamplingParams: ...

    def tokens(self, start: int = 0) -> list[int]:
        """A copy of the known tokens from position `start` on."""


@runtime_checkable
class Proposer(Protocol):
    """Guesses the next tokens of answers. One object serves one engine."""

    @abstractmethod
    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """A guess of the next tokens for each of these answers, in order. Tokens beyond `most` are
        cut off; an empty guess costs nothing."""

    def end(self, request: DraftRequest) -> None:
        """The answer ended, complete or not. May do nothing."""
        return None
