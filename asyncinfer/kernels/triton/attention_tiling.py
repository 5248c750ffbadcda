"""How large the attention kernels' tiles are.

Chosen from what the compiler makes of them for sm_80 to sm_120, and from what was measured on an
H200: they fit a device's shared memory, next to no register is spilled (float32, which is here for
exactness, may spill a few), four programs of a decode kernel lie on a multiprocessor of sm_80 and
sm_90, and sm_90 computes prefill's products through wgmma. They depend on a model and a device
alone, never on a batch: a row is computed alike in every batch. A measurement on a device tries
candidates beside them, and an engine takes what it chose (`kernels/choices.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton

from asyncinfer.kernels.choices import Key, chosen
from asyncinfer.kernels.rehearsal import device_of

__all__ = [
    "Tiling",
    "decode_candidates",
    "decode_key",
    "decode_tiling",
    "device_capability",
    "device_shared",
    "prefill_candidates",
    "prefill_key",
    "prefill_tiling",
]

#: Parts of a row that are read together at most while they are joined, and their numbers in a
#: thread: of few queries, and of many, whose parts would not stay in the registers.
_JOINED, _FEW_NUMBERS, _MANY_NUMBERS = 32, 128, 64
#: Keys and values are loaded two tiles ahead, the block table's entries for them two more; or one
#: tile, where the second would keep another program from a multiprocessor. That took 64 rows from
#: 167 us to 133 on an H200, whose memory takes 125 (docs/benchmarks/h200.md).
_STAGES, _FEW_STAGES = 5, 3
#: Bytes of a key from which on decode kernels have few stages.
_LARGE_KEY = 256
#: Shared memory of a program on an A100, rounded down, and on an H100 or B200. GPUs of consumers
#: (sm_86, sm_89, sm_120) have 99 KiB.
_ROOMY, _LARGE = 160 << 10, 227 << 10


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program's queries times heads `m`, the keys `n` of a tile, the head dimension rounded up to
    a power of two `d`; warps, and stages of the pipeline over tiles. `joined` parts are read at a
    time, of each the first `held` of the queries."""

    m: int
    n: int
    d: int
    warps: int
    stages: int = _STAGES
    held: int = 1
    joined: int = 1


def decode_tiling(
    queries: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared: int
) -> Tiling:
    """For `queries` query tokens times heads that share a KV head, with `q` of `dtype`, where a
    program may have `shared` bytes of shared memory."""
    derived = _decode_tiling(queries, head_dim, dtype, cache_dtype, shared)
    return chosen(decode_key(queries, head_dim, dtype, cache_dtype), derived)


def prefill_tiling(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared: int
) -> Tiling:
    """With `q` of `dtype`, where a program may have `shared` bytes of shared memory."""
    derived = _prefill_tiling(head_dim, dtype, cache_dtype, shared)
    return chosen(prefill_key(head_dim, dtype, cache_dtype), derived)


def decode_key(queries: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Key:
    """What the choice of a decode tiling goes by."""
    return ("decode_attention", queries, head_dim, str(dtype), str(cache_dtype))


def prefill_key(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Key:
    """What the choice of a prefill tiling goes by."""
    return ("prefill_attention", head_dim, str(dtype), str(cache_dtype))


def decode_candidates(
    queries: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared: int
) -> tuple[Tiling, ...]:
    """Tilings that a measurement tries, the one that was derived first. None takes more shared
    memory than that."""
    own = _decode_tiling(queries, head_dim, dtype, cache_dtype, shared)
    tried = [replace(own, n=own.n // 2), replace(own, stages=own.stages - 1)]
    tried.append(_joining(replace(own, warps=2 * own.warps), queries))
    return _each(own, *tried)


def prefill_candidates(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared: int
) -> tuple[Tiling, ...]:
    """As `decode_candidates`, of prefill. Fewer queries, stages or warps spill on some GPU."""
    own = _prefill_tiling(head_dim, dtype, cache_dtype, shared)
    return _each(own, replace(own, n=own.n // 2))


def _each(*tried: Tiling) -> tuple[Tiling, ...]:
    return tuple(dict.fromkeys(each for each in tried if each.n >= 16))


@functools.cache
def _decode_tiling(
    queries: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared: int
) -> Tiling:
    d = max(16, triton.next_power_of_2(head_dim))
    if dtype is torch.float32:
        return _joining(Tiling(16, _float32_keys(d, shared), d, 8, stages=4), queries)
    largest = 64 if d <= 128 else 32
    m = min(max(16, triton.next_power_of_2(queries)), largest)
    if d > 128:
        return _joining(Tiling(m, 32, d, 4 if m == 16 else 8), queries)
    # Few warps, which wait for one another at every tile.
    stages = _FEW_STAGES if d * cache_dtype.itemsize >= _LARGE_KEY else _STAGES
    return _joining(Tiling(m, 64, d, 2 if m == 16 else 4, stages), queries)


def _joining(tiling: Tiling, queries: int) -> Tiling:
    """The tiling with as many parts read together as its threads hold."""
    held = min(tiling.m, triton.next_power_of_2(queries))
    numbers = _FEW_NUMBERS if tiling.m == 16 else _MANY_NUMBERS
    joined = 32 * tiling.warps * numbers // (held * tiling.d)
    return replace(tiling, held=held, joined=max(1, min(_JOINED, joined)))


@functools.cache
def _prefill_tiling(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared: int
) -> Tiling:
    d = max(16, triton.next_power_of_2(head_dim))
    if dtype is torch.float32:
        return Tiling(32 if d <= 128 else 16, _float32_keys(d, shared), d, 8, stages=4)
    # A thread has no registers left for all of a large tile where a head is wide and 8 bits are
    # converted.
    costs = (d > 128) + (cache_dtype is not dtype)
    large = costs < (2 if shared >= _LARGE else 1 if shared >= _ROOMY else 0)
    stages = _STAGES if d <= 128 or shared >= _ROOMY else _STAGES - 1
    return Tiling(128 if large else 64, 64 if d <= 128 else 32, d, 8, stages=stages)


def _float32_keys(d: int, shared: int) -> int:
    return 32 if d <= 128 or shared >= _ROOMY else 16


def device_capability(device: torch.device) -> int:
    """90 for an H100 or H200; also for a device that is not CUDA, where kernels are only tried."""
    return _capability(device_of(device))


def device_shared(device: torch.device) -> int:
    """Bytes of shared memory that a program may ask for; an H100's for a device that is not CUDA,
    where kernels are only tried."""
    return _shared(device_of(device))


@functools.cache
def _capability(device: torch.device) -> int:
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _shared(device: torch.device) -> int:
    if device.type != "cuda":
        return _LARGE
    about = torch.cuda.get_device_properties(device)
    return int(getattr(about, "shared_memory_per_block_optin", about.shared_memory_per_block))
