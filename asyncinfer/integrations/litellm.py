"""`LiteLLMProvider`: a provider of LiteLLM whose models are engines in this process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from uuid import uuid4

from asyncinfer.chunk import Chunk, Completion, Usage
from asyncinfer.engine import Embeddings, Engine, SyncEngine
from asyncinfer.errors import (
    AsyncInferError,
    DeadlineExceeded,
    EngineClosed,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
)
from asyncinfer.integrations.engines import AnyEngine, awaited
from asyncinfer.server.chat_forms import chat_options, delta_of, message_of
from asyncinfer.server.errors import HttpError
from asyncinfer.server.fields import CHAT, check_fields
from asyncinfer.server.models import Model, Models
from asyncinfer.server.prompts import chat_messages
from asyncinfer.server.usage import LastCall, finish_reason, usage_of

try:
    import litellm
    from litellm import CustomLLM
    from litellm.types.utils import EmbeddingResponse, ModelResponse, ModelResponseStream
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs LiteLLM: pip install "asyncinfer[litellm]"', name=error.name
    ) from error

__all__ = ["LiteLLMProvider"]

#: What LiteLLM adds to requests, and an engine in this process ignores.
_THEIRS: Final = ("stream", "stream_options", "max_retries", "extra_headers", "user")


class LiteLLMProvider(CustomLLM):
    """An entry of `litellm.custom_provider_map`, by which programs that call LiteLLM reach an
    engine without a socket. A cancelled call ends its request.

    A `SyncEngine` supports `completion` and `embedding` as well as `acompletion` and `aembedding`;
    an `Engine` supports the awaited ones, and refuses the others. Errors are LiteLLM's.

    Args:
        engine: one engine, named after its model, or several by name. Loaded LoRA adapters are
            models by their own names.
        options: those of `Engine.stream` for every request, such as `cache_scope`.
    """

    def __init__(self, engine: AnyEngine | Mapping[str, AnyEngine], **options: Any) -> None:
        super().__init__()
        self._options = options
        named = engine if isinstance(engine, Mapping) else {"": engine}
        #: As given, for calls that block.
        self._given = {awaited(each): each for each in named.values()}
        several = {name: awaited(each) for name, each in named.items()}
        self._models = Models(several if isinstance(engine, Mapping) else several[""])

    async def acompletion(
        self, *, model: str, messages: list[Any], optional_params: dict[str, Any], **named: Any
    ) -> ModelResponse:
        with _translated(model):
            asked = self._request(model, messages, optional_params, named)
            return _response(model, await asked.engine.generate(asked.chat, **asked.options))

    def completion(
        self, *, model: str, messages: list[Any], optional_params: dict[str, Any], **named: Any
    ) -> ModelResponse:
        with _translated(model):
            asked = self._request(model, messages, optional_params, named)
            engine = self._blocking(asked)
            return _response(model, engine.generate(asked.chat, **asked.options))

    async def astreaming(
        self, *, model: str, messages: list[Any], optional_params: dict[str, Any], **named: Any
    ) -> AsyncIterator[Any]:
        with _translated(model):
            asked = self._request(model, messages, optional_params, named)
            events = _Chunks(model)
            async with asked.engine.stream(asked.chat, **asked.options) as stream:
                async for chunk in stream:
                    for event in events.of(chunk):
                        yield event
                yield events.end(stream.usage)

    def streaming(
        self, *, model: str, messages: list[Any], optional_params: dict[str, Any], **named: Any
    ) -> Iterator[Any]:
        with _translated(model):
            asked = self._request(model, messages, optional_params, named)
            events = _Chunks(model)
            with self._blocking(asked).stream(asked.chat, **asked.options) as stream:
                for chunk in stream:
                    yield from events.of(chunk)
                yield events.end(stream.usage)

    async def aembedding(
        self, *, model: str, input: list[Any], optional_params: dict[str, Any], **named: Any
    ) -> EmbeddingResponse:
        with _translated(model):
            found, options = self._embedded(model, optional_params)
            return _vectors(model, await found.engine.embed(input, **options))

    def embedding(
        self, *, model: str, input: list[Any], optional_params: dict[str, Any], **named: Any
    ) -> EmbeddingResponse:
        with _translated(model):
            found, options = self._embedded(model, optional_params)
            return _vectors(model, self._blocking(found).embed(input, **options))

    def _request(
        self, name: str, messages: list[Any], params: dict[str, Any], named: dict[str, Any]
    ) -> _Asked:
        """A request in the engine's terms. Raises `InvalidRequest`, and `HttpError` for an unknown
        model."""
        model = self._models.find(name)
        given = {key: value for key, value in params.items() if value is not None}
        body = {key: value for key, value in given.items() if key not in _THEIRS}
        # LiteLLM puts options that it does not know into `extra_body`.
        body |= body.pop("extra_body", {})
        check_fields({"messages": messages, **body}, CHAT)
        options = chat_options(body)
        if params.get("stream") and options.get("n", 1) != 1:
            raise InvalidRequest("n", options["n"], "must be 1 in a stream")
        # LiteLLM always gives one, of a stream for each read. It may go on for longer as a whole.
        timeout = None if params.get("stream") else named.get("timeout")
        if isinstance(timeout, int | float):
            options.setdefault("deadline", timeout)
        merged = {**self._options, **options}
        if model.adapter is not None:
            merged["adapter"] = model.adapter
        return _Asked(model, chat_messages(messages), merged)

    def _embedded(self, name: str, params: dict[str, Any]) -> tuple[Model, dict[str, Any]]:
        model = self._models.find(name)
        given = {**params, **params.get("extra_body", {})}
        names = ("dimensions", "pooling", "normalize", "prompt_name")
        options = {key: given[key] for key in names if given.get(key) is not None}
        return model, {**options, "adapter": model.adapter}

    def _blocking(self, model: _Asked | Model) -> SyncEngine:
        for engine, given in self._given.items():
            if engine is model.engine and isinstance(given, SyncEngine):
                return given
        raise TypeError("an Engine is awaited (acompletion); for completion take a SyncEngine")


class _Asked:
    """A request in the engine's terms."""

    def __init__(self, model: Model, chat: list[dict[str, Any]], options: dict[str, Any]) -> None:
        assert isinstance(model.engine, Engine)
        self.engine: Engine = model.engine
        self.chat = chat
        self.options = options


class _Chunks:
    """Makes the chunks of a streamed answer in LiteLLM's form."""

    def __init__(self, model: str) -> None:
        self._head = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": model}
        self._last = LastCall()
        self._reason: str | None = None

    def of(self, chunk: Chunk) -> Iterator[ModelResponseStream]:
        self._last.add(chunk.tool_calls)
        self._reason = chunk.finish_reason or self._reason
        if delta := delta_of(chunk):
            delta.pop("reasoning", None)
            choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": None}
            yield ModelResponseStream(**self._head, choices=[choice])

    def end(self, usage: Usage | None) -> dict[str, Any]:
        """In LiteLLM's own form: it drops the usage of a chunk in OpenAI's."""
        reason = finish_reason(self._reason, self._last.whole) or "stop"
        told = usage_of(usage)
        return {"text": "", "is_finished": True, "finish_reason": reason, "usage": told, "index": 0}


def _response(model: str, done: Completion) -> ModelResponse:
    choices = []
    for each in done.choices:
        message = message_of(each)
        message.pop("reasoning", None)
        message.pop("refusal", None)
        reason = finish_reason(each.finish_reason, LastCall(each.tool_calls).whole)
        choices.append({"index": each.index, "message": message, "finish_reason": reason})
    usage = litellm.Usage(**usage_of(done.usage))
    return ModelResponse(
        id=f"chatcmpl-{uuid4().hex}",
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=usage,
    )


def _vectors(model: str, done: Embeddings) -> EmbeddingResponse:
    data = [
        {"object": "embedding", "index": index, "embedding": vector.tolist()}
        for index, vector in enumerate(done.vectors)
    ]
    tokens = done.prompt_tokens
    usage = litellm.Usage(prompt_tokens=tokens, completion_tokens=0, total_tokens=tokens)
    return EmbeddingResponse(model=model, data=data, usage=usage)


@contextmanager
def _translated(model: str) -> Iterator[None]:
    """The engine's errors as LiteLLM's."""
    told: dict[str, Any] = {"model": model, "llm_provider": "asyncinfer"}
    try:
        yield
    except PromptTooLong as error:
        raise litellm.ContextWindowExceededError(message=str(error), **told) from error
    except InvalidRequest as error:
        raise litellm.BadRequestError(message=str(error), **told) from error
    except HttpError as error:
        raise litellm.NotFoundError(message=str(error), **told) from error
    except Overloaded as error:
        raise litellm.RateLimitError(message=str(error), **told) from error
    except DeadlineExceeded as error:
        raise litellm.Timeout(message=str(error), **told) from error
    except EngineClosed as error:
        raise litellm.ServiceUnavailableError(message=str(error), **told) from error
    except AsyncInferError as error:
        raise litellm.InternalServerError(message=str(error), **told) from error
