"""From a step to its tokens, on a real model."""

from asyncinfer.runner.input_batch import InputBatch
from asyncinfer.runner.memory import plan_memory
from asyncinfer.runner.model_runner import ModelRunner
from asyncinfer.runner.opening import open_runner, runner_of

__all__ = ["InputBatch", "ModelRunner", "open_runner", "plan_memory", "runner_of"]
