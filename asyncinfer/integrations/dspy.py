"""`dspy_lm`: DSPy's language model on an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Self

from asyncinfer.engine import Engine, SyncEngine
from asyncinfer.errors import AsyncInferError, InvalidRequest, Overloaded, PromptTooLong
from asyncinfer.integrations.dspy_requests import Events, chat_of, options_of, response
from asyncinfer.integrations.engines import awaited

try:
    import dspy
    from dspy import lm15
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs DSPy: pip install "asyncinfer[dspy]"', name=error.name
    ) from error

__all__ = ["AsyncDSPyEngine", "DSPyEngine", "dspy_lm"]

#: Seconds after which DSPy retries a request that was refused for load.
_RETRY_AFTER: Final = 0.5


def dspy_lm(
    engine: Engine | SyncEngine, *, options: Mapping[str, Any] | None = None, **settings: Any
) -> dspy.LM:
    """A `dspy.LM` that calls an engine without a socket. A cancelled call ends its request.

    A `SyncEngine` supports calls and `acall`; an `Engine` supports `acall`, and calls raise
    `TypeError`.

    Args:
        options: options of `Engine.stream` for every request that DSPy does not have, such as
            `cache_scope`, `min_p` and `template_options`.
        settings: those of `dspy.LM`, such as `temperature`, `max_tokens`, `cache` and
            `num_retries`.
    """
    return dspy.LM(
        engine.model.name,
        engine=DSPyEngine(engine, options),
        async_engine=AsyncDSPyEngine(engine, options),
        **settings,
    )


class _Shared:
    """What DSPy asks an engine for besides answers."""

    supports_function_calling = True
    supports_response_schema = True
    #: The model decides whether it reasons: DSPy cannot ask for reasoning.
    supports_reasoning = False
    supported_params = frozenset(
        [
            *("temperature", "max_tokens", "top_p", "top_k", "stop", "seed", "logprobs"),
            *("presence_penalty", "frequency_penalty", "response_format", "stream"),
            *("tools", "tool_choice", "parallel_tool_calls"),
        ]
    )

    def __init__(
        self, engine: Engine | SyncEngine, options: Mapping[str, Any] | None = None
    ) -> None:
        self._engine = engine
        self._options = dict(options or {})

    def __deepcopy__(self, _: object) -> Self:
        # Optimizers copy programs, whose copies ask the same engine.
        return self

    def _merged(self, request: lm15.Request) -> dict[str, Any]:
        """The options of one request: its own take precedence over those of all requests."""
        return {**self._options, **options_of(request)}


class DSPyEngine(_Shared):
    """The `engine` of `dspy.LM`: one request, one answer, on a `SyncEngine`."""

    def complete(self, request: lm15.Request) -> lm15.Response:
        """The whole answer. Raises errors of `dspy.lm15`."""
        engine = self._blocking()
        with _translated():
            done = engine.generate(chat_of(request), **self._merged(request))
            return response(engine, done)

    def stream(self, request: lm15.Request) -> Iterator[lm15.StreamEvent]:
        """The events of an answer. Raises as `complete` does."""
        engine = self._blocking()
        events = Events(engine.model.name)
        with _translated(), engine.stream(chat_of(request), **self._merged(request)) as stream:
            for chunk in stream:
                yield from events.of(chunk)
            yield events.end(stream.usage)

    def close(self) -> None:
        """Does nothing: whoever opened the engine closes it."""

    def _blocking(self) -> SyncEngine:
        if isinstance(self._engine, SyncEngine):
            return self._engine
        raise TypeError("an Engine is awaited (acall); for calls take a SyncEngine")


class AsyncDSPyEngine(_Shared):
    """The `async_engine` of `dspy.LM`."""

    async def complete(self, request: lm15.Request) -> lm15.Response:
        """The whole answer. Raises errors of `dspy.lm15`."""
        engine = awaited(self._engine)
        with _translated():
            done = await engine.generate(chat_of(request), **self._merged(request))
            return response(engine, done)

    async def stream(self, request: lm15.Request) -> AsyncIterator[lm15.StreamEvent]:
        """The events of an answer. Raises as `complete` does."""
        engine = awaited(self._engine)
        events = Events(engine.model.name)
        with _translated():
            async with engine.stream(chat_of(request), **self._merged(request)) as stream:
                async for chunk in stream:
                    for event in events.of(chunk):
                        yield event
                yield events.end(stream.usage)

    async def aclose(self) -> None:
        """Does nothing: whoever opened the engine closes it."""


@contextmanager
def _translated() -> Iterator[None]:
    """The engine's errors as DSPy's. DSPy retries `Overloaded` alone."""
    try:
        yield
    except PromptTooLong as error:
        # DSPy's modules shorten it.
        raise lm15.ContextLengthError(str(error), provider="asyncinfer") from error
    except InvalidRequest as error:
        raise lm15.InvalidRequestError(str(error), provider="asyncinfer") from error
    except Overloaded as error:
        raise lm15.RateLimitError(
            str(error), provider="asyncinfer", retry_after=_RETRY_AFTER
        ) from error
    except AsyncInferError as error:
        raise lm15.ProviderError(str(error), provider="asyncinfer") from error
