"""`Conversations`: which published blocks belong to conversations, and which of them are pinned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from asyncinfer.cache import metadata
from asyncinfer.cache.entry import CacheEntry
from asyncinfer.cache.guard import GuardedPolicy
from asyncinfer.protocols.eviction import ConversationState

__all__ = ["Conversation", "Conversations"]


class Conversation:
    """Requests of which each goes on where one before it ended. A session makes one; from its first
    request on the decode thread alone reads and writes its fields.

    Args:
        ttl: seconds after its last request from which on it counts as over.
    """

    __slots__ = ("ended", "entries", "forks", "leaving", "pinned", "state", "ttl", "until", "waits")

    def __init__(self, ttl: float = math.inf) -> None:
        self.ttl = ttl
        self.until = math.inf
        self.state: ConversationState = "live"
        #: No request of it comes any more.
        self.ended = False
        #: Its request, or its origin's, has ended and keeps its blocks until a step in flight is
        #: computed; and the conversation waits for a tool since then.
        self.leaving = self.waits = False
        #: Conversations that begin as it is once its request has given its blocks back.
        self.forks: list[Conversation] = []
        #: Its blocks when its last request ended, the beginning first. Some may be evicted.
        self.entries: list[CacheEntry] = []
        #: How many of them it pins, from the beginning on.
        self.pinned = 0


class Conversations:
    """Pinned blocks are those of open conversations, as far as they are no more than `most`.

    A pinned block is in use as far as the eviction policy knows. The cache gives it up when there
    is nothing else left to give up: then, and where pins are more than `most`, the conversation
    that was used longest ago loses its pins, and one that waits for a tool after all others.
    """

    def __init__(self, guard: GuardedPolicy, published: Mapping[int, CacheEntry]) -> None:
        """`published` are the cache's blocks."""
        self._guard = guard
        self._published = published
        #: Blocks that may be pinned.
        self.most = 0
        #: Blocks that are.
        self.pinned_blocks = 0
        #: Pinned blocks without references.
        self.idle: dict[int, CacheEntry] = {}
        #: Conversations that are not over, and those of them that pin blocks, by their state; the
        #: longest unused first.
        self.open: dict[Conversation, None] = {}
        self.pinning: dict[ConversationState, dict[Conversation, None]] = {
            "live": {},
            "waiting": {},
        }
        #: The earliest time, in seconds, at which some conversation's `ttl` ends.
        self.due = math.inf

    def hold(self, conversation: Conversation, entries: Sequence[CacheEntry], now: float) -> None:
        """A request of the conversation ends with these blocks, of which some may be evicted.
        Earlier blocks of the conversation, such as those of a withdrawn answer, are released."""
        held = conversation.entries
        same = 0
        for ours, theirs in zip(held, entries, strict=False):
            if ours is not theirs:
                break
            same += 1
        if same < len(entries):
            self._let_go(conversation, same)
            new = entries[same:]
            conversation.entries = [*held[:same], *new]
            for entry in new:
                metadata.set_conversations(entry.meta, entry.meta.conversations + 1)
                _count(entry, conversation.state, 1)
                self._mark(entry)
        for made in _take_forks(conversation):
            if not made.ended:
                self.hold(made, conversation.entries, now)
        conversation.leaving = False
        if conversation.ended:
            self.end(conversation)
            return
        self.set_state(conversation, "waiting" if conversation.waits else "live")
        conversation.waits = False
        conversation.until = now + conversation.ttl
        self.due = min(self.due, conversation.until)
        self._pin(conversation)

    def wait(self, conversation: Conversation) -> None:
        """Its answer called a tool. A conversation whose time was up before stays over."""
        conversation.waits = conversation.leaving
        if conversation.state != "over":
            self.set_state(conversation, "waiting")

    def set_state(self, conversation: Conversation, state: ConversationState) -> None:
        """What the conversation does now, for as long as it is not ended."""
        if conversation.ended:
            return
        self.open.pop(conversation, None)
        self._unpin(conversation, conversation.pinned)
        if state != conversation.state:
            before, conversation.state = conversation.state, state
            for entry in reversed(conversation.entries):
                _count(entry, before, -1)
                _count(entry, state, 1)
                self._mark(entry)
        if state == "over":
            self._unpin(conversation, 0)
            return
        self.open[conversation] = None
        if conversation.pinned:
            self.pinning[state][conversation] = None

    def end(self, conversation: Conversation) -> None:
        """No request of the conversation comes any more."""
        self.set_state(conversation, "over")
        conversation.ended = True
        conversation.entries = []

    def fork(self, conversation: Conversation, made: Conversation, now: float) -> None:
        """`made` begins as the other conversation is, or will be once the step that still uses its
        blocks is computed."""
        if conversation.leaving:
            conversation.forks.append(made)
            made.leaving = True
        elif not made.ended and conversation.entries:
            self.hold(made, conversation.entries, now)

    def expire(self, now: float) -> None:
        """Conversations whose time is up are over, until a request of theirs comes."""
        for conversation in [each for each in self.open if each.until <= now]:
            self.set_state(conversation, "over")
        self.due = min((each.until for each in self.open), default=math.inf)

    def give_up(self) -> None:
        """Take the pins of the conversation that can best do without. There must be one."""
        first = next(iter(self.pinning["live"] or self.pinning["waiting"]))
        self._unpin(first, 0)

    def released(self, entry: CacheEntry) -> bool:
        """The last reference to a block went; whether it is pinned."""
        if not entry.pins:
            return False
        self.idle[entry.block] = entry
        return True

    def reused(self, entry: CacheEntry) -> None:
        """A block is in use."""
        if entry.pins:
            self.idle.pop(entry.block, None)

    def _pin(self, conversation: Conversation) -> None:
        """Pin its blocks, as many as may be, in place of those of others."""
        self._unpin(conversation, conversation.pinned)
        for entry in conversation.entries[conversation.pinned :]:
            if self._published.get(entry.block) is not entry:
                # Evicted while it was not pinned: what follows cannot be hit either.
                break
            if not entry.pins:
                while self.pinned_blocks >= self.most and any(self.pinning.values()):
                    self.give_up()
                if self.pinned_blocks >= self.most:
                    break
                self.pinned_blocks += 1
                if entry.block in self._guard.evictable:
                    # For the policy it is in use from now on.
                    self._guard.reused(entry.block, entry.meta)
                    self.idle[entry.block] = entry
            entry.pins += 1
            conversation.pinned += 1
        if conversation.pinned:
            self.pinning[conversation.state][conversation] = None

    def _unpin(self, conversation: Conversation, keep: int) -> None:
        """Take the pins of all blocks but the first ones; and its place among those that pin."""
        for pinning in self.pinning.values():
            pinning.pop(conversation, None)
        for entry in reversed(conversation.entries[keep : conversation.pinned]):
            entry.pins -= 1
            if not entry.pins:
                self.pinned_blocks -= 1
                if self.idle.pop(entry.block, None) is not None:
                    self._guard.released(entry.block, entry.meta)
        conversation.pinned = min(conversation.pinned, keep)

    def _let_go(self, conversation: Conversation, keep: int) -> None:
        """All blocks but the first ones are the conversation's no more."""
        self._unpin(conversation, keep)
        for entry in reversed(conversation.entries[keep:]):
            _count(entry, conversation.state, -1)
            self._mark(entry)

    def _mark(self, entry: CacheEntry) -> None:
        """Tell the policy what the block's conversations do, if that has changed."""
        state: ConversationState = "live" if entry.live else "over"
        if entry.waiting:
            state = "waiting"
        if entry.meta.conversation != state:
            metadata.set_conversation(entry.meta, state)
            self._guard.conversation_changed(entry.block, entry.meta)


def _take_forks(conversation: Conversation) -> list[Conversation]:
    """Take out the forks that wait for its blocks, and the forks of these. There may be more than
    Python's stack has room for."""
    made = [conversation]
    for each in made:
        made += each.forks
        each.forks = []
    return made[1:]


def _count(entry: CacheEntry, state: ConversationState, by: int) -> None:
    """So many more conversations of this state hold the block."""
    if state == "live":
        entry.live += by
    elif state == "waiting":
        entry.waiting += by
