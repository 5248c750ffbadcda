"""How a program reaches a replica, and what travels between them: plain data, pickled."""

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
    """The replica that computed a request is gone, and the request with it; others go on."""


class Link(Protocol):
    """A way to one replica. asyncio only."""

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the `Replica`. Raises what that raises, and `ReplicaLost` where it
        cannot be reached. Cancelled, it waits no longer: the method goes on."""


class Introduction(NamedTuple):
    """What a replica is, from when it is open."""

    #: Another one each time that the replica begins anew.
    life: str
    tokenizer: EngineTokenizer
    model: ModelInfo
    default_params: SamplingParams
    max_requests: int
    #: Seconds that a close waits for requests.
    drain_timeout: float
    #: Tokens of a block and the secret of its keys; None without a prefix cache.
    prefixes: tuple[int, bytes] | None


class News(NamedTuple):
    """What has changed at a replica since it was asked last."""

    life: str
    #: Keys of blocks, and whether its prefix cache holds them now, in order.
    changes: Sequence[tuple[bytes, bool]]
    stats: EngineStats
    health: EngineHealth


class Held(NamedTuple):
    """What a replica is to keep: the blocks of a conversation, or of a prompt."""

    name: str
    #: Seconds after a request for which they are kept, None for ever.
    ttl: float | None
    #: The conversation as which this one begins.
    origin: str | None


class Begun(NamedTuple):
    """A stream that has begun."""

    prompt_tokens: int | None
    #: Token ids of the prompt, where it is a session's.
    prompt_ids: tuple[int, ...]


class SentChunk(NamedTuple):
    """A chunk as it travels."""

    chunk: Chunk
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]


class Taken(NamedTuple):
    """What a stream has had to read: pieces, or its end."""

    pieces: Sequence[SentChunk]
    #: The whole answer, where nothing more is to be read.
    done: Completion | None = None
