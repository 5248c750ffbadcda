"""The sizes of the attention kernels' tiles.

The sizes follow from the code that the compiler makes for sm_80 to sm_120, and from measurements on
an H200. Every tile fits a device's shared memory. Next to no register is spilled; float32, which is
here for exactness, may spill a few. Four programs of a decode kernel fit on a multiprocessor of
sm_80 and sm_90. On sm_90 prefill's products use wgmma. Sizes depend on a model and a device alone,
never on a batch, so that a row has the same bits in every batch. A measurement on a device also
tries `decode_candidates` and `prefill_candidates`, and an engine uses the fastest
(`kernels/choices.py`).
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

#: The most parts of a row that are read together while they are joined, and the most of their
#: numbers in a thread: for tiles of 16 queries, and for larger ones, whose sums take registers too.
_JOINED, _FEW_NUMBERS, _MANY_NUMBERS = 32, 128, 64
#: With five stages keys and values are loaded two tiles ahead, and the block table's entries for
#: them two more. With three they are loaded one tile ahead, which leaves room for another program
#: on a multiprocessor where keys are large. Three took 64 rows from 167 us to 133 on an H200, whose
#: memory takes 125 (docs/benchmarks/h200.md).
_STAGES, _FEW_STAGES = 5, 3
#: Bytes of a key from which on decode kernels have few stages.
_LARGE_KEY = 256
#: Shared memory of a program on an A100, rounded down, and on an H100 or B200. GPUs of consumers
#: (sm_86, sm_89, sm_120) have 99 KiB.
_ROOMY, _LARGE = 160 << 10, 227 << 10


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile of one program of an attention kernel."""

    #: Queries of a program: query tokens times the heads that share a KV head.
    m: int
    #: Keys of a tile.
    n: int
    #: The head dimension, rounded up to a power of two.
    d: int
    warps: int
    #: Stages of the pipeline over tiles.
    stages: int = _STAGES
    #: Queries of a tile whose parts are joined, and the parts that are read at a time.
    held: int = 1
    joined: int = 1


def decode_tiling(
    queries: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared: int
) -> Tiling:
    """The tiling of the decode kernel, for `queries` query tokens times heads that share a KV head.
    `dtype` is that of `q`, and a program may have `shared` bytes of shared memory."""
    derived = _decode_tiling(queries, head_dim, dtype, cache_dtype, shared)
    return chosen(decode_key(queries, head_dim, dtype, cache_dtype), derived)


def prefill_tiling(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared: int
) -> Tiling:
    """As `decode_tiling`, of the prefill kernel, whose tiles do not depend on the queries."""
    derived = _prefill_tiling(head_dim, dtype, cache_dtype, shared)
    return chosen(prefill_key(head_dim, dtype, cache_dtype), derived)


def decode_key(queries: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Key:
    """The key of a decode tiling in a thread's choices."""
    return ("decode_attention", queries, head_dim, str(dtype), str(cache_dtype))


def prefill_key(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> Key:
    """The key of a prefill tiling in a thread's choices."""
    return ("prefill_attention", head_dim, str(dtype), str(cache_dtype))


def decode_candidates(
    queries: int, head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared: int
) -> tuple[Tiling, ...]:
    """Tilings that a measurement tries, the derived one first. None takes more shared memory than
    the derived one."""
    own = _decode_tiling(queries, head_dim, dtype, cache_dtype, shared)
    tried = [replace(own, n=own.n // 2), replace(own, stages=own.stages - 1)]
    tried.append(_joining(replace(own, warps=2 * own.warps), queries))
    return _each(own, *tried)


def prefill_candidates(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, shared: int
) -> tuple[Tiling, ...]:
    """As `decode_candidates`, of the prefill kernel. Other queries, stages or warps are not tried,
    since fewer of any spill registers on some GPU."""
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
    # Warps wait for one another at every tile, so there are few.
    stages = _FEW_STAGES if d * cache_dtype.itemsize >= _LARGE_KEY else _STAGES
    return _joining(Tiling(m, 64, d, 2 if m == 16 else 4, stages), queries)


def _joining(tiling: Tiling, queries: int) -> Tiling:
    """The tiling with as many parts read together as its threads' registers hold."""
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
    # Wide heads take registers, and so does the conversion of 8-bit numbers. A thread that pays for
    # both has none left for a large tile.
    costs = (d > 128) + (cache_dtype is not dtype)
    large = costs < (2 if shared >= _LARGE else 1 if shared >= _ROOMY else 0)
    stages = _STAGES if d <= 128 or shared >= _ROOMY else _STAGES - 1
    return Tiling(128 if large else 64, 64 if d <= 128 else 32, d, 8, stages=stages)


def _float32_keys(d: int, shared: int) -> int:
    return 32 if d <= 128 or shared >= _ROOMY else 16


def device_capability(device: torch.device) -> int:
    """The compute capability times ten: 90 for an H100 or H200. A device that is not CUDA counts as
    one of these, since kernels are only interpreted or compiled there."""
    return _capability(device_of(device))


def device_shared(device: torch.device) -> int:
    """Bytes of shared memory that a program may ask for. Without CUDA they are an H100's."""
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
