"""LoRA adapters: PEFT's files, what they are checked against, and where they lie."""

from asyncinfer.adapters.config import LoraConfig
from asyncinfer.adapters.files import open_adapter
from asyncinfer.adapters.modules import lora_layout
from asyncinfer.adapters.pool import AdapterPool
from asyncinfer.adapters.read import check_adapter

__all__ = [
    "AdapterPool",
    "LoraConfig",
    "check_adapter",
    "lora_layout",
    "open_adapter",
]
