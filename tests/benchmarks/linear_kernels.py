"""The matrix products of a decode step, as its layers ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from asyncinfer.kernels import ops
from asyncinfer.models.parts import ExpertsConfig
from asyncinfer.quantization.cuda_packed import CudaPackedLinear
from asyncinfer.quantization.fp8 import in_e4m3
from asyncinfer.quantization.int4 import quantised_4_bits
from asyncinfer.quantization.int8 import in_8_bits
from asyncinfer.quantization.weight import QuantisedWeight
from benchmarks.kernel_case import KernelCase

__all__ = ["expert_cases", "linear_cases", "prompt_cases"]

_EPS = 1e-5

#: What a weight is made of floats `[out, in]`, by what a case is called.
_FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor | QuantisedWeight]] = {
    "": lambda floats: floats,
    "int8 ": in_8_bits,
    "fp8 ": in_e4m3,
    "int4 ": lambda floats: quantised_4_bits(floats, 32),
}

Normal = Callable[..., torch.Tensor]


def linear_cases(
    normal: Normal, batch: int, hidden: int, inner: int, qkv: int, attended: int, vocab: int
) -> Iterator[KernelCase]:
    """Each with the norm before it, or the gate or residual after it; those of the feed-forward
    layer quantised, too."""
    for name, outputs, inputs, part in (
        ("qkv", qkv, hidden, "norm"),
        ("out", hidden, attended, "residual"),
        ("up", 2 * inner, hidden, "gate"),
        ("down", hidden, inner, "residual"),
        ("head", vocab, hidden, "norm"),
    ):
        x, floats = normal(batch, inputs), normal(outputs, inputs, std=0.02)
        options: dict[str, Any] = {}
        if part == "residual":
            options["residual"] = normal(batch, outputs)
        else:
            options |= {"norm": normal(inputs), "eps": _EPS}
        if part == "gate":
            options["activation"] = "silu"
        for kind in _FORMATS if name in ("up", "down") else ("",):
            weight = _FORMATS[kind](floats)
            given = _given(weight)
            arrivals = torch.zeros(-(-outputs // 64), dtype=torch.int32, device=x.device)
            results = batch * (outputs // 2 if part == "gate" else outputs) * x.element_size()
            moved = [x, *(t for t in (*options.values(), *given.values()) if _tensor(t))]
            yield KernelCase(
                "linear_small",
                f"linear_small {kind}{name} {batch} x {inputs} -> {outputs}",
                sum(tensor.nbytes for tensor in moved) + results,
                2 * batch * inputs * outputs,
                partial(_linear, x, arrivals=arrivals, **given, **options),
                partial(_exact_linear, x, weight, **options),
            )


def prompt_cases(normal: Normal, tokens: int, hidden: int, inner: int) -> Iterator[KernelCase]:
    """The int8 product of a prompt's tokens in both ways that there are: by a copy of the weight in
    floats, and by the kernel of a mixture with one expert, which reads the weight as it is, as the
    layer computes it."""
    x = normal(tokens, hidden)
    weight = in_8_bits(normal(2 * inner, hidden, std=0.02))
    layer = CudaPackedLinear(weight, None)
    ways: dict[str, Callable[[], list[torch.Tensor]]] = {
        "by a copy": lambda: [F.linear(x, weight.numbers.to(x.dtype)).mul_(weight.scales.view(-1))],
        "as it is": lambda: [layer.product(x)],
    }
    for way, run in ways.items():
        yield KernelCase(
            "int8_product",
            f"int8 product {way} {tokens} x {hidden} -> {2 * inner}",
            x.nbytes + weight.nbytes + tokens * 2 * inner * x.element_size(),
            2 * tokens * hidden * 2 * inner,
            run,
            lambda: [x.double() @ _restored(weight).t()],
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
        x, floats = normal(rows, inputs), normal(count, outputs, inputs, std=0.02)
        for kind in ("", "int8 "):
            weight = _FORMATS[kind](floats)
            given = _given(weight)
            expert_bytes = sum(t[0].nbytes for t in given.values() if _tensor(t))
            yield KernelCase(
                "grouped_linear",
                f"grouped_linear {kind}{name} {batch} x {active} of {count}, {inputs} -> {outputs}",
                used * expert_bytes + x.nbytes + rows * outputs * x.element_size(),
                2 * rows * inputs * outputs,
                partial(_grouped, x, ends=ends, **given),
                partial(_exact_grouped, x, weight, chosen),
            )


def _tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _given(weight: torch.Tensor | QuantisedWeight) -> dict[str, Any]:
    """The arguments of a product by which its kernel gets the weight."""
    if isinstance(weight, torch.Tensor):
        return {"weight": weight}
    return {
        "weight": weight.numbers,
        "scales": weight.scales,
        "offsets": weight.offsets,
        "code": weight.named,
    }


def _linear(x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return [ops.linear_small(x, **options)]


def _exact_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantisedWeight,
    *,
    norm: torch.Tensor | None = None,
    eps: float = _EPS,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    exact = x.double()
    if norm is not None:
        exact = exact / (exact.pow(2).mean(-1, keepdim=True) + eps).sqrt() * norm.double()
    exact = exact @ _restored(weight).t()
    if activation is not None:
        gate, up = exact.chunk(2, dim=-1)
        exact = gate * gate.sigmoid() * up
    return [exact if residual is None else exact + residual.double()]


def _grouped(x: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    return [ops.grouped_linear(x, **options)]


def _exact_grouped(
    x: torch.Tensor, weight: torch.Tensor | QuantisedWeight, chosen: torch.Tensor
) -> list[torch.Tensor]:
    rows = [
        _restored(weight[expert]) @ row.double()
        for row, expert in zip(x, chosen.tolist(), strict=True)
    ]
    return [torch.stack(rows)]


def _restored(weight: torch.Tensor | QuantisedWeight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight.double()
    return weight.dequantised(torch.float64)
