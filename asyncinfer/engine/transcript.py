"""`Transcript`: what a consumer has taken of one answer."""

from __future__ import annotations

from asyncinfer.chunk import Choice, Chunk, TokenLogprob
from asyncinfer.engine.stream_buffer import Content

__all__ = ["Transcript"]


class Transcript:
    """Keeps what the chunks hold and not the chunks: an object kept per token would have the
    garbage collector walk the host's whole heap every few ten thousand tokens. Logprobs are the
    buffer's to keep."""

    __slots__ = ("_finish_reason", "_texts", "_token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None

    def add(self, chunk: Chunk | Content) -> None:
        text, token_ids, _, _, reason = chunk
        self._texts.append(text)
        self._token_ids.extend(token_ids)
        if reason is not None:
            self._finish_reason = reason

    def choice(self, index: int, logprobs: tuple[TokenLogprob, ...]) -> Choice:
        return Choice(
            index=index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=logprobs,
            finish_reason=self._finish_reason or "aborted",
        )
