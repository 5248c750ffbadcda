"""`ScoredMailbox`: the mailbox of a stream that asked for logprobs."""

from __future__ import annotations

from asyncinfer.chunk import Chunk
from asyncinfer.engine.mailbox import Content, Mailbox
from asyncinfer.engine.ports import Port
from asyncinfer.scheduler import RowLogprobs

__all__ = ["ScoredMailbox"]


class ScoredMailbox(Mailbox):
    """Logprobs are packed until a chunk is taken; of what was taken they are kept packed, for
    whoever awaits the whole answer."""

    __slots__ = ("_kept",)

    def __init__(self, port: Port, answers: int, coalesce: int | None = None) -> None:
        super().__init__(port, coalesce)
        self._kept: list[list[RowLogprobs]] = [[] for _ in range(answers)]

    def take(self) -> Chunk:
        text, token_ids, packed, index, reason = self.take_packed()
        return Chunk(text, token_ids, tuple(packed), index, reason)

    def take_packed(self) -> Content:
        content = super().take_packed()
        packed = content[2]
        if isinstance(packed, RowLogprobs):
            self._kept[content[3]].append(packed)
        return content

    def kept(self, index: int) -> list[RowLogprobs]:
        return self._kept[index]
