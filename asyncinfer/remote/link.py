"""How a program reaches a replica, and the plain data that is pickled between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from asyncinfer.chunk import Chunk, Completion, ToolCallDelta
from asyncinfer.engine import EngineTokenizer, ModelInfo
from asyncinfer.errors import RequestFailed
from asyncinfer.params import SamplingParams
from asyncinfer.stats import EngineHealth, EngineStats

__all__ = ["Begun", "Held", "Introduction", "Link", "News", "ReplicaLost", "SentChunk", "Taken"]


class ReplicaLost(RequestFailed):
    """The replica that computed a request is gone, and so is the request; other replicas go on."""


class Link(Protocol):
    """A connection to one replica. asyncio only."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the `Replica`. Raises what the method raises, and `ReplicaLost` if it
        cannot be reached. A cancelled call stops waiting; the method goes on."""


class Introduction(NamedTuple):
    """What a replica tells about itself once it is open."""

    #: Differs after each restart of the replica.
    life: str
    tokenizer: EngineTokenizer
    model: ModelInfo
    default_params: SamplingParams
    max_requests: int
    #: Seconds that a close waits for requests by default.
    drain_timeout: float
    #: Tokens of a block and the secret of the keys; None without a prefix cache.
    prefixes: tuple[int, bytes] | None


class News(NamedTuple):
    """What has changed at a replica since the last call for news."""

    life: str
    #: Keys of blocks, each with whether the prefix cache holds that block now, in order.
    changes: Sequence[tuple[bytes, bool]]
    stats: EngineStats
    health: EngineHealth


class Held(NamedTuple):
    """What a replica is to keep: the blocks of a conversation, or of a prompt."""

    name: str
    #: Seconds for which the blocks are kept after a request, None for ever.
    ttl: float | None
    #: The conversation that this one was forked from.
    origin: str | None


class Begun(NamedTuple):
    """The replica's answer when a stream has begun."""

    prompt_tokens: int | None
    #: Token ids of the prompt, in a session only.
    prompt_ids: tuple[int, ...]


class SentChunk(NamedTuple):
    """A chunk as it travels."""

    chunk: Chunk
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]


class Taken(NamedTuple):
    """What `Replica.take` returns: chunks, or the end of the stream."""

    pieces: Sequence[SentChunk]
    #: The whole answer, once nothing more is to be read.
    done: Completion | None = None
