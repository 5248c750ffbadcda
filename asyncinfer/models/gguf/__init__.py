"""What a GGUF file says of its model, as a `ModelConfig`."""

from asyncinfer.models.gguf.config import gguf_architecture, gguf_config

__all__ = ["gguf_architecture", "gguf_config"]
