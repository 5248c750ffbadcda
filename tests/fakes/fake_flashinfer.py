"""FlashInfer's wrapper for paged attention as it is documented, computed in torch.

It holds a caller to the contract: what is planned on the host lies there, dtypes and shapes fit,
blocks are the cache's, and `run` gets what was planned for. As FlashInfer it copies its plan from
host memory of its own, so that a wrapper that plans anew before that copy is done is a fault.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

__all__ = ["FakeFlashInfer"]


class FakeFlashInfer(ModuleType):
    """Stands in the place of `flashinfer` in `sys.modules`."""

    def __init__(self) -> None:
        super().__init__("flashinfer")
        #: Of each plan: rows, window, soft cap.
        self.plans: list[tuple[int, int, float | None]] = []
        self.runs = 0
        #: What the next calls raise, by name.
        self.faults: dict[str, Exception] = {}
        #: What is added to every result.
        self.off = 0.0
        fake = self

        class BatchPrefillWithPagedKVCacheWrapper:
            def __init__(self, workspace: torch.Tensor, kv_layout: str = "NHD") -> None:
                assert workspace.dtype is torch.uint8
                assert kv_layout == "HND"
                self.planned: dict[str, Any] | None = None

            def plan(
                self,
                qo_indptr: torch.Tensor,
                paged_kv_indptr: torch.Tensor,
                paged_kv_indices: torch.Tensor,
                paged_kv_last_page_len: torch.Tensor,
                num_qo_heads: int,
                num_kv_heads: int,
                head_dim_qk: int,
                page_size: int,
                *,
                causal: bool = False,
                sm_scale: float | None = None,
                window_left: int = -1,
                logits_soft_cap: float | None = None,
                q_data_type: torch.dtype = torch.float16,
                kv_data_type: torch.dtype | None = None,
            ) -> None:
                fake.raise_fault("plan")
                assert causal
                assert num_qo_heads % num_kv_heads == 0
                rows = len(qo_indptr) - 1
                assert len(paged_kv_indptr) == rows + 1
                assert len(paged_kv_last_page_len) == rows
                assert len(paged_kv_indices) == paged_kv_indptr[-1]
                for tensor in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
                    assert tensor.dtype is torch.int32
                    assert tensor.device.type == "cpu"
                assert paged_kv_indices.dtype is torch.int32
                assert (qo_indptr.diff() > 0).all()
                assert (paged_kv_last_page_len >= 1).all()
                assert (paged_kv_last_page_len <= page_size).all()
                fake.plans.append((rows, window_left, logits_soft_cap))
                self.planned = {
                    "queries": qo_indptr.tolist(),
                    "pages": paged_kv_indptr.tolist(),
                    "blocks": paged_kv_indices.clone(),
                    "last": paged_kv_last_page_len.tolist(),
                    "heads": (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
                    "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
                    "window": window_left,
                    "cap": logits_soft_cap or 0.0,
                    "dtypes": (q_data_type, kv_data_type or q_data_type),
                }

            def run(
                self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]
            ) -> torch.Tensor:
                fake.raise_fault("run")
                assert self.planned is not None
                fake.runs += 1
                return _attend(self.planned, q, *cache) + fake.off

        self.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper

    def raise_fault(self, name: str) -> None:
        if name in self.faults:
            raise self.faults.pop(name)


def _attend(
    plan: dict[str, Any], q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    heads, kv_heads, head_dim, size = plan["heads"]
    assert q.is_contiguous()
    assert (q.dtype, keys.dtype) == plan["dtypes"]
    assert q.shape == (plan["queries"][-1], heads, head_dim)
    assert keys.shape == values.shape
    assert keys.shape[1:] == (kv_heads, size, head_dim)
    out = torch.empty_like(q)
    for row, last in enumerate(plan["last"]):
        first, end = plan["queries"][row : row + 2]
        begin, stop = plan["pages"][row : row + 2]
        blocks = plan["blocks"][begin:stop].long()
        length = (stop - begin - 1) * size + last
        k, v = (
            each[blocks].transpose(1, 2).flatten(0, 1)[:length].double() for each in (keys, values)
        )
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:end].double(), k) * plan["scale"]
        if plan["cap"] > 0:
            scores = plan["cap"] * (scores / plan["cap"]).tanh()
        # The last query sees the last key.
        ahead = torch.arange(length) - torch.arange(length - (end - first), length)[:, None]
        hidden = ahead > 0
        if plan["window"] >= 0:
            hidden |= ahead < -plan["window"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
    return out
