"""Frameworks that use an engine in process or run replicas of it. Each module needs its framework
alone."""

from typing import TYPE_CHECKING

from asyncinfer.lazy import hand_on

if TYPE_CHECKING:
    from asyncinfer.integrations.dspy import dspy_lm
    from asyncinfer.integrations.langchain import ChatAsyncInfer
    from asyncinfer.integrations.litellm import LiteLLMProvider
    from asyncinfer.integrations.llama_index import LlamaIndexLLM
    from asyncinfer.integrations.pydantic_ai import pydantic_ai_model
    from asyncinfer.integrations.ray import RayEngine
else:
    __getattr__, __dir__ = hand_on(
        __name__,
        dspy=("dspy_lm",),
        langchain=("ChatAsyncInfer",),
        litellm=("LiteLLMProvider",),
        llama_index=("LlamaIndexLLM",),
        pydantic_ai=("pydantic_ai_model",),
        ray=("RayEngine",),
    )

__all__ = [
    "ChatAsyncInfer",
    "LiteLLMProvider",
    "LlamaIndexLLM",
    "RayEngine",
    "dspy_lm",
    "pydantic_ai_model",
]
