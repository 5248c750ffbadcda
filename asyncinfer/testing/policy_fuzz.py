"""Lives of a prefix cache as lists of moves, which can be run again, compared and made smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from asyncinfer.errors import PluginError
from asyncinfer.testing.cache_harness import CacheHarness, CacheRequest
from asyncinfer.testing.rule_error import RuleError
from asyncinfer.testing.watched_policy import WatchedPolicy

__all__ = ["Move", "random_moves", "run_moves"]

Kind = Literal["serve", "open", "compute", "close", "ask", "wait", "tool", "over"]


@dataclass(frozen=True, slots=True)
class Move:
    """Something that happens to the cache."""

    kind: Kind
    #: Which of the open requests (modulo their number), how many victims, how many seconds, or
    #: which conversation.
    number: int = 0
    tokens: tuple[int, ...] = ()
    scope: str = ""
    #: The conversation that a request is of.
    conversation: int | None = None

    def __str__(self) -> str:
        match self.kind:
            case "serve":
                return f"serve {self._asked}"
            case "open":
                return f"open a request for {self._asked}"
            case "compute" | "close":
                return f"{self.kind} open request {self.number} (modulo their number)"
            case "ask":
                return f"ask for {self.number} victims and take none"
            case "wait":
                return f"{self.number} seconds pass"
            case "tool":
                return f"conversation {self.number} waits for a tool"
            case "over":
                return f"conversation {self.number} is over"

    @property
    def _asked(self) -> str:
        of = "" if self.conversation is None else f" of conversation {self.conversation}"
        return f"{list(self.tokens)} in scope {self.scope!r}{of}"


def run_moves(
    policy: WatchedPolicy, moves: Sequence[Move], blocks: int, other: WatchedPolicy | None = None
) -> None:
    """Make the moves in a pool of so many blocks of one token, then end every request and empty
    the cache. `other`, an object of the same kind, lives through them backwards meanwhile, in a
    cache of its own.

    Raises:
        RuleError: the policy broke a rule.
    """
    world = _TrackedCache(policy, blocks)
    beside = None if other is None else _TrackedCache(other, blocks)
    for move, backwards in zip(moves, reversed(moves), strict=True):
        world.make(move)
        if beside is not None:
            beside.make(backwards)
    world.end()


def random_moves(seed: int, count: int, longest: int) -> list[Move]:
    """So many moves; prompts of up to `longest` tokens that share beginnings."""
    rng = Random(seed)
    prompts = [_prompt(rng, longest)]
    moves: list[Move] = []
    kinds: tuple[Kind, ...] = ("serve", "open", "compute", "close", "wait", "tool", "over")
    for _ in range(count):
        kind = rng.choice(kinds)
        if kind in ("serve", "open"):
            old = rng.choice(prompts[-50:])
            cut = rng.randint(0, len(old))
            prompt = (old[:cut] + _prompt(rng, longest))[:longest]
            prompts.append(prompt)
            scope, of = rng.choice(("", "", "tenant")), rng.choice((None, None, 0, 1, 2, 3))
            moves.append(Move(kind, tokens=prompt, scope=scope, conversation=of))
        else:
            moves.append(Move(kind, rng.randrange(4)))
    return moves


def _prompt(rng: Random, longest: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1000) for _ in range(rng.randint(1, longest)))


class _TrackedCache:
    def __init__(self, policy: WatchedPolicy, blocks: int) -> None:
        self._policy = policy
        try:
            self._harness = CacheHarness(blocks, policy, block_size=1)
        except PluginError as fault:
            raise _cause(fault) from None
        self._open: list[CacheRequest] = []
        self._now = 0.0

    def make(self, move: Move) -> None:
        try:
            self._make(move)
        except PluginError as fault:
            raise _cause(fault) from None

    def end(self) -> None:
        cache = self._harness.cache
        try:
            for request in self._open:
                self._harness.close(request, self._now)
            while cache.evictable:
                cache.evict(min(3, cache.evictable))
        except PluginError as fault:
            raise _cause(fault) from None
        self._policy.victims(1)

    def _make(self, move: Move) -> None:
        harness = self._harness
        match move.kind:
            case "serve" | "open":
                request = harness.request(move.tokens, move.scope, move.conversation)
                if harness.open(request, self._now):
                    self._open.append(request)
                    if move.kind == "serve":
                        harness.commit(request, self._now)
                        harness.close(self._open.pop(), self._now)
            case "compute" if self._open:
                harness.commit(self._open[move.number % len(self._open)], self._now)
            case "close" if self._open:
                harness.close(self._open.pop(move.number % len(self._open)), self._now)
            case "ask":
                self._policy.victims(move.number)
            case "wait":
                self._now += move.number
            case "tool":
                harness.converse(move.number, "waiting")
            case "over":
                harness.converse(move.number, "over")


def _cause(fault: PluginError) -> Exception:
    return fault.__cause__ if isinstance(fault.__cause__, RuleError) else fault
