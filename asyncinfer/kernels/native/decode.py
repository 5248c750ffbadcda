"""Decode attention on a CPU over pages, by code compiled for this machine's processor."""

from __future__ import annotations

import functools

import torch

from asyncinfer.kernels.native.between import narrowed, widened
from asyncinfer.kernels.native.calls import empty, native_functions, room_threads
from asyncinfer.kernels.native.decode_code import FIELDS, SPARE, decode_code, heads_at_once
from asyncinfer.kernels.native.host import Host, compiled_once, host
from asyncinfer.kernels.native.threads import parallel_region

__all__ = ["DecodeKernel", "decode_kernel", "is_right"]

#: Numbers of keys and values below which another thread costs more than it saves.
_SHARED = 1 << 15
#: Keys of a row that are read at once: their scores stay in a core's nearest cache, and a thread's
#: scratch memory is bounded.
_SPAN = 1024
_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


class DecodeKernel:
    """Attention of one query token a row, over pages of one dtype and width. Each row is computed
    by itself, so neither other rows nor the number of threads change a bit of it."""

    __slots__ = ("_attend", "_heads")

    def __init__(
        self,
        dtype: torch.dtype,
        head_dim: int,
        group: int,
        scale: float,
        target: Host,
        region: int,
    ) -> None:
        """`group`: query heads for each KV head; `region`: the address of `GOMP_parallel`. Raises
        `RuntimeError` where the code cannot be made."""
        self._heads = heads_at_once(group, head_dim, target.lanes)
        name = str(dtype).removeprefix("torch.")
        about = name, head_dim, self._heads, target.lanes, scale
        what, text = f"decode {about}", functools.partial(decode_code, *about)
        fields = {"attend": FIELDS}
        self._attend = native_functions(what, text, target, region, fields, "rows")["attend"]

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """`[rows, heads * head_dim]`, of the dtype of `q` `[rows, heads, head_dim]`. `k` and `v`
        are pages `[blocks, kv_heads, block_size, head_dim]`, `tables` int32 `[rows, most]` those of
        each row, and `lengths` int32 `[rows]` its tokens, at least one and at most `longest`."""
        rows, heads, head_dim = q.shape
        _, kv_heads, block, _ = k.shape
        queries = widened(q)
        if queries.stride()[1:] != (head_dim, 1):
            queries = queries.contiguous()
        out = empty(rows, heads, head_dim)
        shared_above = _SHARED / (rows * kv_heads * head_dim)
        threads = torch.get_num_threads() if longest > shared_above else 1
        span = max(1, _SPAN // block) * block
        stride = min(span, longest) + SPARE
        scratch = empty(room_threads(threads) * self._heads * stride)
        self._attend(
            queries.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            tables.data_ptr(),
            lengths.data_ptr(),
            scratch.data_ptr(),
            rows,
            kv_heads,
            heads // kv_heads // self._heads,
            block,
            queries.stride(0),
            tables.stride(0),
            stride,
            span,
            threads,
            0,
            0,
            shared_above=shared_above,
        )
        return narrowed(out, q.dtype).view(rows, -1)


@functools.lru_cache(maxsize=256)
def decode_kernel(
    dtype: torch.dtype, head_dim: int, group: int, scale: float
) -> DecodeKernel | None:
    """The kernel for pages of this dtype, compiled by its first caller, and `group` query heads for
    each KV head. None without `llvmlite`, on other processors, where torch's threads cannot be
    used, and if a head is no multiple of the processor's vectors."""
    target, region = host(), parallel_region()
    if target is None or region is None or str(dtype) not in _DTYPES or head_dim % target.lanes:
        return None
    return trusted_kernel(dtype, head_dim, group, scale, target, region)


@compiled_once
def trusted_kernel(
    dtype: torch.dtype, head_dim: int, group: int, scale: float, target: Host, region: int
) -> DecodeKernel | None:
    """The kernel, if a trial is right."""
    kernel = DecodeKernel(dtype, head_dim, group, scale, target, region)
    return kernel if is_right(kernel, dtype, head_dim, group, scale) else None


def is_right(
    kernel: DecodeKernel, dtype: torch.dtype, head_dim: int, group: int, scale: float
) -> bool:
    """Whether a few rows agree with torch's results."""
    generator = torch.Generator().manual_seed(5)
    kv_heads, size, lengths = 2, 4, [1, 7, 18]

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)

    k, v = some(9, kv_heads, size, head_dim), some(9, kv_heads, size, head_dim)
    q = some(len(lengths), kv_heads * group, head_dim)
    tables = torch.tensor([[3, 0, 0, 0, 0], [8, 1, 0, 0, 0], [0, 2, 7, 4, 5]], dtype=torch.int32)
    found = kernel(q, k, v, tables, torch.tensor(lengths, dtype=torch.int32), max(lengths))
    for row, length in enumerate(lengths):
        pages = tables[row, : -(-length // size)].long()
        keys, values = (
            each[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for each in (k, v)
        )
        ours = q[row].view(kv_heads, group, head_dim).float()
        right = (ours @ keys.mT * scale).softmax(-1) @ values
        off = (found[row].float().view_as(right) - right).abs().amax()
        if not off <= (1e-5 if dtype is torch.float32 else 2e-2) * right.abs().amax():
            return False
    return True
