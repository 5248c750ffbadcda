"""The cases of a trial: Triton's and the reference kernels get the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.trial_numbers import SEED, Case, Numbers
from asyncinfer.kernels.trial_products import quantised_products

__all__ = ["Case", "TrialShapes", "cases"]

_BLOCK: Final = 16
#: Tokens of sequences: on both sides of a block, of a tile, and many of both.
_LENGTHS: Final = (1, 15, 16, 17, 130, 300)
#: Tokens of a product: one for each kind of tile.
_ROWS: Final = (1, 4, 16, 64)
#: Rows with adapters: those of a decode step, and enough for tiles.
_LORA_ROWS: Final = (5, 70)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialShapes:
    """A model's own shapes, so that a trial compiles the kernels that steps launch."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    #: The dtype of activations and weights, and that of keys and values.
    dtype: torch.dtype
    kv_dtype: torch.dtype
    #: Layouts of quantised weights that kernels read.
    layouts: tuple[WeightLayout, ...] = ()


def cases(shapes: TrialShapes, device: torch.device) -> Iterator[tuple[str, Case]]:
    """Each kernel's name and its case, at a model's shapes on `device`."""
    hidden, dtype = shapes.hidden, shapes.dtype

    def norm(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        numbers = Numbers(device, dtype, wanted)
        return (module.rms_norm(numbers(5, hidden), numbers(hidden), 1e-6),)

    def added(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        numbers = Numbers(device, dtype, wanted)
        total, normed = module.add_rms_norm(
            numbers(5, hidden), numbers(5, hidden), numbers(hidden), 1e-6
        )
        return total, normed

    def gate(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        return (module.silu_mul(Numbers(device, dtype, wanted)(5, 2 * hidden)),)

    yield "rms_norm", norm
    yield "add_rms_norm", added
    yield "silu_mul", gate
    for approximate in ("none", "tanh"):
        yield f"gelu_mul ({approximate})", _gelu(hidden, approximate, device, dtype)
    # Layers use this kernel for 16-bit dtypes only.
    for rows in _ROWS if dtype is not torch.float32 else ():
        yield f"linear_small of {rows} rows", _product(hidden, rows, device, dtype)
    for layout in shapes.layouts if dtype is not torch.float32 else ():
        yield from quantised_products(layout, hidden, device, dtype)
    for rows in _LORA_ROWS:
        yield f"lora_add of {rows} rows", _adapted(shapes, rows, device)
    yield "kv_write", _written(shapes, device)
    yield "rope", _turned(shapes, device)
    yield "rope_kv_write", _rotated(shapes, device)
    for decode in (True, False):
        kind = "decode" if decode else "prefill"
        yield f"paged_attention ({kind})", _attention(shapes, device, decode=decode)
    yield "sample", _draws(shapes, device)
    yield "decode_inputs", _step_inputs(device)
    yield "keep_draws", _kept(device)


def _product(hidden: int, rows: int, device: torch.device, dtype: torch.dtype) -> Case:
    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        numbers = Numbers(device, dtype, wanted)
        x, weight = numbers(rows, hidden), numbers(hidden, hidden, scale=hidden**-0.5)
        return (
            module.linear_small(x, weight, norm=numbers(hidden), residual=numbers(rows, hidden)),
        )

    return case


def _gelu(hidden: int, approximate: str, device: torch.device, dtype: torch.dtype) -> Case:
    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        gate_up = Numbers(device, dtype, wanted)(5, 2 * hidden)
        return (module.gelu_mul(gate_up, approximate=approximate),)

    return case


def _adapted(shapes: TrialShapes, rows: int, device: torch.device) -> Case:
    """Queries, keys and values after the adapters of their rows were added. Some rows have none,
    and one adapter has no part in this layer."""

    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        heads, held, slots = (shapes.heads, *[shapes.kv_heads] * 2), 16, 3
        sizes = tuple(count * shapes.head_dim for count in heads)
        numbers, inputs = Numbers(device, shapes.dtype, wanted), shapes.hidden
        x, y = numbers(rows, inputs), numbers(rows, sum(sizes))
        down = numbers(slots, held * len(sizes), inputs, scale=inputs**-0.5)
        up = numbers(slots, held, sum(sizes))
        ranks = [held, 0, 5]
        for slot, rank in enumerate(ranks):
            # Nothing beyond an adapter's rank may be read.
            down[slot, rank * len(sizes) :] = up[slot, rank:] = torch.nan
        chosen = torch.arange(rows, device=device).int() % (slots + 1) - 1
        rank_of = torch.tensor(ranks, dtype=torch.int32, device=device)
        return (module.lora_add(y, x, down, up, rank_of, chosen, sizes=sizes),)

    return case


def _turned(shapes: TrialShapes, device: torch.device) -> Case:
    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        x = Numbers(device, shapes.dtype, wanted)(4, shapes.heads, shapes.head_dim)
        return (module.rope(x, *_angles(4, shapes.head_dim, device)),)

    return case


def _angles(tokens: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, which are float32 whatever the model's dtype."""
    angles = torch.linspace(0.0, 3.0, head_dim * tokens, device=device, dtype=torch.float32).view(
        tokens, 1, head_dim
    )
    return angles.cos(), angles.sin()


def _written(shapes: TrialShapes, device: torch.device) -> Case:
    """What is in the cache after keys and values were written to it, with their scales."""

    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        slots = torch.tensor([_BLOCK * 2 + 3, -1, 0, _BLOCK * 3 + 15], device=device)
        caches, scales = _cache(shapes, 4, wanted, device)
        numbers = Numbers(device, shapes.dtype, wanted)
        k, v = (numbers(4, shapes.kv_heads, shapes.head_dim) for _ in range(2))
        module.kv_write(k, v, *caches, slots, **scales)
        return _values(caches, scales)

    return case


def _values(
    caches: Sequence[torch.Tensor], scales: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """8-bit numbers may be rounded to either side, so values are compared and not bytes."""
    return tuple(
        cache.float() * (1.0 if factor is None else factor[..., None])
        for cache, factor in zip(caches, scales.values() or (None, None), strict=True)
    )


def _rotated(shapes: TrialShapes, device: torch.device) -> Case:
    """Rotated queries, and what is in the cache afterwards."""

    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        slots = torch.tensor([_BLOCK * 2 + 3, -1, 0, _BLOCK * 3 + 15], device=device)
        caches, scales = _cache(shapes, 4, wanted, device)
        numbers = Numbers(device, shapes.dtype, wanted)
        qkv = numbers(len(slots), shapes.heads + 2 * shapes.kv_heads, shapes.head_dim)
        norms = {name: numbers(shapes.head_dim) for name in ("q_norm", "k_norm")}
        angles = _angles(len(slots), shapes.head_dim, device)
        queries = module.rope_kv_write(qkv, *angles, *caches, slots, **norms, **scales)
        return queries, *_values(caches, scales)

    return case


def _cache(
    shapes: TrialShapes, blocks: int, wanted: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Keys and values of zeros, and their scales where they have any."""
    small = shapes.kv_dtype.itemsize == 1
    dtype = shapes.kv_dtype if small else wanted
    size = (blocks, shapes.kv_heads, _BLOCK, shapes.head_dim)
    caches = [torch.zeros(size, device=device, dtype=torch.float32).to(dtype) for _ in range(2)]
    if not small:
        return caches, {}
    return caches, {
        name: torch.zeros(size[:3], device=device, dtype=torch.float32)
        for name in ("k_scales", "v_scales")
    }


def _attention(shapes: TrialShapes, device: torch.device, *, decode: bool) -> Case:
    """Rows of many lengths over pages in no order. Every page that no row has is full of NaN."""
    queries = [1 if decode else min(length, 40) for length in _LENGTHS]
    used = [-(-length // _BLOCK) for length in _LENGTHS]

    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        numbers = Numbers(device, shapes.dtype, wanted)
        order = torch.randperm(sum(used) + 4, generator=torch.Generator().manual_seed(SEED))
        caches, scales = _cache(shapes, len(order), wanted, device)
        tables = torch.zeros(len(used), max(used), dtype=torch.int32)
        taken = iter(order.tolist())
        for row, count in enumerate(used):
            tables[row, :count] = torch.tensor([next(taken) for _ in range(count)])
        slots = (order[: sum(used), None] * _BLOCK + torch.arange(_BLOCK)).flatten().to(device)
        size = (len(slots), shapes.kv_heads, shapes.head_dim)
        k_cache, v_cache = caches
        # The reference kernel fills the cache for both sides.
        reference.kv_write(numbers(*size), numbers(*size), k_cache, v_cache, slots, **scales)
        for spare in order[sum(used) :].tolist():
            for tensor in scales.values() or caches:
                tensor[spare] = torch.nan
        starts = torch.tensor([0, *queries]).cumsum(0).int().to(device)
        lengths = torch.tensor(_LENGTHS).int().to(device)
        q = numbers(sum(queries), shapes.heads, shapes.head_dim)
        options: dict[str, Any] = {**scales, "decode_rows": len(queries) if decode else 0}
        scale = shapes.head_dim**-0.5
        tables = tables.to(device)
        found = module.paged_attention(
            q, k_cache, v_cache, tables, lengths, starts, scale, **options
        )
        return (found,)

    return case


def _draws(shapes: TrialShapes, device: torch.device) -> Case:
    """Tokens, largest logits and logprobs, of greedy rows and of drawn ones."""

    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        rows = 6
        # The logits are float32 on both sides, so that both draw the same tokens.
        logits = Numbers(device, torch.float32, torch.float32)(rows, shapes.vocab, scale=4.0)
        keys = torch.arange(rows, device=device) * 7_919 + 1
        temperature = torch.tensor(
            [0.0, 1.0, 0.7, 0.0, 1.3, 1.0], device=device, dtype=torch.float32
        )
        top_k = torch.tensor([0, 0, 40, 5, 0, 2], dtype=torch.int32, device=device)
        top_p = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.8, 1.0], device=device, dtype=torch.float32)
        filters = {
            "top_k": top_k,
            "top_p": top_p,
            "min_p": torch.zeros(rows, device=device, dtype=torch.float32),
        }
        tokens, peak, logprobs = module.sample(
            logits, keys, torch.arange(rows, device=device), temperature, **filters
        )
        return tokens, peak, logprobs

    return case


def _step_inputs(device: torch.device) -> Case:
    """A recorded step's inputs from its slots, and their positions after the step."""

    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        # Tables have room for as many calls as a measurement makes. Each call advances by a token.
        slots, groups, width = 5, 2, 64
        numbers = torch.arange(slots * groups * width, dtype=torch.int32, device=device)
        # The last slot is that of padding.
        positions = torch.tensor([0, 17, 31, 47, -1], dtype=torch.int32, device=device)
        history = torch.arange(slots * width * _BLOCK, dtype=torch.int32, device=device)
        found = module.decode_inputs(
            torch.tensor([3, 0, 4, 2], dtype=torch.int32, device=device),
            positions,
            numbers.view(slots, groups, width) * 7 % 101,
            numbers[: slots * 6].view(slots, 6),
            history.view(slots, -1),
            _BLOCK,
        )
        return *found, positions

    return case


def _kept(device: torch.device) -> Case:
    """The history, the results and the turn after a recorded step's draws."""

    def case(module: ModuleType, wanted: torch.dtype) -> tuple[torch.Tensor, ...]:
        history = torch.zeros(60, dtype=torch.int32, device=device)
        results = torch.zeros(2, 2, 4, dtype=torch.int32, device=device)
        turn = torch.ones(1, dtype=torch.int64, device=device)
        tokens, places = torch.tensor([[7, 8, 9], [50, 3, 21]], device=device)
        peaks = torch.tensor([0.5, -1.0, 3.0], device=device, dtype=torch.float32)
        module.keep_draws(tokens, peaks, places, history, results, turn)
        return history, results, turn

    return case
