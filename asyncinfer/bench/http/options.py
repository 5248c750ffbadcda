"""`HttpOptions`, and the chat that the benchmark sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["CHAT", "TEMPLATE", "HttpOptions"]

CHAT: Final = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is the capital of France?"},
]
TEMPLATE: Final = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options of the benchmark."""

    #: The event loop on which uvicorn runs: asyncio or uvloop.
    loop: str = "asyncio"
    #: Open streams, and the tokens a second that they get together.
    streams: int = 200
    rate: float = 4000.0
    #: How long clients come, and how long the idle loop is measured before.
    seconds: float = 10.0
    #: Tokens of an answer that is read to its end.
    tokens: int = 64
    #: In-process calls of each kind.
    calls: int = 1000
    repeat: int = 3
