"""`PromptReader`: from a prompt of any kind to token ids, refused as early as possible."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeGuard

from asyncinfer.config import EngineConfig
from asyncinfer.engine.chats import Chats
from asyncinfer.engine.footprint import texts_of
from asyncinfer.engine.source import Loaded
from asyncinfer.engine.spoken import SpokenMessages
from asyncinfer.errors import InvalidRequest, PromptTooLong, Size
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import check_fits
from asyncinfer.tools import ChatOptions, MessageReader

__all__ = ["PromptReader", "checked_ids", "is_chat", "message_chars"]

#: A template writes the messages of these roles as they are.
_SHOWN = ("system", "user")


class PromptReader:
    """Applies the chat template, tokenises, and checks against context and vocabulary."""

    def __init__(self, loaded: Loaded, config: EngineConfig) -> None:
        self._loaded = loaded
        self._spec = loaded.runner.spec
        self._config = config
        self._chats = Chats(loaded)

    def read(
        self,
        prompt: Any,
        params: SamplingParams,
        chat: ChatOptions | None,
        check_cancelled: Callable[[], object],
    ) -> tuple[list[int], MessageReader | None]:
        """The prompt's token ids, at least one, and what reads the answers to a chat. Raises
        `InvalidRequest`, and what `check_cancelled` raises, which is called between two phases."""
        tokenizer, spec = self._loaded.tokenizer, self._spec
        message: MessageReader | None = None
        if chat is not None and not is_chat(prompt):
            raise InvalidRequest(
                "prompt", prompt, "must be chat messages, to have options of chats"
            )
        if isinstance(prompt, str):
            self._check_chars(len(prompt))
            token_ids = tokenizer.encode(prompt)
        elif isinstance(prompt, list | tuple) and not prompt:
            raise InvalidRequest("prompt", prompt, "is empty: must hold a token id or a message")
        elif is_chat(prompt):
            self._chats.template()
            self.check_messages(prompt)
            text = self._chats.render(prompt, chat)
            message = self._chats.reader(prompt, text, chat)
            check_cancelled()
            self._check_chars(len(text))
            token_ids = self._chats.encode(prompt, text, chat)
            if isinstance(prompt, SpokenMessages):
                prompt.prompt_ids = tuple(token_ids)
        elif isinstance(prompt, list | tuple) and isinstance(prompt[0], Integral):
            # Checked before looking at each token.
            check_fits(spec, len(prompt), params.max_tokens, params.prompt_logprobs)
            token_ids = checked_ids("prompt", prompt, spec.vocab_size)
        else:
            raise InvalidRequest(
                "prompt", prompt, "must be a string, a list of token ids or a list of chat messages"
            )
        if not token_ids:
            if tokenizer.bos_id is None:
                raise InvalidRequest("prompt", prompt, "is empty, and the model has no BOS token")
            token_ids = [tokenizer.bos_id]
        return token_ids, message

    def negative(
        self, params: SamplingParams, prompt: Sequence[int], chat: ChatOptions | None
    ) -> list[int]:
        """The token ids of the negative prompt; without one, the last token of the prompt. Nothing
        for a request without guidance. Messages are rendered as those of the prompt. Raises
        `InvalidRequest`."""
        text = params.negative_prompt
        if params.guidance_scale == 1 or params.max_tokens == 0:
            return []
        try:
            if is_chat(text):
                self._chats.template()
                self.check_messages(text)
                rendered = self._chats.render(text, chat)
                self._check_chars(len(rendered))
                return self._loaded.tokenizer.encode_chat(rendered)
            if not isinstance(text, str):
                return [each for each in text or prompt[-1:] if isinstance(each, int)]
            self._check_chars(len(text))
            return self._loaded.tokenizer.encode(text) or [*prompt[-1:]]
        except InvalidRequest as error:
            raise InvalidRequest("negative_prompt", error.value, error.bound) from error

    def check_messages(self, messages: Sequence[Any]) -> None:
        """Refuse messages before a template sees them: it may take long, and writes at least the
        messages' contents."""
        chars = message_chars(messages)
        self._check_limit(chars, "of messages")
        # Only these roles: a template may leave out the assistant's reasoning.
        self._check_context(message_chars(messages, _SHOWN), "of messages")
        if not chars and not any(map(_says_something, messages)):
            raise InvalidRequest("prompt", messages, "is empty: no message has any content")

    def _check_chars(self, chars: int) -> None:
        """Refuse a text that is too long before anybody tokenises it."""
        self._check_limit(chars)
        self._check_context(chars)

    def _check_limit(self, chars: int, what: str = "") -> None:
        most = self._config.max_prompt_chars
        if chars > most:
            value = Size(f"{chars} characters {what}".rstrip())
            raise InvalidRequest("prompt", value, f"must have <= max_prompt_chars={most}")

    def _check_context(self, chars: int, what: str = "") -> None:
        context, longest = self._spec.max_context, self._loaded.tokenizer.longest_token
        if longest is not None and chars > context * longest:
            value = Size(f"{chars} characters {what}".rstrip())
            bound = f"at most {context * longest} can fit a context of {context} tokens"
            raise PromptTooLong("prompt", value, bound)


def message_chars(messages: Sequence[Any], roles: Collection[str] | None = None) -> int:
    """Characters in the contents of unchecked chat messages; `roles` limits them to these roles."""
    return sum(
        len(text)
        for message in messages
        if roles is None or (isinstance(message, Mapping) and message.get("role") in roles)
        for text in texts_of(message)
    )


def is_chat(prompt: Any) -> TypeGuard[Sequence[Any]]:
    """Whether a prompt is chat messages, by its first one: it may be a million token ids."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _says_something(message: Any) -> bool:
    """Whether a message without texts has calls, or is or has what is no text, which is refused by
    its name later."""
    if not isinstance(message, Mapping):
        return True
    content = message.get("content")
    if not isinstance(content, list):
        content = [{"type": "text", "text": "" if content is None else content}]
    others = (
        not isinstance(part, Mapping) or (part.get("type"), part.get("text")) != ("text", "")
        for part in content
    )
    return bool(message.get("tool_calls")) or any(others)


def checked_ids(name: str, value: Sequence[Any], vocab_size: int) -> list[int]:
    """A copy of token ids. An event loop waits for it, so that one look at all of them comes first,
    which takes a fifth of the time that looking at each takes."""
    ids = [*value]
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    return [_token_id(f"{name}[{index}]", id, vocab_size) for index, id in enumerate(ids)]


def _token_id(name: str, token: Any, vocab_size: int) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise InvalidRequest(name, token, "must be an integer token id")
    number = int(token)
    if not 0 <= number < vocab_size:
        raise InvalidRequest(name, token, f"must be in [0, {vocab_size})")
    return number
