"""`EngineTokenizer`: how an engine reads prompts, for programs that count or show tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from asyncinfer.bounds import MAX_TOKENS
from asyncinfer.checks import check_boolean, check_string
from asyncinfer.config import EngineConfig
from asyncinfer.engine.chats import Chats
from asyncinfer.engine.prompt_reader import PromptReader
from asyncinfer.engine.source import Loaded
from asyncinfer.errors import InvalidRequest
from asyncinfer.scheduler import RunnerSpec
from asyncinfer.text import Detokenizer, Tokenizer
from asyncinfer.tools import ChatOptions

__all__ = ["EngineTokenizer"]


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Stands in for the runner of a pickled tokenizer, whose `spec` holds a model's bounds."""

    spec: RunnerSpec


class EngineTokenizer:
    """Texts and chats to token ids as requests have them, and back: `engine.tokenizer`.

    From any thread. Long texts take milliseconds, so call it off the event loop for these.
    """

    def __init__(self, loaded: Loaded, config: EngineConfig) -> None:
        self._loaded, self._config = loaded, config
        self._tokenizer: Tokenizer = loaded.tokenizer
        self._chats = Chats(loaded)
        self._reader = PromptReader(loaded, config)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without the model, since reading prompts needs the model's bounds alone."""
        loaded, config = self._loaded, self._config
        runner: Any = _Bounds(loaded.runner.spec)
        bare = dataclasses.replace(loaded, runner=runner, modules=None)
        return EngineTokenizer, (bare, EngineConfig(max_prompt_chars=config.max_prompt_chars))

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""
        return self._tokenizer.eos_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with the special tokens that the model's tokenizer puts around one,
        such as one that begins it. Raises `InvalidRequest`."""
        check_string("text", text)
        check_boolean("add_special_tokens", add_special_tokens)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; malformed bytes become U+FFFD, ids without a token are left
        out. Raises `InvalidRequest`."""
        check_boolean("skip_special_tokens", skip_special_tokens)
        return self._tokenizer.decode(_ids("ids", ids), skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes that a token adds to a text; None where that depends on its neighbours.
        Raises `InvalidRequest`."""
        return self._tokenizer.token_bytes(*_ids("token_id", [token_id]))

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """Decodes one answer token by token; `after` are the tokens before it. Raises
        `InvalidRequest`."""
        return Detokenizer(self._tokenizer, _ids("after", after))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt that the model's template makes of a chat, with those options of
        `Engine.stream` that change it. As a prompt this text may give other tokens than the chat,
        if a message spells special tokens. Raises `InvalidRequest`."""
        options = ChatOptions.of(tools, None, True, template_options, continue_final_message)
        return "".join(self._tokenizer.shield.pieces(self._rendered(messages, options)))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids of a chat, as a request computes them. Raises `InvalidRequest`."""
        options = ChatOptions.of(tools, None, True, template_options, continue_final_message)
        return self._chats.encode(messages, self._rendered(messages, options), options)

    def count(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> int:
        """How many tokens a text or a chat is as a prompt. Raises `InvalidRequest`."""
        if isinstance(prompt, str):
            return len(self.encode(prompt))
        ids = self.encode_chat(
            prompt,
            tools=tools,
            template_options=template_options,
            continue_final_message=continue_final_message,
        )
        return len(ids)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None) -> str:
        self._chats.template()
        if not isinstance(messages, Sequence):
            raise InvalidRequest("messages", messages, "must be a list of messages")
        self._reader.check_messages(messages)
        return self._chats.render(messages, options)


def _ids(name: str, ids: Iterable[int]) -> list[int]:
    """Token ids of any kind of whole number, such as NumPy's, as a list."""
    try:
        found = [index(each) for each in ids]
    except TypeError:
        raise InvalidRequest(name, ids, "must be token ids") from None
    if found and not 0 <= min(found) <= max(found) <= MAX_TOKENS:
        raise InvalidRequest(name, ids, f"token ids are between 0 and {MAX_TOKENS}")
    return found
