"""The formats in which a KV cache stores keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, Protocol

import torch

from asyncinfer.attention.packed import PackedKV
from asyncinfer.attention.scaled import ScaledKV

__all__ = ["PLAIN", "KVFormat", "PlainKV", "kv_format", "vector_bytes"]


class KVFormat(Protocol):
    """How the vector of a token's head, `head_dim` numbers, is stored: in one or more tensors with
    the same pages. Its width is the number of elements that it takes in a tensor."""

    @property
    def exact(self) -> bool:
        """Whether one tensor holds the values unchanged."""

    def tensors(self, head_dim: int, dtype: torch.dtype) -> Sequence[tuple[int, torch.dtype]]:
        """Width and dtype of each tensor, for a model of `dtype`: the numbers first, then
        their scales, if any. The kernels take numbers of the whole width with float32 scales of
        width 1 as they are."""

    def encode(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """`values` `[..., head_dim]` as each tensor stores them, `[..., width]`. float8 is given as
        int8, since torch cannot index float8."""

    def gather(self, pages: Sequence[torch.Tensor], index: torch.Tensor, out: torch.Tensor) -> None:
        """Decode the pages at `index` int64 `[n]` into `out` `[n, vectors, head_dim]`. `pages` are
        `[all, vectors, width]` of each tensor, in the dtypes that `encode` gives."""


class PlainKV:
    """A `KVFormat` of one tensor in the model's own dtype."""

    exact = True

    def tensors(self, head_dim: int, dtype: torch.dtype) -> Sequence[tuple[int, torch.dtype]]:
        return ((head_dim, dtype),)

    def encode(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        return (values,)

    def gather(self, pages: Sequence[torch.Tensor], index: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(pages[0], 0, index, out=out)


PLAIN: Final[KVFormat] = PlainKV()


@cache
def kv_format(name: str) -> KVFormat:
    """The format called `name`; "plain" is the model's own dtype."""
    match name:
        case "plain":
            return PLAIN
        case "fp8":
            return ScaledKV(torch.float8_e4m3fn)
        case "int8":
            return ScaledKV(torch.int8)
        case "int4":
            return PackedKV()
    raise KeyError(name)


def vector_bytes(format: KVFormat, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that the key or the value of one head takes for one token."""
    return sum(width * kind.itemsize for width, kind in format.tensors(head_dim, dtype))
