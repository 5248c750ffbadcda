"""The matrix products of a decode step, as its layers ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from asyncinfer.kernels import ops
from asyncinfer.models.parts import ExpertsConfig
from asyncinfer.quantization import CudaLinear
from asyncinfer.quantization.int8 import quantised
from benchmarks.kernel_case import KernelCase

__all__ = ["expert_cases", "linear_cases", "prompt_cases"]

_EPS = 1e-5

Normal = Callable[..., torch.Tensor]


def linear_cases(
    normal: Normal, batch: int, hidden: int, inner: int, qkv: int, attended: int, vocab: int
) -> Iterator[KernelCase]:
    """Each with the norm before it, or the gate or residual after it; those of the feed-forward
    layer in 8 bits, too."""
    for name, outputs, inputs, part in (
        ("qkv", qkv, hidden, "norm"),
        ("out", hidden, attended, "residual"),
        ("up", 2 * inner, hidden, "gate"),
        ("down", hidden, inner, "residual"),
        ("head", vocab, hidden, "norm"),
    ):
        x, weight = normal(batch, inputs), normal(outputs, inputs, std=0.02)
        options: dict[str, Any] = {}
        if part == "residual":
            options["residual"] = normal(batch, outputs)
        else:
            options |= {"norm": normal(inputs), "eps": _EPS}
        if part == "gate":
            options["activation"] = "silu"
        for kind in ("", "int8 ") if name in ("up", "down") else ("",):
            scales = None
            if kind:
                weight, scales = quantised(weight)
            arrivals = torch.zeros(-(-outputs // 64), dtype=torch.int32, device=x.device)
            results = batch * (outputs // 2 if part == "gate" else outputs) * x.element_size()
            moved = [
                x,
                weight,
                *(tensor for tensor in (*options.values(), scales) if _tensor(tensor)),
            ]
            yield KernelCase(
                "linear_small",
                f"linear_small {kind}{name} {batch} x {inputs} -> {outputs}",
                sum(tensor.nbytes for tensor in moved) + results,
                2 * batch * inputs * outputs,
                partial(_linear, x, weight, scales=scales, arrivals=arrivals, **options),
                partial(_exact_linear, x, weight, scales, **options),
            )


def prompt_cases(normal: Normal, tokens: int, hidden: int, inner: int) -> Iterator[KernelCase]:
    """The int8 product of a prompt's tokens in both ways that there are: by a copy of the weight in
    floats, as the layer computes it, and by the kernel of a mixture with one expert, which reads
    the weight as it is."""
    x = normal(tokens, hidden)
    weight, scales = quantised(normal(2 * inner, hidden, std=0.02))
    layer = CudaLinear(weight, None, scales)
    ends = torch.full((1,), tokens, dtype=torch.int32, device=x.device)
    ways: dict[str, Callable[[], list[torch.Tensor]]] = {
        "by a copy": lambda: [layer.product(x)],
        "as it is": partial(_grouped, x, weight[None], ends, scales[None]),
    }
    for way, run in ways.items():
        yield KernelCase(
            "int8_product",
            f"int8 product {way} {tokens} x {hidden} -> {2 * inner}",
            x.nbytes + weight.nbytes + scales.nbytes + tokens * 2 * inner * x.element_size(),
            2 * tokens * hidden * 2 * inner,
            run,
            lambda: [x.double() @ _restored(weight, scales).t()],
        )


def expert_cases(
    normal: Normal, generator: torch.Generator, batch: int, hidden: int, experts: ExpertsConfig
) -> Iterator[KernelCase]:
    """Both products of a mixture's layer, for tokens whose experts were drawn at random."""
    count, active, size = experts.count, experts.active, experts.intermediate_size
    device = generator.device
    shares = torch.rand(batch, count, generator=generator, device=device)
    chosen = shares.topk(active, dim=1).indices.flatten().sort().values
    ends = torch.searchsorted(
        chosen, torch.arange(count, device=device), right=True, out_int32=True
    )
    used = len(set(chosen.tolist()))
    rows = batch * active
    for name, outputs, inputs in (("up", 2 * size, hidden), ("down", hidden, size)):
        x, weight = normal(rows, inputs), normal(count, outputs, inputs, std=0.02)
        for kind in ("", "int8 "):
            scales = None
            if kind:
                weight, scales = quantised(weight)
            expert_bytes = weight[0].nbytes + (0 if scales is None else scales[0].nbytes)
            yield KernelCase(
                "grouped_linear",
                f"grouped_linear {kind}{name} {batch} x {active} of {count}, {inputs} -> {outputs}",
                used * expert_bytes + x.nbytes + rows * outputs * x.element_size(),
                2 * rows * inputs * outputs,
                partial(_grouped, x, weight, ends, scales),
                partial(_exact_grouped, x, weight, chosen, scales),
            )


def _tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _linear(x: torch.Tensor, weight: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return [ops.linear_small(x, weight, **options)]


def _exact_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = _EPS,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    exact = x.double()
    if norm is not None:
        exact = exact / (exact.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    exact = exact @ _restored(weight, scales).t()
    if activation is not None:
        gate, up = exact.chunk(2, dim=-1)
        exact = gate * gate.sigmoid() * up
    return [exact if residual is None else exact + residual.double()]


def _grouped(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, scales: torch.Tensor | None
) -> list[torch.Tensor]:
    return [ops.grouped_linear(x, weight, ends, scales=scales)]


def _exact_grouped(
    x: torch.Tensor, weight: torch.Tensor, chosen: torch.Tensor, scales: torch.Tensor | None
) -> list[torch.Tensor]:
    rows = [
        _restored(weight[expert], None if scales is None else scales[expert]) @ row.double()
        for row, expert in zip(x, chosen.tolist(), strict=True)
    ]
    return [torch.stack(rows)]


def _restored(weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    exact = weight.double()
    return exact if scales is None else exact * scales.double()[:, None]
