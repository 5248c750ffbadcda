"""GGUF files: the weights, the configuration and the tokenizer of a model in one file."""

from asyncinfer.weights.gguf.checkpoint import GgufCheckpoint
from asyncinfer.weights.gguf.file_names import find_gguf, split_names
from asyncinfer.weights.gguf.header import is_gguf, read_header

__all__ = [
    "GgufCheckpoint",
    "find_gguf",
    "is_gguf",
    "read_header",
    "split_names",
]
