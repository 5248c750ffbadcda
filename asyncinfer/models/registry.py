"""Architecture names to families."""

from __future__ import annotations

from typing import Final

from asyncinfer.models.family import FAMILY_PROTOCOL_VERSION, Family
from asyncinfer.plugins import Registry

__all__ = ["families"]

#: By the name that `config.json` gives under `architectures`.
families: Final[Registry[Family]] = Registry(
    "asyncinfer.models",
    Family,  # type: ignore[type-abstract]
    FAMILY_PROTOCOL_VERSION,
    {
        "LlamaForCausalLM": "asyncinfer.models.llama:Llama",
    },
)
