"""Logprobs as OpenAI's protocols have them: with the text of each token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncinfer.chunk import TokenLogprob, Usage
from asyncinfer.engine import EngineTokenizer

__all__ = ["TextOffsets", "chat_logprobs", "completion_logprobs", "scored_bytes"]


def chat_logprobs(tokenizer: EngineTokenizer, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """A choice's `logprobs` in a chat."""
    content = []
    for entry in logprobs:
        token = _token(tokenizer, entry.token_id, entry.logprob)
        token["top_logprobs"] = [_token(tokenizer, *pair) for pair in entry.top]
        content.append(token)
    return {"content": content, "refusal": None}


def scored_bytes(options: Mapping[str, Any], usage: Usage) -> int:
    """About the bytes of the logprobs that these options ask for, alternatives included."""
    tokens = usage.completion_tokens + (usage.prompt_tokens if "prompt_logprobs" in options else 0)
    return 64 * tokens * (1 + options["logprobs"]) if "logprobs" in options else 0


class TextOffsets:
    """Where each token of a text begins in it. A token that goes on with a character begins where
    that does; a special token has no text."""

    def __init__(self, tokenizer: EngineTokenizer, after: Sequence[int] = ()) -> None:
        """`after`: the tokens before the text."""
        self._detokenizer = tokenizer.detokenizer(after)
        self._characters = 0

    def of(self, token_id: int) -> int:
        """Characters before the token, which follows those of the calls before."""
        before = self._characters
        self._characters += len(self._detokenizer.push(token_id))
        return before


def completion_logprobs(
    tokenizer: EngineTokenizer,
    logprobs: Iterable[tuple[int, TokenLogprob | None]],
    offsets: TextOffsets,
) -> dict[str, Any]:
    """A choice's `logprobs` of a completion, by token ids; the first of a prompt has no logprob.
    `offsets` has had the tokens before."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for token_id, entry in logprobs:
        text = _text(tokenizer, token_id)
        columns["tokens"].append(text)
        columns["token_logprobs"].append(None if entry is None else entry.logprob)
        columns["top_logprobs"].append(
            None if entry is None else {_text(tokenizer, each): value for each, value in entry.top}
        )
        columns["text_offset"].append(offsets.of(token_id))
    return columns


def _token(tokenizer: EngineTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    text = _text(tokenizer, token_id)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode() if raw is None else raw)}


def _text(tokenizer: EngineTokenizer, token_id: int) -> str:
    """The token's text; a part of a character is written by its bytes, as OpenAI does."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    raw = tokenizer.token_bytes(token_id) if "\ufffd" in text else None
    if raw is None:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
