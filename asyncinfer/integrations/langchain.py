"""`ChatAsyncInfer`: a chat model of LangChain on an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

from asyncinfer.chunk import Completion
from asyncinfer.engine import Engine, SyncEngine
from asyncinfer.errors import InvalidRequest, PromptTooLong
from asyncinfer.integrations.engines import awaited
from asyncinfer.integrations.langchain_messages import AnswerChunks, answer, chat_messages
from asyncinfer.server.prompts import response_format

try:
    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.language_models.base import LangSmithParams
    from langchain_core.messages import AIMessage, BaseMessage
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
    from langchain_core.tools import BaseTool
    from langchain_core.utils.function_calling import (
        convert_to_json_schema,
        convert_to_openai_tool,
    )
    from langchain_core.utils.pydantic import is_basemodel_subclass
    from pydantic import ConfigDict, Field
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs LangChain: pip install "asyncinfer[langchain]"', name=error.name
    ) from error

__all__ = ["ChatAsyncInfer"]


class ContextOverflow(PromptTooLong, ContextOverflowError):
    """`PromptTooLong`, by which LangChain's agents know that a conversation has to be shortened."""


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except PromptTooLong as error:
        raise ContextOverflow(error.field, error.value, error.bound) from error


class ChatAsyncInfer(BaseChatModel):
    """A chat model that calls an engine without a socket. A cancelled call ends its request.

    A `SyncEngine` answers `invoke`, `stream` and `batch` as well as `ainvoke`, `astream` and
    `abatch`; an `Engine` answers those that are awaited, and the others raise `TypeError`. Errors
    are the engine's own; `PromptTooLong` is LangChain's `ContextOverflowError`, too.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    #: Open for as long as the model is used; whoever opened it closes it.
    engine: Engine | SyncEngine = Field(exclude=True, repr=False)
    temperature: float | None = None
    max_tokens: int | None = None
    stop: list[str] | None = None
    #: Seconds after which a request fails with `DeadlineExceeded`.
    timeout: float | None = None
    #: LangChain's own parameter, without effect: nothing is lost on the way to an engine in this
    #: process. For `Overloaded` there is `with_retry`.
    max_retries: int | None = None
    #: Whether `invoke` tells callbacks of each token.
    streaming: bool = False
    #: Further options of `Engine.stream`, such as `top_p`, `cache_scope` and `template_options`.
    options: dict[str, Any] = Field(default_factory=dict)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools. `tool_choice`: "auto", "none", "required" (or "any", or True), or
        the name of the tool to call. Arguments fit their schemas, with `strict` and without."""
        if tool_choice in ("any", True):
            tool_choice = "required"
        if tool_choice:
            kwargs["tool_choice"] = tool_choice
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "json_schema",
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """A runnable whose answers are instances of a pydantic model, or dicts for other schemas.

        Args:
            method: "json_schema", where each token is drawn so that the answer fits the schema;
                "json_mode", where it is some JSON object; "function_calling", where it is the
                arguments of a tool that has to be called.
            include_raw: return `{"raw": message, "parsed": ..., "parsing_error": ...}` instead.
        """
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        if method not in ("json_schema", "json_mode"):
            bound = "must be 'json_schema', 'json_mode' or 'function_calling'"
            raise InvalidRequest("method", method, bound)
        kwargs.pop("strict", None)
        wanted = convert_to_json_schema(schema)
        form = {"json_object": True} if method == "json_mode" else {"json_schema": wanted}
        told = {"kwargs": {"method": method}, "schema": wanted}
        model = self.bind(ls_structured_output_format=told, **form, **kwargs)
        parser: Any = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        answers: Runnable[LanguageModelInput, Any] = model | parser
        if not include_raw:
            return answers
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks(
            [unparsed], exception_key="parsing_error"
        )

    def get_token_ids(self, text: str) -> list[int]:
        """The engine's tokens. LangChain would take those of GPT-2, and ask the hub for them."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return self.engine.tokenizer.encode(text, add_special_tokens=False)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """The tokens of a prompt of these messages, for `trim_messages(token_counter=model)`. That
        also counts parts of a conversation. Where the chat template takes none such, and where
        they are far beyond the context, they count as their texts alone."""
        chat = chat_messages(messages)
        offered = None if tools is None else [convert_to_openai_tool(tool) for tool in tools]
        told = self.options.get("template_options")
        tokenizer = self.engine.tokenizer
        try:
            return tokenizer.count(chat, tools=offered, template_options=told) if chat else 0
        except InvalidRequest as error:
            if error.field != "messages" and not isinstance(error, PromptTooLong):
                raise
            return sum(self.get_num_tokens(message.text) for message in messages)

    @property
    def _llm_type(self) -> str:
        return "asyncinfer"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.engine.model.name, **self._fields()}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params.setdefault("ls_model_name", self.engine.model.name)
        return params

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine, options = self._blocking(), self._merged(stop, kwargs)
        with _translated():
            return self._result(engine.generate(chat_messages(messages), **options))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine, options = awaited(self.engine), self._merged(stop, kwargs)
        with _translated():
            return self._result(await engine.generate(chat_messages(messages), **options))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        options = self._merged(stop, kwargs, streamed=True)
        chunks = AnswerChunks(self.engine)
        stream = self._blocking().stream(chat_messages(messages), **options)
        with _translated(), stream:
            for chunk in stream:
                yield chunks.of(chunk)
            yield chunks.end(stream.usage)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        options = self._merged(stop, kwargs, streamed=True)
        chunks = AnswerChunks(self.engine)
        with _translated():
            async with awaited(self.engine).stream(chat_messages(messages), **options) as stream:
                async for chunk in stream:
                    yield chunks.of(chunk)
                yield chunks.end(stream.usage)

    def _blocking(self) -> SyncEngine:
        if isinstance(self.engine, SyncEngine):
            return self.engine
        raise TypeError(
            "an Engine is awaited (ainvoke, astream); for invoke and stream take a SyncEngine"
        )

    def _fields(self) -> dict[str, Any]:
        """The options of a request that are fields of the model."""
        named = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stop": self.stop,
            "deadline": self.timeout,
        }
        return {
            **{name: value for name, value in named.items() if value is not None},
            **self.options,
        }

    def _merged(
        self, stop: list[str] | None, named: dict[str, Any], streamed: bool = False
    ) -> dict[str, Any]:
        """The options of one request: those of the call before those of the model."""
        # LangChain's own word for `streaming`.
        given = {name: value for name, value in named.items() if name != "stream"}
        options = {**self._fields(), **given}
        if stop is not None:
            options["stop"] = stop
        # What LangChain's agents ask models for by their `ProviderStrategy`, as OpenAI has it.
        if (form := options.pop("response_format", None)) is not None:
            options |= response_format(form)
        if streamed and options.get("n", 1) != 1:
            raise InvalidRequest("n", options["n"], "must be 1 in a stream of LangChain")
        return options

    def _result(self, done: Completion) -> ChatResult:
        usages = (done.usage if choice.index == 0 else None for choice in done.choices)
        messages = map(partial(answer, self.engine), done.choices, usages)
        return ChatResult(generations=[ChatGeneration(message=each) for each in messages])
