"""From a step's plan to its tokens, on a real model."""

from asyncinfer.runner.input_batch import InputBatch, StepInput
from asyncinfer.runner.memory import count_blocks
from asyncinfer.runner.model_runner import ModelRunner
from asyncinfer.runner.opening import open_runner

__all__ = ["InputBatch", "ModelRunner", "StepInput", "count_blocks", "open_runner"]
