"""What sets one architecture apart from the shared decoder."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["FAMILY_PROTOCOL_VERSION", "Family"]

FAMILY_PROTOCOL_VERSION = 1


class Family(Protocol):
    """One architecture, as differences from Llama. Derive from it and state what differs."""

    #: Llama's keys of `config.json` -> what this architecture calls them.
    keys: ClassVar[Mapping[str, str]] = MappingProxyType({})
    #: What a key that `config.json` leaves out stands for.
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    #: The part of `rope_parameters` to read where kinds of layers have their own.
    full_rope: ClassVar[str | None] = None
    #: Whether `partial_rotary_factor` means something.
    partial_rotary: ClassVar[bool] = False

    def complete(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """`config.json`'s content, with what it leaves out. A null stays one: it means that there
        is no such thing, where there is a default too."""
        return {**self.defaults, **values}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        """The decoder's shape. `llama` is `config` read as Llama's; give it back with what differs
        replaced. `ModelLoadError` (see `JsonReader`) for what the decoder cannot do."""
        return llama
