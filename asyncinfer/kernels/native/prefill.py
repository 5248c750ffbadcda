"""Causal attention of a prompt's tokens on a CPU, by code compiled for this machine's processor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from asyncinfer.kernels.native.blocked import matrix_units
from asyncinfer.kernels.native.calls import (
    empty,
    is_recording,
    native_functions,
    room_threads,
)
from asyncinfer.kernels.native.host import Host, compiled_once, host
from asyncinfer.kernels.native.instruction_speed import pairs_are_fast
from asyncinfer.kernels.native.matrix_registers_code import UNIT_NUMBERS
from asyncinfer.kernels.native.prefill_code import FIELDS, prefill_code, scratch_numbers
from asyncinfer.kernels.native.prefill_halves_code import halves_code, halves_scratch
from asyncinfer.kernels.native.prefill_rows_code import TILE
from asyncinfer.kernels.native.prefill_units_code import units_code, units_scratch
from asyncinfer.kernels.native.recorded_calls import ChunkKV
from asyncinfer.kernels.native.threads import parallel_region

__all__ = ["PrefillKernel", "PrefillMethod", "is_right", "prefill_kernel"]

#: How numbers are multiplied: float32 ones, or bfloat16 ones as `prefill_halves_code` says, or as
#: `prefill_units_code` does.
PrefillMethod = Literal["floats", "pairs", "widened", "units"]

#: Scores of all heads below which another thread costs more than it saves.
_SHARED = 1 << 12

#: Tiles of all heads for each thread, from which on it matters little that one has more of them.
_UNEVEN = 4


class PrefillKernel:
    """Attention of many tokens of one sequence, in float32 or bfloat16. Each token and head is
    computed by itself, so neither others nor the number of threads change a bit of the result."""

    __slots__ = ("_attend", "_group", "_scratch")

    def __init__(
        self,
        head_dim: int,
        group: int,
        scale: float,
        target: Host,
        region: int,
        method: PrefillMethod,
    ) -> None:
        """`group`: query heads for each KV head; `region`: the address of `GOMP_parallel`. Raises
        `RuntimeError` where the code cannot be made."""
        self._group = group
        about = head_dim, group, target.lanes, scale
        if method == "floats":
            self._scratch = scratch_numbers(head_dim)
            text = functools.partial(prefill_code, *about)
        elif method == "units":
            self._scratch = units_scratch(head_dim)
            text = functools.partial(units_code, *about)
        else:
            pairs = method == "pairs"
            self._scratch = halves_scratch(head_dim, pairs=pairs)
            text = functools.partial(halves_code, *about, pairs=pairs, rounds=target.rounds)
        what = f"prefill {about}, {method}"
        fields = {"attend": FIELDS}
        self._attend = native_functions(what, text, target, region, fields, "tokens")["attend"]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, out: torch.Tensor
    ) -> None:
        """Fill `out` with the causal attention of `q` to `k` and `v`, all of the kernel's dtype.

        `q` and `out` are `[tokens, heads, head_dim]`, and the heads of a token of `out` lie side by
        side. `k` and `v` are `[kv_heads, start + tokens, head_dim]`; the first token is at `start`.
        """
        tokens, size, kv_heads, keys, head_dim = len(q), q.itemsize, *k.shape
        if q.stride()[1:] != (head_dim, 1):
            q = q.contiguous()
        if k.stride(2) != 1:
            k = k.contiguous()
        values = v if v.stride()[1:] == (head_dim, 1) else v.contiguous()
        shared_above = _SHARED / (tokens * kv_heads)
        # A recorded call may be replayed for a longer chunk.
        several = keys > shared_above or is_recording()
        threads = torch.get_num_threads() if several else 1
        scratch = empty(room_threads(threads) * self._scratch)
        tile = self._tile(tokens, kv_heads, threads)
        tiles = -(-tokens // tile)
        self._attend(
            q.data_ptr(),
            k.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            scratch.data_ptr(),
            tokens,
            start,
            tile,
            tiles,
            tiles * kv_heads,
            *(size * each.stride(0) for each in (q, out, k)),
            size * k.stride(1),
            size * values.stride(0),
            threads,
            0,
            0,
            shared_above=shared_above,
            of_chunk=self._of_chunk(kv_heads, threads) if is_recording() else None,
        )

    def _tile(self, tokens: int, kv_heads: int, threads: int) -> int:
        """Tokens of a tile. A few more tiles than needed give each thread as many."""
        most = TILE // self._group
        tiles = -(-tokens // most)
        enough = range(tiles, tiles + threads)
        if tiles * kv_heads < _UNEVEN * threads:
            tiles = next((count for count in enough if not count * kv_heads % threads), tiles)
        return -(-tokens // tiles)

    def _of_chunk(self, kv_heads: int, threads: int) -> Mapping[int, Callable[[ChunkKV], int]]:
        """What a recorded call takes from the chunk that it is replayed for."""

        def tile(chunk: ChunkKV) -> int:
            return self._tile(chunk.tokens, kv_heads, threads)

        def tiles(chunk: ChunkKV) -> int:
            return -(-chunk.tokens // tile(chunk))

        fields: dict[str, Callable[[ChunkKV], int]] = {
            "start": lambda chunk: chunk.start,
            "tile": tile,
            "tiles": tiles,
            "items": lambda chunk: tiles(chunk) * kv_heads,
            "keys_stride": lambda chunk: chunk.head_bytes,
            "values_stride": lambda chunk: chunk.head_bytes,
        }
        return {FIELDS.index(name): field for name, field in fields.items()}


@functools.lru_cache(maxsize=256)
def prefill_kernel(
    head_dim: int, group: int, scale: float, dtype: torch.dtype | None = None
) -> PrefillKernel | None:
    """The kernel for heads of this width and `group` query heads for each KV head, in `dtype`
    (None: float32), compiled by its first caller. None without `llvmlite`, on other processors,
    where torch's threads cannot be used, if a head is no multiple of the processor's vectors, and
    if a trial is wrong. For bfloat16 heads must fill matrix units where the processor has them,
    and torch attends on an arm64 with instructions for it.
    """
    target, region = host(), parallel_region()
    if target is None or region is None or group > TILE or scale <= 0:
        return None
    method = _method(head_dim, target) if dtype is torch.bfloat16 else "floats"
    if method is None or head_dim % (2 * target.lanes if method == "pairs" else target.lanes):
        return None
    return trusted_kernel(head_dim, group, scale, target, region, method)


def _method(head_dim: int, target: Host) -> PrefillMethod | None:
    """What is fastest for bfloat16 on this processor; None: torch's attention, which takes
    instructions of arm64 that native code does not."""
    if not target.rounds:
        return None if "+bf16" in target.features.split(",") else "widened"
    if matrix_units():
        # For other heads torch takes one to two thirds of the time of vectors there.
        return None if head_dim % UNIT_NUMBERS else "units"
    return "pairs" if pairs_are_fast(target) else "widened"


@compiled_once
def trusted_kernel(
    head_dim: int,
    group: int,
    scale: float,
    target: Host,
    region: int,
    method: PrefillMethod = "floats",
) -> PrefillKernel | None:
    """The kernel, if a trial is right."""
    kernel = PrefillKernel(head_dim, group, scale, target, region, method)
    dtype = torch.float32 if method == "floats" else torch.bfloat16
    return kernel if is_right(kernel, head_dim, group, scale, dtype) else None


def is_right(
    kernel: PrefillKernel, head_dim: int, group: int, scale: float, dtype: torch.dtype | None = None
) -> bool:
    """Whether a few tokens agree with torch's results, in `dtype` (None: float32)."""
    generator = torch.Generator().manual_seed(7)
    dtype = dtype or torch.float32
    kv_heads, start, tokens = 2, 250, 40

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    q, keys = some(tokens, kv_heads * group, head_dim), start + tokens
    k, v = some(kv_heads, keys, head_dim), some(kv_heads, keys, head_dim)
    found = torch.empty_like(q)
    kernel(q, k, v, start, found)
    q, k, v = q.float(), k.float(), v.float()
    ours = q.view(tokens, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    future = torch.full((tokens, keys), float("-inf"), dtype=torch.float32).triu_(start + 1)
    right = (ours @ k[:, None].mT * scale + future).softmax(-1) @ v[:, None]
    right = right.permute(2, 0, 1, 3).reshape(q.shape)
    allowed = 1e-5 if dtype is torch.float32 else 1e-2
    return bool((found - right).abs().amax() <= allowed * right.abs().amax())
