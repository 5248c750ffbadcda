"""`LlamaIndexLLM`: a language model of LlamaIndex on an engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncinfer.engine import Engine, SyncEngine
from asyncinfer.errors import InvalidRequest
from asyncinfer.integrations.engines import awaited
from asyncinfer.integrations.llama_index_messages import Answer, arguments, chat_messages, whole

try:
    from llama_index.core.base.llms.generic_utils import (
        achat_to_completion_decorator,
        astream_chat_to_completion_decorator,
        chat_to_completion_decorator,
        stream_chat_to_completion_decorator,
    )
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseAsyncGen,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseAsyncGen,
        CompletionResponseGen,
        LLMMetadata,
        MessageRole,
        ToolCallBlock,
    )
    from llama_index.core.bridge.pydantic import ConfigDict, Field
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.function_calling import FunctionCallingLLM
    from llama_index.core.llms.llm import ToolSelection
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs LlamaIndex: pip install "asyncinfer[llama-index]"', name=error.name
    ) from error

if TYPE_CHECKING:
    from llama_index.core.tools import BaseTool

__all__ = ["LlamaIndexLLM"]


class LlamaIndexLLM(FunctionCallingLLM):
    """A language model that calls an engine without a socket. A cancelled call ends its request.

    A `SyncEngine` supports `chat`, `complete` and their streams as well as the awaited methods; an
    `Engine` supports `achat`, `acomplete`, `astream_chat` and `astream_complete`, and the others
    raise `TypeError`. Errors are the engine's own.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    #: An open engine, which whoever opened it closes after the last use of the model.
    engine: Engine | SyncEngine = Field(exclude=True, repr=False)
    #: Options of `Engine.stream` for every request, such as `temperature`, `max_tokens` and
    #: `cache_scope`; a call may give others.
    options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def class_name(cls) -> str:
        return "LlamaIndexLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """The facts that LlamaIndex asks of a model."""
        model = self.engine.model
        most = self.options.get("max_tokens")
        return LLMMetadata(
            context_window=model.max_context,
            num_output=min(model.max_context // 4, 256) if most is None else most,
            is_chat_model=True,
            is_function_calling_model=True,
            model_name=model.name,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return whole(self._blocking().generate(chat_messages(messages), **self._merged(kwargs)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        chat = chat_messages(messages)
        return whole(await awaited(self.engine).generate(chat, **self._merged(kwargs)))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        options = self._merged(kwargs, streamed=True)
        stream = self._blocking().stream(chat_messages(messages), **options)

        def responses() -> ChatResponseGen:
            answer = Answer()
            with stream:
                for chunk in stream:
                    yield answer.with_chunk(chunk)

        return responses()

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        options = self._merged(kwargs, streamed=True)
        stream = awaited(self.engine).stream(chat_messages(messages), **options)

        async def responses() -> ChatResponseAsyncGen:
            answer = Answer()
            async with stream:
                async for chunk in stream:
                    yield answer.with_chunk(chunk)

        return responses()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return chat_to_completion_decorator(self.chat)(prompt, **kwargs)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        return await achat_to_completion_decorator(self.achat)(prompt, **kwargs)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        return stream_chat_to_completion_decorator(self.stream_chat)(prompt, **kwargs)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        return await astream_chat_to_completion_decorator(self.astream_chat)(prompt, **kwargs)

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The calls of an answer. Without one, raises `ValueError` if `error_on_no_tool_call`.
        While the answer is streamed their arguments are what is there of them; those that its end
        cut short are empty, since a tool must not be called with a part."""
        calls = [each for each in response.message.blocks if isinstance(each, ToolCallBlock)]
        if not calls and error_on_no_tool_call:
            raise ValueError("the answer calls no tool")
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=arguments(call, response.raw),
            )
            for call in calls
        ]

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = [*(chat_history or [])]
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        asked: dict[str, Any] = {"messages": messages, **kwargs}
        if tools:
            asked["tools"] = [_tool_schema(tool) for tool in tools]
            asked["parallel_tool_calls"] = allow_parallel_tool_calls
            if tool_required:
                asked.setdefault("tool_choice", "required")
        return asked

    def _blocking(self) -> SyncEngine:
        if isinstance(self.engine, SyncEngine):
            return self.engine
        raise TypeError("an Engine is awaited (achat); for chat and complete take a SyncEngine")

    def _merged(self, named: dict[str, Any], streamed: bool = False) -> dict[str, Any]:
        """The options of one request: those of the call take precedence over those of the model."""
        options = {**self.options, **named}
        if streamed and options.get("n", 1) != 1:
            raise InvalidRequest("n", options["n"], "must be 1 in a stream of LlamaIndex")
        return options


def _tool_schema(tool: BaseTool) -> dict[str, Any]:
    """A tool in the engine's form. LlamaIndex does not say that a function takes only the arguments
    in its schema."""
    made: dict[str, Any] = tool.metadata.to_openai_tool(True)
    made["function"]["parameters"].setdefault("additionalProperties", False)
    return made
