"""How long the matrix products of a model take by themselves: what no engine can go below."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F

from asyncinfer.bench.workloads import MAX_RUNNING, Workload

__all__ = ["BULK_ROWS", "floor_seconds", "product_rows", "product_seconds", "product_shapes"]

#: Rows of a prompt's products: beyond, they get no faster.
BULK_ROWS: Final = 512
#: Repetitions of each timing, of which the best counts: disturbances only make one longer.
_REPEAT: Final = 5

_Product = Callable[[torch.Tensor], torch.Tensor]


def product_rows(work: Workload) -> int:
    """Rows of the products of a decode step."""
    return min(MAX_RUNNING, len(work.requests))


def floor_seconds(work: Workload, seconds: dict[int, float]) -> float:
    """The products of all of `work`: of its prompts in bulk, less what is cached, and of its output
    in batches that are always full. Attention, norms and all else take no time."""
    rows = product_rows(work)
    fresh = work.prompt_tokens - work.cached_tokens
    steps = (work.output_tokens - len(work.requests)) / rows
    return fresh / BULK_ROWS * seconds[BULK_ROWS] + steps * seconds[rows]


def product_seconds(folder: Path, rows: Sequence[int], dtype: str = "float32") -> dict[int, float]:
    """Seconds of one pass through all products of the Llama in `folder`, in `dtype` on the CPU, by
    the number of rows. The head's is left out at `BULK_ROWS`: a prompt needs it for one row only.

    `F.linear` or oneDNN's product with a weight in its own layout, whichever is faster. The weights
    are zeros in the model's own shapes, each in memory of its own.
    """
    shapes = product_shapes(json.loads((folder / "config.json").read_text("utf-8")))
    kind = getattr(torch, dtype)
    weights = [torch.zeros(shape, dtype=kind) for shape in shapes]
    best = dict.fromkeys(rows, float("inf"))
    with torch.inference_mode():
        for make in (_plain, _reordered):
            linears = [make(weight) for weight in weights]
            for count in rows:
                used = linears[:-1] if count == BULK_ROWS else linears
                best[count] = min(best[count], _seconds(used, shapes, count, kind))
    return best


def product_shapes(config: dict[str, int]) -> list[tuple[int, int]]:
    """`[outputs, inputs]` of each product by a Llama's `config.json`, the head's the last."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    layer = [(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)]
    return [*(layer * config["num_hidden_layers"]), (config["vocab_size"], hidden)]


def _plain(weight: torch.Tensor) -> _Product:
    return partial(F.linear, weight=weight)


def _reordered(weight: torch.Tensor) -> _Product:
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return _plain(weight)
    if weight.dtype is torch.bfloat16 and not ops._is_mkldnn_bf16_supported():
        return _plain(weight)
    laid_out = ops._reorder_linear_weight(weight, MAX_RUNNING)
    return lambda x: ops._linear_pointwise(x, laid_out, None, "none", [], "")


def _seconds(
    products: Sequence[_Product],
    shapes: Sequence[tuple[int, int]],
    rows: int,
    dtype: torch.dtype,
) -> float:
    inputs = [torch.zeros(rows, shape[1], dtype=dtype) for shape in shapes]
    taken = []
    for _ in range(1 + _REPEAT):
        began = time.perf_counter()
        for product, x in zip(products, inputs, strict=False):
            product(x)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])
