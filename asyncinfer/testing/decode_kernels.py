"""The kernels of one decode step on random inputs, with their float64 twins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from asyncinfer.kernels import ops
from asyncinfer.models import ModelConfig
from asyncinfer.testing.kernel_case import KernelCase

__all__ = ["decode_kernels"]

_BLOCK = 16


def decode_kernels(
    config: ModelConfig,
    *,
    batch: int,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> Iterator[KernelCase]:
    """See `kernel_cases`."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        drawn = torch.empty(shape, dtype=dtype, device=device)
        return drawn.normal_(0.0, std, generator=generator)

    hidden, inner = config.hidden_size, config.intermediate_size
    yield from _norm_cases(normal(batch, hidden), normal(batch, hidden), normal(hidden))
    yield from _gate_cases(normal(batch, 2 * inner))
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    yield from _linear_cases(
        normal,
        batch,
        {
            "qkv": ((heads + 2 * kv_heads) * dim, hidden),
            "out": (hidden, heads * dim),
            "up": (2 * inner, hidden),
            "down": (hidden, inner),
            "head": (config.vocab_size, hidden),
        },
    )
    yield from _attention_cases(normal, generator, batch, context, heads, kv_heads, dim)
    logits = normal(batch, config.vocab_size).float().mul_(3)
    yield from _sample_cases(logits)


def _norm_cases(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    size, eps = x.numel() * x.element_size(), 1e-5
    shape = f"{x.shape[0]} x {x.shape[1]}"
    yield KernelCase(
        "rms_norm",
        f"rms_norm {shape}",
        2 * size + weight.nbytes,
        0,
        lambda: [ops.rms_norm(x, weight, eps)],
        lambda: [_reference("rms_norm", x.double(), weight.double(), eps)],
    )
    yield KernelCase(
        "add_rms_norm",
        f"add_rms_norm {shape}",
        4 * size + weight.nbytes,
        0,
        lambda: [ops.add_rms_norm(x, residual, weight, eps)[0]],
        # Of the sum as it now lies there, rounded; every run adds to it.
        lambda: [_reference("rms_norm", residual.double(), weight.double(), eps)],
    )


def _gate_cases(gate_up: torch.Tensor) -> Iterator[KernelCase]:
    yield KernelCase(
        "silu_mul",
        f"silu_mul {gate_up.shape[0]} x {gate_up.shape[1]}",
        gate_up.nbytes * 3 // 2,
        0,
        lambda: [ops.silu_mul(gate_up)],
        lambda: [_reference("silu_mul", gate_up.double())],
    )


def _linear_cases(
    normal: Callable[..., torch.Tensor], batch: int, shapes: dict[str, tuple[int, int]]
) -> Iterator[KernelCase]:
    if batch > 64:
        return
    for name, (outputs, inputs) in shapes.items():
        x, weight = normal(batch, inputs), normal(outputs, inputs, std=0.02)
        yield KernelCase(
            "linear_small",
            f"linear_small {name} {batch} x {inputs} -> {outputs}",
            x.nbytes + weight.nbytes + batch * outputs * x.element_size(),
            2 * batch * inputs * outputs,
            partial(_linear, x, weight),
            partial(_exact_linear, x, weight),
        )


def _linear(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    return [ops.linear_small(x, weight)]


def _exact_linear(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    return [x.double() @ weight.double().t()]


def _attention_cases(
    normal: Callable[..., torch.Tensor],
    generator: torch.Generator,
    batch: int,
    context: int,
    heads: int,
    kv_heads: int,
    dim: int,
) -> Iterator[KernelCase]:
    pages = -(-(context + 1) // _BLOCK)
    k_cache, v_cache = (normal(batch * pages, kv_heads, _BLOCK, dim) for _ in range(2))
    device = k_cache.device
    order = torch.randperm(batch * pages, generator=generator, device=device)
    tables = order.to(torch.int32).view(batch, pages)
    positions = torch.full((batch,), context, dtype=torch.int64, device=device)
    slots = tables[:, context // _BLOCK].long() * _BLOCK + context % _BLOCK
    qkv = normal(batch, heads + 2 * kv_heads, dim)
    angles = positions[:, None, None] * torch.logspace(0, -4, dim // 2, device=device)
    cos = torch.cat((angles.cos(), angles.cos()), -1).float()
    sin = torch.cat((-angles.sin(), angles.sin()), -1).float()
    norm = normal(dim)

    def rope_kv_write() -> list[torch.Tensor]:
        q = ops.rope_kv_write(qkv, cos, sin, k_cache, v_cache, slots, q_norm=norm, k_norm=norm)
        at = (slots // _BLOCK, slice(None), slots % _BLOCK)
        return [q, k_cache[at], v_cache[at]]

    def exact_rope() -> list[torch.Tensor]:
        q, k, v = torch.split(qkv.double(), [heads, kv_heads, kv_heads], dim=1)
        turned = []
        for x in (q, k):
            x = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
            swapped = torch.cat(tuple(reversed(x.chunk(2, -1))), -1)
            turned.append(x * cos.double() + swapped * sin.double())
        return [*turned, v]

    row = f"{batch} x {heads}/{kv_heads} x {dim}"
    yield KernelCase(
        "rope_kv_write",
        f"rope_kv_write {row}",
        2 * qkv.nbytes + cos.nbytes + sin.nbytes,
        0,
        rope_kv_write,
        exact_rope,
    )
    q = normal(batch, heads, dim)
    lengths = torch.full((batch,), context + 1, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def exact_attention() -> list[torch.Tensor]:
        rows = []
        for row in range(batch):
            its = tables[row].long()
            k, v = (
                cache[its].double().transpose(0, 1).reshape(kv_heads, -1, dim)[:, : context + 1]
                for cache in (k_cache, v_cache)
            )
            queries = q[row].double().view(kv_heads, heads // kv_heads, dim)
            scores = (queries @ k.transpose(1, 2)) * dim**-0.5
            rows.append((scores.softmax(-1) @ v).view(heads, dim))
        return [torch.stack(rows)]

    read = 2 * batch * (context + 1) * kv_heads * dim * q.element_size()
    yield KernelCase(
        "paged_attention",
        f"paged_attention {row}, context {context}",
        read + 2 * q.nbytes + tables.nbytes,
        4 * batch * heads * (context + 1) * dim,
        lambda: [
            ops.paged_attention(
                q, k_cache, v_cache, tables, lengths, starts, dim**-0.5, decode_rows=batch
            )
        ],
        exact_attention,
    )


def _sample_cases(logits: torch.Tensor) -> Iterator[KernelCase]:
    rows, vocab = logits.shape
    device = logits.device
    seeds = torch.arange(rows, device=device) * 0x9E3779B9 + 7
    positions = torch.arange(rows, device=device)

    def option(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    keys = (seeds, positions, option(0.8))
    filters = {"top_k": option(50, torch.int32), "top_p": option(0.95), "min_p": option(0.01)}
    cases: list[tuple[str, tuple[torch.Tensor, ...], dict[str, Any]]] = [
        ("greedy", (), {}),
        ("temperature", keys, {}),
        ("top-k, top-p, min-p", keys, filters),
    ]
    for title, args, options in cases:
        yield KernelCase(
            "sample",
            f"sample {title} {rows} x {vocab}",
            logits.nbytes,
            0,
            partial(ops.sample, logits, *args, **options),
            partial(_exact_sample, logits, args, options),
        )


def _exact_sample(
    logits: torch.Tensor, args: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> list[torch.Tensor]:
    tokens, peak, logprobs = ops.sample(logits.double(), *args, **options, reference=True)
    return [tokens, peak.double(), logprobs.double()]


def _reference(name: str, *args: Any) -> torch.Tensor:
    result: torch.Tensor = getattr(ops, name)(*args, reference=True)
    return result
