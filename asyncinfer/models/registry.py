"""Architecture names to families."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from asyncinfer.models.family import Family
from asyncinfer.models.llama import LLAMA

__all__ = ["FAMILIES"]

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.architecture: family for family in (LLAMA,)}
)
