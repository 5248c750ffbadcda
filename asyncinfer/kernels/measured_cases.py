"""The measured cases of each kernel: its candidates, and calls like those of a model's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch

from asyncinfer.kernels.choices import Key
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.linear_tiles import gemv_tokens, tile_candidates, tile_key
from asyncinfer.kernels.reference.floats_of import CODES
from asyncinfer.kernels.trial_cases import TrialShapes
from asyncinfer.kernels.trial_numbers import Numbers
from asyncinfer.kernels.trial_products import quantised_weight
from asyncinfer.kernels.workspace import SPLIT_KEY, SPLITS

__all__ = ["MeasuredCase", "TuningShapes", "measured_cases"]

_BLOCK: Final = 16
#: Tokens of a product: buckets of both kinds of tiles.
_TOKENS: Final = (1, 4, 16, 64)
#: Rows that decode, and the tokens before each: one long one, and a full batch.
_DECODE: Final = ((1, 8192), (64, 1024))
#: Query tokens of a prompt's chunk.
_PROMPT: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningShapes:
    """A model's own shapes."""

    trial: TrialShapes
    #: `(outputs, inputs)` of its matrices, each once.
    products: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCase:
    """One kernel at one bucket of shapes."""

    key: Key
    title: str
    #: The derived one first.
    candidates: tuple[Any, ...]
    #: Makes the inputs, and returns a function that runs a module's kernel on them.
    make: Callable[[], Callable[[ModuleType], torch.Tensor]]


def measured_cases(shapes: TuningShapes, device: torch.device) -> Iterator[MeasuredCase]:
    """All cases of a model on `device`; only `MeasuredCase.make` computes anything."""
    trial = shapes.trial
    if trial.dtype is not torch.float32:
        for layout in (None, *trial.layouts):
            yield from _products(shapes, layout, device)
    yield from _attention(trial, device)


def _products(
    shapes: TuningShapes, layout: WeightLayout | None, device: torch.device
) -> Iterator[MeasuredCase]:
    dtype = shapes.trial.dtype
    itemsize = float(dtype.itemsize) if layout is None else 1 / CODES[layout.code]
    for outputs, inputs in shapes.products:
        if layout is not None and inputs % (layout.group or 1):
            continue
        for tokens in _TOKENS:
            if layout is not None and gemv_tokens(itemsize) < tokens <= 4:
                # So few tokens are in the bucket of 16.
                continue
            yield MeasuredCase(
                key=tile_key(outputs, inputs, tokens, itemsize),
                title=f"linear_small {tokens} x {inputs} -> {outputs}, {layout or dtype}",
                candidates=tile_candidates(outputs, inputs, tokens, itemsize),
                make=_product(outputs, inputs, tokens, layout, device, dtype),
            )


def _product(
    outputs: int,
    inputs: int,
    tokens: int,
    layout: WeightLayout | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Callable[[], Callable[[ModuleType], torch.Tensor]]:
    def make() -> Callable[[ModuleType], torch.Tensor]:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        given: dict[str, Any] = {"weight": normal(outputs, inputs).mul_(inputs**-0.5)}
        if layout is not None:
            given = quantised_weight(Numbers(device, dtype, dtype), layout, outputs, inputs)
        x, arrivals = normal(tokens, inputs), torch.zeros(outputs, dtype=torch.int32, device=device)
        return lambda module: module.linear_small(x, **given, arrivals=arrivals)

    return make


def _attention(shapes: TrialShapes, device: torch.device) -> Iterator[MeasuredCase]:
    # Only a GPU needs Triton, which takes long to import.
    from asyncinfer.kernels.triton import attention_tiling as tiling

    shared = tiling.device_shared(device)
    group, dim, dtype = shapes.heads // shapes.kv_heads, shapes.head_dim, shapes.dtype
    decode = [_attended(shapes, device, rows, length, 1) for rows, length in _DECODE]

    def both() -> Callable[[ModuleType], torch.Tensor]:
        one, many = (each() for each in decode)
        return lambda module: torch.cat((one(module), many(module)))

    what = f"{shapes.heads}/{shapes.kv_heads} x {dim}, {shapes.kv_dtype}"
    yield MeasuredCase(
        key=tiling.decode_key(group, dim, dtype, shapes.kv_dtype),
        title=f"paged_attention decode {what}",
        candidates=tiling.decode_candidates(group, dim, dtype, shapes.kv_dtype, shared),
        make=both,
    )
    yield MeasuredCase(
        key=SPLIT_KEY, title=f"paged_attention splits {what}", candidates=SPLITS, make=both
    )
    yield MeasuredCase(
        key=tiling.prefill_key(dim, dtype, shapes.kv_dtype),
        title=f"paged_attention prompt of {_PROMPT} {what}",
        candidates=tiling.prefill_candidates(dim, dtype, shapes.kv_dtype, shared),
        make=_attended(shapes, device, 1, _PROMPT, _PROMPT),
    )


def _attended(
    shapes: TrialShapes, device: torch.device, rows: int, length: int, tokens: int
) -> Callable[[], Callable[[ModuleType], torch.Tensor]]:
    """Attention of `rows` rows with `length` keys and `tokens` query tokens each."""

    def make() -> Callable[[ModuleType], torch.Tensor]:
        pages, dim = -(-length // _BLOCK), shapes.head_dim
        size = (rows * pages, shapes.kv_heads, _BLOCK, dim)
        caches = [
            torch.randn(size, device=device, dtype=torch.float32).to(shapes.kv_dtype)
            for _ in range(2)
        ]
        scales = {}
        if shapes.kv_dtype.itemsize == 1:
            scales = {
                name: torch.ones(size[:3], device=device, dtype=torch.float32)
                for name in ("k_scales", "v_scales")
            }
        order = torch.randperm(rows * pages, device=device).int().view(rows, pages)
        lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * tokens
        q = torch.randn(rows * tokens, shapes.heads, dim, device=device, dtype=torch.float32).to(
            shapes.dtype
        )
        options: dict[str, Any] = {**scales, "decode_rows": rows if tokens == 1 else 0}
        scale = dim**-0.5
        return lambda module: module.paged_attention(
            q, *caches, order, lengths, starts, scale, **options
        )

    return make
