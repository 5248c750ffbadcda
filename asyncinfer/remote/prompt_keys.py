"""`PromptKeys`: the prefix-cache keys of a prompt, computed where the prompt is routed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from asyncinfer.cache import BlockHasher
from asyncinfer.engine import EngineTokenizer
from asyncinfer.engine.prompt_reader import is_chat

__all__ = ["PromptKeys"]

#: The longest prompt, in characters or tokens, whose keys are computed on the event loop, and the
#: longest that has keys: tokenising a longer one a second time would take too long.
AT_HAND: Final = 2048
MOST_KEYED: Final = 1 << 20
#: The most keys of a prompt, which are those of its beginning: the event loop reads all of them.
MOST_KEYS: Final = 4096
#: Prompts whose keys threads compute at once.
KEYED_AT_ONCE: Final = 2

_OF_CHATS: Final = ("tools", "template_options", "continue_final_message")


class PromptKeys:
    """Keys of the first full blocks of prompts. Keys only help routing, so a prompt has none if it
    comes while two others are being keyed."""

    def __init__(self, tokenizer: EngineTokenizer, hasher: BlockHasher) -> None:
        self._tokenizer = tokenizer
        self._hasher = hasher
        self._threads = ThreadPoolExecutor(KEYED_AT_ONCE, "asyncinfer-keys")
        #: Keys that are being computed, also where nobody waits for them any more.
        self._making: list[Future[list[bytes]]] = []
        self._closed = False

    async def of(self, prompt: Any, options: Mapping[str, Any]) -> list[bytes]:
        """The keys of a request's prompt, in order. Raises `InvalidRequest` for one that cannot be
        read."""
        scope = options.get("cache_scope", "")
        size = len(prompt) if isinstance(prompt, str | list | tuple) else 0
        if size > MOST_KEYED or not isinstance(scope, str):
            return []
        if not is_chat(prompt) and size <= AT_HAND:
            return self._made(prompt, options, scope)
        # A thread cannot be stopped, so it counts until it is done.
        self._making = [each for each in self._making if not each.done()]
        if self._closed or len(self._making) >= KEYED_AT_ONCE:
            return []
        self._making.append(making := self._threads.submit(self._made, prompt, options, scope))
        return await asyncio.wrap_future(making)

    def close(self) -> None:
        """Let the threads finish what they compute. Later prompts have no keys."""
        self._closed = True
        self._threads.shutdown(wait=False)

    def _made(self, prompt: Any, options: Mapping[str, Any], scope: str) -> list[bytes]:
        ids = prompt
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt)
        elif is_chat(prompt):
            given = {name: options[name] for name in _OF_CHATS if name in options}
            ids = self._tokenizer.encode_chat(prompt, **given)
        if not isinstance(ids, list | tuple):
            return []
        ids = ids[: MOST_KEYS * self._hasher.block_size]
        # The replica refuses bad token ids.
        return self._hasher.keys(ids, scope) if all(map(_may_be_token, ids)) else []


def _may_be_token(value: object) -> bool:
    """Whether a key can be computed from it."""
    return type(value) is int and 0 <= value < 1 << 31
