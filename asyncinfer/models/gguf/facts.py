"""`Facts`: a GGUF file's metadata about its model, by the keys of its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from asyncinfer.errors import ModelLoadError
from asyncinfer.models.parts import MOST_LAYERS
from asyncinfer.weights.gguf import GgufCheckpoint

__all__ = ["Facts", "plain_value"]

_MOST_VALUES: Final = 1 << 12


class Facts:
    """The values of a file's metadata, and the tensors of its layers."""

    def __init__(self, name: str, checkpoint: GgufCheckpoint) -> None:
        """`name` is the architecture's name in the file."""
        self._prefix = f"{name}."
        self._metadata: Mapping[str, Any] = checkpoint.metadata
        self._checkpoint = checkpoint
        #: Tensors of layers, without the layers' prefixes.
        self.parts = {
            name.split(".", 2)[2]
            for name in checkpoint.tensors
            if name.startswith("blk.") and name.count(".") > 1
        }

    def get(self, key: str) -> Any:
        """A value by `plain_value`; None if the file has none."""
        return plain_value(self._metadata.get(self._prefix + key))

    def refuse(self, key: str, why: str) -> ModelLoadError:
        """The error for a value; `why` says what it must be."""
        what = f"{self._prefix}{key}={self.get(key)!r}"
        return ModelLoadError(f"{what}: {why}", file=str(self._checkpoint.folder))

    def refuse_tensor(self, tensor: str, why: str) -> ModelLoadError:
        """The error for a tensor of the file."""
        file = self._checkpoint.tensors[tensor].file
        return ModelLoadError(why, file=file, tensor=tensor)

    def numbers(self, tensor: str) -> list[float]:
        """The numbers of a short float32 tensor of one dimension; empty if there is none of this
        name. Raises `ModelLoadError` for a tensor of another kind."""
        stored = self._checkpoint.tensors.get(tensor)
        if stored is None:
            return []
        if stored.dtype != "F32" or len(stored.shape) != 1 or stored.shape[0] > _MOST_VALUES:
            what = f"{stored.dtype} {list(stored.shape)}"
            raise self.refuse_tensor(tensor, f"{what}: must be a short list of F32")
        numbers = np.empty(stored.shape, np.float32)
        self._checkpoint.reader.read(stored.file, tensor, 0, numbers.data.cast("B"))
        return [float(number) for number in numbers]

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this name."""
        return tensor in self._checkpoint.tensors

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens that have an embedding; None without embeddings."""
        stored = self._checkpoint.tensors.get("token_embd.weight")
        return None if stored is None else stored.shape[0]

    @property
    def further(self) -> int:
        """Layers that only predict further tokens, which a file counts among its layers."""
        count = self.get("nextn_predict_layers")
        return count if type(count) is int and 0 <= count <= MOST_LAYERS else 0

    @property
    def layers(self) -> Any:
        """The number of layers without those; the file's own value if that is no number."""
        count = self.get("block_count")
        return count - self.further if type(count) is int else count

    def by_layer(self, key: str) -> list[Any]:
        """A value for each layer; empty if the file has none, or no valid number of layers."""
        value, count = self.get(key), self.layers
        if value is None or type(count) is not int or not 0 < count <= MOST_LAYERS:
            return []
        return value[:count] if isinstance(value, list) else [value] * count


def plain_value(value: Any) -> Any:
    """A list of equal numbers as one number, since files may repeat a value for each layer."""
    if isinstance(value, np.ndarray):
        found = {number.item() for number in value[:_MOST_VALUES]}
        return found.pop() if len(found) == 1 else value[:_MOST_VALUES].tolist()
    return value
