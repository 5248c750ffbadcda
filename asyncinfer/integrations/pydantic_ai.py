"""`pydantic_ai_model`: pydantic-ai's model on an engine in this process."""

from __future__ import annotations

from typing import Any, cast

from asyncinfer.clients import openai_client
from asyncinfer.engine import Engine

try:
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.profiles.openai import OpenAIJsonSchemaTransformer, OpenAIModelProfile
    from pydantic_ai.providers import Provider
    from pydantic_ai.settings import ModelSettings
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'this needs pydantic-ai: pip install "asyncinfer[pydantic-ai]"', name=error.name
    ) from error

__all__ = ["AsyncInferProvider", "pydantic_ai_model"]


def pydantic_ai_model(engine: Engine, *, cache_scope: str = "", **settings: Any) -> OpenAIChatModel:
    """A model for `pydantic_ai.Agent` that calls an engine without a socket: streamed, with tools
    and every kind of output. A run that is cancelled ends its request.

    Args:
        cache_scope: the scope of its requests' cached prefixes.
        settings: `ModelSettings` of all requests, such as `temperature` and `max_tokens`.
    """
    provider = AsyncInferProvider(engine, cache_scope=cache_scope)
    told = cast(ModelSettings, settings)
    return OpenAIChatModel(engine.model.name, provider=provider, settings=told)


class AsyncInferProvider(Provider[AsyncOpenAI]):
    """What an `OpenAIChatModel` needs of an engine: an OpenAI client without a socket, and the
    engine's abilities, which pydantic-ai would otherwise guess from the model's name."""

    def __init__(self, engine: Engine, *, cache_scope: str = "") -> None:
        self._client = openai_client(engine, cache_scope=cache_scope)

    @property
    def name(self) -> str:
        return "asyncinfer"

    @property
    def base_url(self) -> str:
        return str(self._client.base_url)

    @property
    def client(self) -> AsyncOpenAI:
        return self._client

    @staticmethod
    def model_profile(model_name: str) -> OpenAIModelProfile:
        """The same for every model, since grammars make any model's answer fit its schema."""
        return OpenAIModelProfile(
            supports_json_schema_output=True,
            supports_json_object_output=True,
            json_schema_transformer=OpenAIJsonSchemaTransformer,
            openai_chat_thinking_field="reasoning",
            # Many chat templates accept only one system message.
            openai_chat_supports_multiple_system_messages=False,
        )
