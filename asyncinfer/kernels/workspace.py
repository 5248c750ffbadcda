"""`AttentionWorkspace`: memory in which the parts of a split decode attention are joined."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncinfer.kernels.choices import Key, chosen

__all__ = [
    "LEAST_PART",
    "SPLITS",
    "SPLIT_KEY",
    "AttentionWorkspace",
    "Split",
    "decode_parts",
    "invariant_chunk",
    "invariant_parts",
]

#: Programs of a decode launch: two for each multiprocessor of an H100 or H200, so that all run at
#: once. With twice as many, 16 rows took an eighth longer on an H200.
_PROGRAMS = 2 * 132
#: A decode row with at most this many keys is not worth splitting.
LEAST_PART = 128


@dataclass(frozen=True, slots=True)
class Split:
    """The most programs into which the keys of decode rows are split."""

    programs: int = _PROGRAMS


#: The candidates of a measurement, the derived one first. Memory is planned for its programs, and
#: no other candidate has more.
SPLITS = (Split(), Split(3 * _PROGRAMS // 4), Split(_PROGRAMS // 2))
#: The key of `Split`.
SPLIT_KEY: Key = ("splits",)


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Memory of the split-KV decode kernel. Nothing in it outlives a launch, so every layer and
    step of one CUDA stream shares it, recorded graphs included.

    A launch fits if its `parts * max_query_len * heads` results do, and its `rows * heads`
    counters.
    """

    #: float32: each part's normalised output.
    outputs: torch.Tensor
    #: float32: each part's logarithm (base 2) of its softmax's denominator.
    lse: torch.Tensor
    #: int32, all zero between launches: how many parts of a row and KV head are done.
    arrivals: torch.Tensor

    @classmethod
    def allocate(
        cls,
        rows: int,
        heads: int,
        head_dim: int,
        parts: int,
        device: torch.device | str,
        *,
        max_query_len: int = 1,
        arrivals: torch.Tensor | None = None,
    ) -> AttentionWorkspace:
        """Memory for `rows` decode rows of at most `max_query_len` query tokens, `heads` query
        heads of `head_dim`, and `parts` parts of all rows. `arrivals`, if given, are zeros that the
        caller keeps, one for each row and head, which saves a launch."""
        results = parts * max_query_len * heads
        return cls(
            torch.empty(results * head_dim, dtype=torch.float32, device=device),
            torch.empty(results, dtype=torch.float32, device=device),
            torch.zeros(rows * heads, dtype=torch.int32, device=device)
            if arrivals is None
            else arrivals,
        )

    @staticmethod
    def most_bytes(rows: int, heads: int, kv_heads: int, head_dim: int) -> int:
        """The most bytes of a workspace for up to `rows` rows of one query token of any lengths,
        in as many parts as `decode_parts` gives."""
        parts = rows + -(-_PROGRAMS // kv_heads)
        return 4 * heads * (parts * (head_dim + 1) + rows)

    def holds(self, rows: int, heads: int, head_dim: int, parts: int, max_query_len: int) -> bool:
        """Whether a launch of this size fits."""
        results = parts * max_query_len * heads
        fits = results <= self.lse.numel() and results * head_dim <= self.outputs.numel()
        return fits and rows * heads <= self.arrivals.numel()


def decode_parts(rows: int, kv_heads: int, longest: int, chunk: int = LEAST_PART) -> int:
    """The number of parts into which the keys of all decode rows of up to `longest` tokens are
    split.

    There are enough programs for every multiprocessor of a large GPU, but none with less than
    `chunk` keys of a row. The number does not depend on the device, so that results do not either,
    unless this thread's choices name another one.
    """
    programs = chosen(SPLIT_KEY, SPLITS[0]).programs
    return rows + max(1, min(-(-programs // kv_heads), rows * -(-longest // chunk)))


def invariant_parts(rows: int, longest: int, chunk: int) -> int:
    """As `decode_parts`, for parts of up to `chunk` keys in every batch, whatever the batch."""
    return rows * (1 + max(1, -(-longest // chunk)))


def invariant_chunk(longest: int) -> int:
    """Keys of a part for rows of up to `longest` tokens, where parts must not depend on the batch.
    A row has at most 64 parts: so many occupy a large GPU, and their results take little memory."""
    return max(256, -(-longest // (64 * 64)) * 64)
