"""Frameworks that use an engine, or carry it to other machines. Each module needs its framework,
and nothing else."""

from typing import TYPE_CHECKING

from asyncinfer.lazy import hand_on

if TYPE_CHECKING:
    from asyncinfer.integrations.langchain import ChatAsyncInfer
    from asyncinfer.integrations.ray import RayEngine
else:
    __getattr__, __dir__ = hand_on(__name__, langchain=("ChatAsyncInfer",), ray=("RayEngine",))

__all__ = ["ChatAsyncInfer", "RayEngine"]
