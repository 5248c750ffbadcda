"""`AttentionWorkspace`: where the parts of a split decode attention meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["AttentionWorkspace", "decode_splits"]

#: Four for each of an H100's or H200's multiprocessors.
_PROGRAMS = 4 * 132


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Memory of the split-KV decode kernel, made once and used by every layer and step of one
    stream, CUDA graphs included: nothing in it outlives a launch.

    Its shape is a capacity: any launch whose rows * splits * query tokens * heads fit may use it.
    """

    #: float32: each split's normalised output.
    outputs: torch.Tensor
    #: float32: each split's logarithm (base 2) of its softmax's denominator.
    lse: torch.Tensor
    #: int32, all zero between launches: how many splits of a row and KV head are done.
    arrivals: torch.Tensor

    @classmethod
    def allocate(
        cls,
        rows: int,
        heads: int,
        head_dim: int,
        splits: int,
        device: torch.device | str,
        *,
        max_query_len: int = 1,
    ) -> AttentionWorkspace:
        """Room for `rows` decode rows of at most `max_query_len` query tokens, `heads` query heads
        of `head_dim`, and `splits` splits."""
        parts = rows * splits * max_query_len * heads
        return cls(
            torch.empty(parts * head_dim, dtype=torch.float32, device=device),
            torch.empty(parts, dtype=torch.float32, device=device),
            torch.zeros(rows * heads, dtype=torch.int32, device=device),
        )

    def holds(self, rows: int, heads: int, head_dim: int, splits: int, max_query_len: int) -> bool:
        """Whether a launch of this size fits."""
        parts = rows * splits * max_query_len * heads
        fits = parts <= self.lse.numel() and parts * head_dim <= self.outputs.numel()
        return fits and rows * heads <= self.arrivals.numel()


def decode_splits(rows: int, kv_heads: int, longest: int, chunk: int = 256) -> int:
    """Into how many parts to split the keys of decode rows of up to `longest` tokens: enough
    programs for every multiprocessor of a large GPU, but none that can only have less than `chunk`
    keys. The same on every device, so that results are."""
    enough = -(-_PROGRAMS // max(1, rows * kv_heads))
    return max(1, min(enough, -(-longest // chunk)))
