"""Every attention there is, made in one way. The suite of `test_conformance.py` runs on each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from fakes.fake_flashinfer import FakeFlashInfer
from kernels.interpreted import interpreted

from asyncinfer.attention import (
    Attend,
    AttentionBatch,
    DeviceBatch,
    FlashInferAttention,
    GatheredAttention,
    KVCache,
    PagedAttention,
    decode,
    prefill,
    products,
    varied,
)
from asyncinfer.attention.invariant import InvariantAttention
from asyncinfer.attention.masked import MaskedAttention
from asyncinfer.kernels import dispatch, flashinfer, onednn, triton
from asyncinfer.kernels.flashinfer import FlashInfer

__all__ = ["BACKENDS", "Backend"]

Make = Callable[[KVCache, AttentionBatch, float], Attend]


@dataclass(frozen=True)
class Backend:
    #: Begins a pass over a batch that numbers the sequences of its rows.
    make: Make
    #: What holds while it runs.
    setting: Callable[[], AbstractContextManager[None]] = nullcontext
    #: Whether it computes in bfloat16.
    bfloat16: bool = True
    #: Formats of the cache that it does not read.
    unread: tuple[str, ...] = ()


def _gathered(kv: KVCache, batch: AttentionBatch, scale: float) -> Attend:
    return GatheredAttention(kv, replace(batch, sequences=None), scale, native=False)


def _contiguous(kv: KVCache, batch: AttentionBatch, scale: float) -> Attend:
    return GatheredAttention(kv, batch, scale, native=False)


def _masked(kv: KVCache, batch: AttentionBatch, scale: float) -> Attend:
    """It takes decode rows alone; other passes gather."""
    if batch.decode_rows < len(batch.counts):
        return _gathered(kv, batch, scale)
    return MaskedAttention(kv, on_device(batch), scale)


def _invariant(kv: KVCache, batch: AttentionBatch, scale: float) -> Attend:
    return InvariantAttention(kv, replace(batch, invariant=True), scale)


def _flashinfer(kv: KVCache, batch: AttentionBatch, scale: float) -> Attend:
    if kv.flashinfer is None:
        kv.flashinfer = FlashInfer(torch.device("cpu"))
    return FlashInferAttention(kv, batch, scale, kv.flashinfer)


@contextmanager
def _installed() -> Iterator[None]:
    """FlashInfer, as torch computes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", FakeFlashInfer())
        patch.setattr(flashinfer, "_WORKSPACE", 1 << 10)
        yield


def on_device(batch: AttentionBatch) -> DeviceBatch:
    """The batch without what only the host knows."""
    known = DeviceBatch.__dataclass_fields__
    return DeviceBatch(**{name: getattr(batch, name) for name in known})


@contextmanager
def _small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varied, "_TILE_TOKENS", 3)
        patch.setattr(prefill, "_TILE_MASK", 64)
        for module in (decode, prefill):
            patch.setattr(module, "has_faster_product", lambda dtype: False)
        yield


@contextmanager
def _products() -> Iterator[None]:
    """oneDNN's products for every row of several query tokens."""
    if not onednn.available(torch.float32):
        pytest.skip("torch without oneDNN")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_MANY_SCORES", 0)
        patch.setattr(prefill, "_SMALL", 0)
        patch.setattr(prefill, "mkl_keeps_up", lambda: False)
        patch.setattr(products, "_TILE_TOKENS", 3)
        patch.setattr(prefill, "native_prefill", lambda *_: None)
        for module in (decode, prefill):
            patch.setattr(module, "has_faster_product", lambda dtype: True)
        yield


@contextmanager
def _interpreted() -> Iterator[None]:
    """Triton's kernels, without a GPU."""
    with pytest.MonkeyPatch.context() as patch, interpreted():
        patch.setattr(dispatch, "has_triton_kernel", lambda name, _: name in triton.__all__)
        yield


BACKENDS = {
    "gathered": Backend(_gathered),
    "gathered in small tiles": Backend(_gathered, _small_tiles),
    "contiguous": Backend(_contiguous),
    "products": Backend(_contiguous, _products, bfloat16=False),
    "native": Backend(GatheredAttention),
    "masked": Backend(_masked),
    "invariant": Backend(_invariant),
    "paged": Backend(PagedAttention, unread=("int4",)),
    "triton": Backend(PagedAttention, _interpreted, bfloat16=False, unread=("int4",)),
    "flashinfer": Backend(_flashinfer, _installed, unread=("int8", "fp8", "int4")),
}
