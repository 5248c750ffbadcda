"""Llama (Touvron et al., 2023): the plain decoder."""

from __future__ import annotations

from asyncinfer.models.family import Family

__all__ = ["Llama"]


class Llama(Family):
    """Llama 1 to 3.x, and models with the same `config.json`."""

    model_type = "llama"
