"""`Session`: a conversation, whose every token is computed once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

from asyncinfer.checks import check_integer, check_string
from asyncinfer.chunk import Chunk, Completion, Timings, Usage
from asyncinfer.engine.hold import Keeper
from asyncinfer.engine.spoken import Answered, SpokenMessages, chat_messages
from asyncinfer.engine.uncopied import Uncopied
from asyncinfer.errors import EngineClosed, InvalidRequest, StreamBusy

__all__ = ["Session", "SessionStream", "open_session"]


class AnswerStream(Protocol):
    """The part of a `Stream` that a session uses; `RemoteStream` has it, too."""

    request_id: str

    @property
    def ready(self) -> bool: ...

    @property
    def prompt_tokens(self) -> int | None: ...

    @property
    def usage(self) -> Usage | None: ...

    @property
    def timings(self) -> Timings | None: ...

    async def __anext__(self) -> Chunk: ...

    def __await__(self) -> Generator[Any, Any, Completion]: ...

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None: ...

    def stop(self) -> None: ...

    async def aclose(self) -> None: ...


class Session(Uncopied):
    """A conversation with an engine's model. Made by `Engine.session()`.

    What the model has said stays the tokens that it drew: a text that is tokenised again may become
    others, which the prefix cache does not have. One answer at a time; a session belongs to one
    event loop.
    """

    def __init__(
        self,
        begin: Callable[..., AnswerStream],
        eos_ids: frozenset[int],
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        hold: Keeper,
    ) -> None:
        """`begin` is `Engine.stream`, called with `options`; `hold` keeps the session's blocks."""
        self._hold = hold
        self._begin = begin
        self._eos_ids = eos_ids
        self._options = dict(options)
        #: Another tuple after each change, which `begin_answer` looks for.
        self._messages = tuple(messages)
        #: The token ids up to each answer that is still part of the conversation.
        self._answers: list[Answered] = []
        self._open = True
        self._speaking = False

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The conversation so far."""
        return self._messages

    def append(self, *messages: str | Mapping[str, Any]) -> None:
        """Add messages, such as the results of tools, without asking for an answer. A string is the
        user's. Raises `InvalidRequest` for bad messages, `StreamBusy` while a stream runs."""
        self._check_silent()
        if messages:
            self._messages += tuple(chat_messages(messages))

    def stream(self, *messages: str | Mapping[str, Any], **options: Any) -> SessionStream:
        """The answer to the conversation and these messages, as it is generated; options are those
        of `Engine.stream`, before those of the session. Messages and answer are added when the
        stream has ended. One that fails or is left before adds neither, and may be asked for
        again."""
        self._check()
        given = {**self._options, **options}
        n = given.get("n", getattr(given.get("params"), "n", 1))
        if n != 1:
            raise InvalidRequest("n", n, "a session has one answer at a time")
        answered = self._answers[-1] if self._answers else None
        prompt = self._hold.prompt([*self._messages, *chat_messages(messages)], answered)
        prompt.continued = bool(given.get("continue_final_message"))
        return SessionStream(self, self._begin(prompt, **given), prompt, self._messages)

    async def send(self, *messages: str | Mapping[str, Any], **options: Any) -> Completion:
        """The whole answer at once; see `stream`."""
        return await self.stream(*messages, **options)

    def fork(self) -> Session:
        """A second conversation that begins as this one; the tokens of the beginning are shared."""
        self._check()
        made = Session(self._begin, self._eos_ids, self._messages, self._options, self._hold.fork())
        made._answers = [*self._answers]
        return made

    def rewind(self, count: int) -> None:
        """Take back the last `count` messages. Raises `InvalidRequest` if there are fewer,
        `StreamBusy` while a stream runs."""
        self._check_silent()
        kept = len(self._messages) - check_integer("count", count, 0, len(self._messages))
        self._messages = self._messages[:kept]
        while self._answers and self._answers[-1].messages > kept:
            self._answers.pop()

    def close(self) -> None:
        """Forget the conversation. Its blocks are kept no longer than others. A second call does
        nothing."""
        self._open = False
        self._hold.close()
        self._messages = ()
        self._answers.clear()

    def begin_answer(self, before: object) -> None:
        """Note that a stream begins, made when the conversation was `before`. Raises `StreamBusy`
        while another stream runs, and where messages were added or removed since."""
        self._check_silent()
        if before is not self._messages:
            raise StreamBusy("the session has gone on since this stream was made; make another")
        self._speaking = True

    def end_answer(self, prompt: SpokenMessages, done: Completion | None) -> None:
        """Note that the stream has ended; `done` is None where it gave no answer."""
        self._speaking = False
        if done is None or not self._open:
            return
        self._messages = prompt.with_answer(done.message)
        if done.tool_calls:
            self._hold.wait_for_tool()
        said = done.token_ids
        ended = said and said[-1] in self._eos_ids
        token_ids = (*prompt.prompt_ids, *(said[:-1] if ended else said))
        self._answers.append(Answered(len(self._messages), token_ids))

    def _check_silent(self) -> None:
        self._check()
        if self._speaking:
            raise StreamBusy("the session's model is answering already")

    def _check(self) -> None:
        if not self._open:
            raise EngineClosed("the session is closed")


class SessionStream(Uncopied):
    """One answer of a session: async iterator of `Chunk`, async context manager, awaitable."""

    def __init__(
        self, session: Session, stream: AnswerStream, prompt: SpokenMessages, before: object
    ) -> None:
        self._session, self._stream = session, stream
        self._prompt, self._before = prompt, before
        self._begun = self._ended = False

    def __aiter__(self) -> SessionStream:
        return self

    async def __anext__(self) -> Chunk:
        self._begin()
        try:
            return await anext(self._stream)
        except StopAsyncIteration:
            await self._finish()
            raise
        except Exception as error:
            self._fail(error)
            raise

    def __await__(self) -> Generator[Any, Any, Completion]:
        return self._whole().__await__()

    async def __aenter__(self) -> SessionStream:
        self._begin()
        try:
            await self._stream.__aenter__()
        except BaseException as error:
            self._fail(error)
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._end(None)
        await self._stream.__aexit__(kind, *rest)

    @property
    def request_id(self) -> str:
        """The request's id, as logs and observers have it."""
        return self._stream.request_id

    @property
    def ready(self) -> bool:
        """See `Stream.ready`."""
        return self._stream.ready

    @property
    def usage(self) -> Usage | None:
        """Tokens taken, once the stream has ended."""
        return self._stream.usage

    @property
    def timings(self) -> Timings | None:
        """Times taken, once the stream has ended."""
        return self._stream.timings

    def stop(self) -> None:
        """See `Stream.stop`; the text so far becomes part of the conversation."""
        self._stream.stop()

    async def aclose(self) -> None:
        """Abort as `Stream.aclose` does; the answer does not become part of the conversation."""
        self._end(None)
        await self._stream.aclose()

    def __del__(self) -> None:
        self._end(None)

    async def _whole(self) -> Completion:
        self._begin()
        try:
            return await self._finish()
        except BaseException as error:
            self._fail(error)
            raise

    async def _finish(self) -> Completion:
        done = await self._stream
        self._end(done)
        return done

    def _begin(self) -> None:
        if not self._begun:
            self._session.begin_answer(self._before)
            self._begun = True

    def _fail(self, error: BaseException) -> None:
        """Note an error. A stream that never began because of it may be started again."""
        if isinstance(error, StreamBusy):
            return  # Another task is reading this stream, and may go on.
        if self._stream.prompt_tokens is not None:
            self._end(None)
        elif self._begun and not self._ended:
            self._begun = False
            self._session.end_answer(self._prompt, None)

    def _end(self, done: Completion | None) -> None:
        if self._begun and not self._ended:
            self._ended = True
            self._session.end_answer(self._prompt, done)


def open_session(
    begin: Callable[..., AnswerStream],
    eos_ids: frozenset[int] | None,
    messages: Sequence[Mapping[str, Any]],
    system: str | None,
    options: Mapping[str, Any],
    hold: Keeper,
) -> Session:
    """A session that begins with the system message `system` and these messages. `eos_ids` is None
    where the model has no chat template. Raises `InvalidRequest`."""
    if eos_ids is None:
        raise InvalidRequest("messages", "a chat", "this model has no chat template")
    told = chat_messages(messages, texts=False)
    if system is not None:
        told = [{"role": "system", "content": check_string("system", system)}, *told]
    chat = Session(begin, eos_ids, told, options, hold)
    chat.stream()  # for its checks of options alone: it is never started
    return chat
