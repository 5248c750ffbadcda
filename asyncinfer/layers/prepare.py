"""Preparing queries and keys for attention: a norm, the rotation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from asyncinfer.kernels import ops
from asyncinfer.layers.attention import Prepare
from asyncinfer.layers.norm import Norm
from asyncinfer.layers.rope import Angles

__all__ = ["HeadNorm", "ProjectionNorm", "Rotate", "RotatePart", "normed_first", "unrotated"]


class Rotate:
    """Rotary position embedding by the angles at `index`."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def __call__(self, qk: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        return ops.rope(qk, *angles[self.index])


class RotatePart:
    """`Rotate` for the first `size` dimensions of each head only."""

    __slots__ = ("index", "size")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.size = size

    def __call__(self, qk: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        rotated = ops.rope(qk[..., : self.size], *angles[self.index])
        return torch.cat((rotated, qk[..., self.size :]), dim=-1)


def unrotated(qk: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
    """Queries and keys unchanged: positions do not matter, or the embedding adds them."""
    return qk


class HeadNorm:
    """RMS norm of each query head, with the weight `q` `[head_dim]`, and of each key head, with the
    weight `k`, in float32."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        heads: int,
        kv_heads: int,
        eps: float,
        plus_one: bool,
    ) -> None:
        weight = torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1))).float()
        self._weight = weight + 1 if plus_one else weight
        self._eps = eps

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(qk.float(), qk.shape[-1:], None, self._eps)
        return normed.mul_(self._weight).to(qk.dtype)


class ProjectionNorm:
    """A norm over all query heads together, and one over all key heads (OLMo-2)."""

    def __init__(self, q: Norm, k: Norm, heads: int) -> None:
        self._q = q
        self._k = k
        self._heads = heads

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        q, k = qk[:, : self._heads].flatten(1), qk[:, self._heads :].flatten(1)
        return torch.cat((self._q(q), self._k(k)), dim=1).view(qk.shape)


def normed_first(norm: Norm, prepare: Prepare) -> Prepare:
    """`norm`, then `prepare`."""

    def both(qk: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        return prepare(norm(qk), angles)

    return both
