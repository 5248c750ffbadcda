"""The kernels of one decode step on random inputs, each with its answer in float64; and the
products of prompts that can be computed in two ways."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch

from asyncinfer.kernels import ops, reference
from asyncinfer.kernels.linear_tiles import SMALL_TOKENS
from asyncinfer.models import ModelConfig
from benchmarks.attention_kernels import attention_cases
from benchmarks.kernel_case import KernelCase
from benchmarks.linear_kernels import expert_cases, linear_cases, prompt_cases

__all__ = ["kernel_cases"]

#: Tokens of a prompt's product.
_PROMPT: Final = 512


def kernel_cases(
    config: ModelConfig,
    *,
    batch: int,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
) -> Iterator[KernelCase]:
    """The kernels of one decode step, made one after the other: normal inputs, weights of std
    0.02, `batch` rows that have `context` tokens each, in pages that lie apart."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        drawn = torch.empty(shape, dtype=dtype, device=device)
        return drawn.normal_(0.0, std, generator=generator)

    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    if config.experts is not None:
        yield from expert_cases(normal, generator, batch, hidden, config.experts)
        return
    yield from _norm_cases(normal(batch, hidden), normal(hidden))
    yield from _gate_cases(normal(batch, 2 * inner))
    if batch <= SMALL_TOKENS:
        qkv = (heads + 2 * kv_heads) * dim
        yield from linear_cases(normal, batch, hidden, inner, qkv, heads * dim, config.vocab_size)
    if batch == 1:
        yield from prompt_cases(normal, min(_PROMPT, context), hidden, inner)
    yield from attention_cases(normal, generator, batch, context, heads, kv_heads, dim)
    logits = normal(batch, config.vocab_size).float().mul_(3)
    yield from _sample_cases(logits)


def _norm_cases(x: torch.Tensor, weight: torch.Tensor) -> Any:
    size, eps = x.numel() * x.element_size(), 1e-5
    shape = f"{x.shape[0]} x {x.shape[1]}"
    yield KernelCase(
        "rms_norm",
        f"rms_norm {shape}",
        2 * size + weight.nbytes,
        0,
        lambda: [ops.rms_norm(x, weight, eps)],
        lambda: [reference.rms_norm(x.double(), weight.double(), eps)],
    )


def _gate_cases(gate_up: torch.Tensor) -> Iterator[KernelCase]:
    yield KernelCase(
        "silu_mul",
        f"silu_mul {gate_up.shape[0]} x {gate_up.shape[1]}",
        gate_up.nbytes * 3 // 2,
        0,
        lambda: [ops.silu_mul(gate_up)],
        lambda: [reference.silu_mul(gate_up.double())],
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
    tokens, peak, logprobs = reference.sample(logits.double(), *args, **options)
    return [tokens, peak.double(), logprobs.double()]
