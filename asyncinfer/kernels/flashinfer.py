"""Attention over the cache's pages by FlashInfer's kernels (Ye et al., 2025), where installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch

from asyncinfer.kernels.dispatch import KernelError

__all__ = [
    "FLASHINFER_BYTES",
    "FlashInfer",
    "FlashInferError",
    "attend",
    "flashinfer_is_missing",
    "paged_attention",
]

#: Bytes that FlashInfer recommends for partial results.
_WORKSPACE: Final = 128 << 20
#: Plans of one kind at once, one for each step in flight. A wrapper takes 8 MiB for its plans.
_PLANS: Final = 4
#: Bytes on the device of the workspace and of the plans of a model with two kinds of layers.
FLASHINFER_BYTES: Final = _WORKSPACE + 2 * _PLANS * (8 << 20)


class FlashInferError(KernelError):
    """A kernel of FlashInfer's could not be compiled, planned or launched."""


class FlashInfer:
    """FlashInfer's kernels for the pages of one cache, created on the thread that uses them."""

    def __init__(self, device: torch.device, workspace: torch.Tensor | None = None) -> None:
        """`workspace` belongs to another cache of the same thread; None allocates one. Raises
        `FlashInferError` where FlashInfer cannot be imported."""
        self._device = device
        try:
            self._wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        except (AttributeError, ImportError) as error:
            raise FlashInferError(f"FlashInfer: {type(error).__name__}: {error}") from error
        self.workspace = workspace
        if workspace is None:
            self.workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)
        #: By window and soft cap: wrappers that are used in turn, each with an event after its last
        #: plan, and the number of plans so far.
        self._wrappers: dict[tuple[int, float], list[tuple[Any, Any]]] = {}
        self._taken: dict[tuple[int, float], int] = {}

    def plan(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        block_tables: torch.Tensor,
        lengths: Sequence[int],
        counts: Sequence[int],
        scale: float,
        *,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Any:
        """A wrapper whose `run(q, (keys, values))` attends for these rows, in every layer.

        Args:
            q: `[tokens, heads, head_dim]`; its shape and dtype are read.
            cache: a layer's keys, `[blocks, kv_heads, block_size, head_dim]`, likewise.
            block_tables: int32 `[rows, max_blocks]` on the device.
            lengths: tokens of each row's sequence, this pass' among them; at least 1.
            counts: query tokens of each row, the last of its sequence.

        Raises `FlashInferError` for whatever FlashInfer raises.
        """
        _, kv_heads, size, head_dim = cache.shape
        # Blocks outside the window may hold another sequence's tokens by now, even NaN.
        firsts = [
            0 if window is None else max(0, length - count - window + 1) // size
            for length, count in zip(lengths, counts, strict=True)
        ]
        ends = [-(-length // size) for length in lengths]
        pages = [end - first for first, end in zip(firsts, ends, strict=True)]
        try:
            kind = (-1 if window is None else window - 1, softcap or 0.0)
            wrapper, event = self._next(kind)
            wrapper.plan(
                *map(_starts, (counts, pages)),
                self._blocks(block_tables, firsts, ends),
                _int32(length - (n - 1) * size for length, n in zip(lengths, ends, strict=True)),
                q.shape[1],
                kv_heads,
                head_dim,
                size,
                causal=True,
                sm_scale=scale,
                window_left=kind[0],
                logits_soft_cap=softcap,
                q_data_type=q.dtype,
                kv_data_type=cache.dtype,
            )
            if event is not None:
                event.record()
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            raise _failed("plan", error) from error
        return wrapper

    def _next(self, kind: tuple[int, float]) -> tuple[Any, Any]:
        """The next wrapper of a kind, once the device has copied its last plan, since the next plan
        overwrites that one in host memory."""
        wrappers = self._wrappers.setdefault(kind, [])
        turn = self._taken[kind] = self._taken.get(kind, -1) + 1
        if len(wrappers) < _PLANS:
            event = torch.cuda.Event(blocking=True) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
            wrappers.append((self._wrapper(self.workspace, "HND"), event))
            return wrappers[-1]
        wrapper, event = wrappers[turn % _PLANS]
        if event is not None:
            event.synchronize()
        return wrapper, event

    def _blocks(
        self, block_tables: torch.Tensor, firsts: Sequence[int], ends: Sequence[int]
    ) -> torch.Tensor:
        """int32: the blocks of each row from its first to its last, one row after the other."""
        width = block_tables.shape[1]
        spans = enumerate(zip(firsts, ends, strict=True))
        places = [row * width + np.arange(first, end) for row, (first, end) in spans]
        at = torch.from_numpy(np.concatenate(places))
        if self._device.type == "cuda":
            at = at.pin_memory().to(self._device, non_blocking=True)
        return block_tables.flatten().index_select(0, at)


def attend(wrapper: Any, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`[tokens, heads, head_dim]` by a wrapper that `FlashInfer.plan` gave. Raises
    `FlashInferError` for whatever FlashInfer raises."""
    try:
        out: torch.Tensor = wrapper.run(q, (keys, values))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        raise _failed("run", error) from error
    return out


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    decode_rows: int = 0,
) -> torch.Tensor:
    """The reference kernel's signature, for trials. Waits for the device. No row may be empty."""
    lengths, counts = seq_lens.tolist(), query_starts.diff().tolist()
    flashinfer = FlashInfer(q.device)
    wrapper = flashinfer.plan(
        q, k_cache, block_tables, lengths, counts, scale, window=window, softcap=softcap
    )
    return attend(wrapper, q, k_cache, v_cache)


def flashinfer_is_missing() -> str | None:
    """How to install FlashInfer; None where it is."""
    if find_spec("flashinfer") is None:
        return 'FlashInfer is not installed: pip install "asyncinfer[flashinfer]"'
    return None


def _starts(counts: Sequence[int]) -> torch.Tensor:
    return _int32(accumulate(counts, initial=0))


def _int32(values: Any) -> torch.Tensor:
    """On the host, since FlashInfer plans there."""
    return torch.tensor([*values], dtype=torch.int32)


def _failed(what: str, error: Exception) -> FlashInferError:
    lines = str(error).strip().splitlines() or [""]
    return FlashInferError(f"FlashInfer's {what}: {type(error).__name__}: {lines[-1][:200]}")
