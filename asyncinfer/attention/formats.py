"""How a KV cache holds keys and values, and the one place where it takes its format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from asyncinfer.attention.plain import PlainKV
from asyncinfer.attention.scaled import ScaledKV

__all__ = ["PLAIN", "KVFormat", "kv_format", "vector_bytes"]


class KVFormat(Protocol):
    """A head of a token is a vector of `head_dim` numbers. A cache keeps it in one tensor or more,
    in each as some elements, its width there; all of them have pages alike."""

    @property
    def exact(self) -> bool:
        """Whether what is read is what was written."""

    def tensors(self, head_dim: int, dtype: torch.dtype) -> Sequence[tuple[int, torch.dtype]]:
        """Width and dtype of each tensor, in the cache of a model of `dtype`: the numbers, as the
        kernels take them, and float32 scales of width 1 where they take those too."""

    def encode(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """`values` `[..., head_dim]` as each tensor holds them, `[..., width]`. What torch cannot
        index, such as float8, is given as int8."""

    def gather(self, pages: Sequence[torch.Tensor], index: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` `[n, vectors, head_dim]` with what the pages at `index` int64 `[n]` hold;
        `pages` are `[all, vectors, width]` of each tensor, of the dtypes `encode` gives."""


PLAIN: Final[KVFormat] = PlainKV()

_FORMATS: dict[str, KVFormat] = {
    "plain": PLAIN,
    "fp8": ScaledKV(torch.float8_e4m3fn),
    "int8": ScaledKV(torch.int8),
}


def kv_format(name: str) -> KVFormat:
    """The format that `name` stands for ("plain": the model's own dtype)."""
    return _FORMATS[name]


def vector_bytes(its: KVFormat, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that a head of a token takes, its keys or its values."""
    return sum(width * kind.itemsize for width, kind in its.tensors(head_dim, dtype))
