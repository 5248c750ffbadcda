"""Llama (Touvron et al., 2023) and everything that shares its `config.json`: the plain decoder."""

from __future__ import annotations

from asyncinfer.models.family import Family

__all__ = ["LLAMA"]

LLAMA = Family(architecture="LlamaForCausalLM")
