"""`Transcript` records what a consumer has taken of a stream, and makes the `Completion`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from asyncinfer.chunk import Choice, Chunk, Completion, TokenLogprob, ToolCall, ToolCallDelta, Usage
from asyncinfer.engine.loop_bridge import Content, LoopBridge
from asyncinfer.engine.stream_buffer import Outcome, StreamBuffer
from asyncinfer.scheduler import RowLogprobs
from asyncinfer.structured_output import AnswerReader
from asyncinfer.tools import MessageDelta, MessageParser, MessageReader, Tool

__all__ = ["AnswerChunk", "Transcript", "unpack"]

_NOTHING: Final = MessageDelta("", "", ())
#: How many logprobs (alternatives included) or characters of a message are read without a pause.
UNPACKED = 4096
READ: Final = 2048


class Transcript:
    """Keeps the contents of chunks and not the chunks: with an object kept per token, the garbage
    collector would walk the host's whole heap every few ten thousand tokens. The buffer keeps the
    logprobs."""

    __slots__ = ("_answers", "_reader", "_tools")

    def __init__(self, answers: int, reader: AnswerReader | None = None) -> None:
        """`reader` reads the answers, if they are JSON."""
        self._answers = [_Received() for _ in range(answers)]
        self._reader = reader
        self._tools: Mapping[str, Tool] = {}

    def read_messages(self, message: MessageReader) -> None:
        """The answers are messages, which `message` reads. To be called before the first chunk."""
        self._tools = message.tools
        for answer in self._answers:
            answer.parser = message.parser()
        span, reader = message.family.reasoning, self._reader
        if reader is not None and span is not None and reader.after == span.close:
            # The content of a message begins after it.
            self._reader = reader._replace(after="")

    def readable(self, chunk: Chunk) -> Chunk:
        """A chunk just added, with a `partial` if the answers are JSON, and with the parts of a
        message."""
        answer = self._answers[chunk.index]
        if answer.parser is None:
            if self._reader is None:
                return chunk
            return AnswerChunk.of(chunk, answer.texts, self._reader)
        delta = answer.read()
        shown = chunk._replace(text=delta.content)
        return AnswerChunk.of(shown, answer.texts, self._reader, delta)

    def add(self, chunk: Chunk | Content) -> None:
        text, token_ids, _, index, reason, stop = chunk
        answer = self._answers[index]
        if answer.parser is None:
            answer.texts.append(text)
        else:
            answer.unread.append(text)
            answer.sizes.append(len(text))
            answer.counts.append(len(token_ids))
        answer.token_ids.extend(token_ids)
        if reason is not None:
            answer.finish_reason, answer.stop_reason = reason, stop

    def usage(self, usage: Usage) -> Usage:
        """What the request took, with the tokens of reasoning that were read."""
        thought = sum(answer.reasoning_tokens() for answer in self._answers)
        return replace(usage, reasoning_tokens=thought) if thought else usage

    async def completion(
        self, request_id: str, buffer: StreamBuffer, outcome: Outcome
    ) -> Completion:
        """The whole answer, once all was taken. Other tasks have a turn every few milliseconds."""
        bridge, scores = buffer.bridge, outcome.scores
        answers = self._answers if scores is None else self._answers[: len(scores)]
        for answer in self._answers:
            if answer.parser is not None:
                answer.read(READ)
            while answer.unread:
                await bridge.checkpoint()
                answer.read(READ)
        choices = [
            Choice(
                index=index,
                text="".join(answer.texts),
                token_ids=tuple(answer.token_ids),
                logprobs=await unpack(buffer.kept(index), bridge),
                finish_reason=answer.finish_reason or "aborted",
                stop_reason=answer.stop_reason,
                reader=self._reader,
                reasoning="".join(answer.reasoning),
                tool_calls=tuple(call.whole(self._tools) for call in answer.calls),
                score=None if scores is None else scores[index],
            )
            for index, answer in enumerate(answers)
        ]
        prompt: tuple[TokenLogprob | None, ...] | None = None
        if outcome.prompt_logprobs is not None:
            prompt = None, *await unpack(outcome.prompt_logprobs, bridge)
        return Completion(
            request_id=request_id,
            choices=tuple(choices),
            usage=self.usage(outcome.usage),
            timings=outcome.timings,
            prompt_logprobs=prompt,
            embedding=outcome.embedding,
        )


async def unpack(parts: Iterable[RowLogprobs], bridge: LoopBridge) -> tuple[TokenLogprob, ...]:
    """Logprobs unpacked for the consumer."""
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


class AnswerChunk(Chunk):
    """A chunk of an answer that is JSON, or a message. It refers to the texts of all chunks and
    reads them when asked: reading JSON takes time, and most consumers ask now and then."""

    _texts: list[str]
    _count: int
    _reader: AnswerReader | None
    _delta: MessageDelta

    @classmethod
    def of(
        cls,
        chunk: Chunk,
        texts: list[str],
        reader: AnswerReader | None,
        delta: MessageDelta = _NOTHING,
    ) -> AnswerChunk:
        """`texts` are those of the answer's chunks up to this one; later ones are appended."""
        made = cls(*chunk)
        made._texts, made._count, made._reader, made._delta = texts, len(texts), reader, delta
        return made

    @property
    def partial(self) -> Any:
        if self._reader is None:
            return None
        return self._reader.partial("".join(self._texts[: self._count]))

    @property
    def reasoning(self) -> str:
        return self._delta.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCallDelta, ...]:
        return self._delta.tool_calls


class _Received:
    """What the consumer has taken of one of the `n` answers."""

    __slots__ = (
        "calls",
        "counts",
        "finish_reason",
        "parser",
        "reasoning",
        "sizes",
        "stop_reason",
        "texts",
        "token_ids",
        "unread",
    )

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        #: The parser of an answer that is a message, whose `texts` are then its content.
        self.parser: MessageParser | None = None
        #: Texts that the parser has not read.
        self.unread: list[str] = []
        #: Characters and tokens of each chunk that the parser gets.
        self.sizes = array("q")
        self.counts = array("q")
        self.reasoning: list[str] = []
        self.calls: list[_Call] = []

    def read(self, most: int | None = None) -> MessageDelta:
        """Let the parser read on, at most `most` characters. Returns what that has added."""
        assert self.parser is not None
        text = "".join(self.unread)
        self.unread.clear()
        if most is not None and len(text) > most:
            self.unread.append(text[most:])
            text = text[:most]
        delta = self.parser.feed(text)
        if self.finish_reason is not None and not self.unread:
            delta = delta.then(self.parser.end())
        self.texts.append(delta.content)
        self.reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.name is not None:
                self.calls.append(_Call(call.id or "", call.name))
            self.calls[-1].arguments.append(call.arguments)
        return delta

    def reasoning_tokens(self) -> int:
        """See `Usage`. A token without text counts with the next one that has some."""
        thoughts = [] if self.parser is None else self.parser.thoughts
        total = at = waiting = place = 0
        for size, count in zip(self.sizes, self.counts, strict=True):
            if place == len(thoughts):
                break
            waiting += count
            if not size:
                continue
            end, inside = at + size, 0
            while place < len(thoughts) and thoughts[place][0] < end:
                inside += min(end, thoughts[place][1]) - max(at, thoughts[place][0])
                if thoughts[place][1] > end:
                    break
                place += 1
            total += round(waiting * inside / size)
            at, waiting = end, 0
        return total


class _Call:
    """A tool call as its deltas come."""

    __slots__ = ("arguments", "id", "name")

    def __init__(self, call_id: str, name: str) -> None:
        self.id = call_id
        self.name = name
        self.arguments: list[str] = []

    def whole(self, tools: Mapping[str, Tool]) -> ToolCall:
        """The complete call, for the consumer."""
        tool = tools.get(self.name)
        model = None if tool is None else tool.model
        return ToolCall(self.id, self.name, "".join(self.arguments), model)
