"""`PlannedHead`: the memory of a drafting head beside a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from asyncinfer.files import checkpoint_file
from asyncinfer.models import ModelConfig
from asyncinfer.models.eagle3_config import is_eagle3, read_eagle3, with_head
from asyncinfer.models.eagle3_weights import eagle3_table, fitted
from asyncinfer.planner.formats import DTYPE_BYTES, FORMATS, Format
from asyncinfer.weights import open_checkpoint

__all__ = ["PlannedHead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHead:
    """The numbers in a head's tensors."""

    #: Numbers in its matrices, which have the format of the model's.
    linear: int
    #: Numbers in its embedding, the matrix of its logits and its norms.
    others: int

    @classmethod
    def read(cls, model: ModelConfig, config_file: Path) -> tuple[ModelConfig, Self] | None:
        """The head that a `config.json` describes, and the model's config with a place for its KV;
        None if it describes no head. The head's tensors, where they are there, tell whether it has
        an embedding of its own. Raises `ModelLoadError`."""
        folder = config_file.parent
        if config_file.name != "config.json" or not is_eagle3(folder):
            return None
        config, names = read_eagle3(folder, model), frozenset[str]()
        if checkpoint_file(folder, "model.safetensors") is not None:
            with open_checkpoint(folder) as checkpoint:
                names = frozenset(checkpoint.tensors)
        counts = {True: 0, False: 0}
        for name, packed in eagle3_table(fitted(config, names), names).items():
            matrix = len(packed.shape) > 1 and name not in ("embedding", "head.weight")
            counts[matrix] += sum(math.prod(piece.shape) for piece in packed.pieces)
        return with_head(model, config), cls(linear=counts[True], others=counts[False])

    def bytes(self, format: Format, dtype: str) -> int:
        """Bytes of its weights beside a model in `format`. The stored format of a model says
        nothing about the head's."""
        size = DTYPE_BYTES[dtype]
        of_linear = format.linear if format in FORMATS else None
        return round(self.linear * (of_linear or size) + self.others * size)
