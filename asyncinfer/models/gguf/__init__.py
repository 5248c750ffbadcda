"""Reading a `ModelConfig` from the metadata of a GGUF file."""

from asyncinfer.models.gguf.config import gguf_architecture, gguf_config

__all__ = ["gguf_architecture", "gguf_config"]
