"""`Transcript`: what a consumer has taken of a stream, and the `Completion` made of it."""

from __future__ import annotations

from collections.abc import Iterable

from asyncinfer.chunk import Choice, Chunk, Completion, TokenLogprob
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.stream_buffer import Content, Outcome, StreamBuffer
from asyncinfer.scheduler import RowLogprobs

__all__ = ["Transcript", "unpack"]

#: Logprobs, alternatives included, that are unpacked without a pause.
UNPACKED = 4096


class Transcript:
    """Keeps the contents of chunks and not the chunks: with an object kept per token, the garbage
    collector would walk the host's whole heap every few ten thousand tokens. The buffer keeps the
    logprobs."""

    __slots__ = ("_answers",)

    def __init__(self, answers: int) -> None:
        self._answers = [_Answer() for _ in range(answers)]

    def add(self, chunk: Chunk | Content) -> None:
        text, token_ids, _, index, reason = chunk
        answer = self._answers[index]
        answer.texts.append(text)
        answer.token_ids.extend(token_ids)
        if reason is not None:
            answer.finish_reason = reason

    async def completion(
        self, request_id: str, buffer: StreamBuffer, outcome: Outcome
    ) -> Completion:
        """The whole answer, once all was taken. Other tasks have a turn every few milliseconds."""
        bridge = buffer.bridge
        choices = [
            Choice(
                index=index,
                text="".join(answer.texts),
                token_ids=tuple(answer.token_ids),
                logprobs=await unpack(buffer.kept(index), bridge),
                finish_reason=answer.finish_reason or "aborted",
            )
            for index, answer in enumerate(self._answers)
        ]
        prompt: tuple[TokenLogprob | None, ...] | None = None
        if outcome.prompt_logprobs is not None:
            prompt = None, *await unpack(outcome.prompt_logprobs, bridge)
        return Completion(
            request_id=request_id,
            choices=tuple(choices),
            usage=outcome.usage,
            timings=outcome.timings,
            prompt_logprobs=prompt,
        )


async def unpack(parts: Iterable[RowLogprobs], bridge: LoopBridge) -> tuple[TokenLogprob, ...]:
    """Logprobs as consumers get them."""
    found: list[TokenLogprob] = []
    built = 0
    for part in parts:
        for entry in part:
            found.append(entry)
            built += 1 + len(entry.top)
            if built >= UNPACKED:
                built = 0
                await bridge.checkpoint()
    return tuple(found)


class _Answer:
    """What was taken of one of the `n` answers."""

    __slots__ = ("finish_reason", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
