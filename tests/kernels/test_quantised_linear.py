"""Linear layers of quantised weights against float64, and as machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.compiled import Launch, recorded
from kernels.targets import Target

from asyncinfer.kernels import ops, triton
from asyncinfer.kernels.linear_tiles import SMALL_TOKENS, tiles_for

INT4 = tuple(float(number) for number in range(16))
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FOUR_BITS = {"int4": INT4, "e2m1": E2M1, "iq4": IQ4}
CODES = (*FOUR_BITS, "int8", "e4m3")


class Weight:
    """A random one, `[*shape]` inputs last, in its own format and as float64."""

    def __init__(
        self, target: Target, shape: tuple[int, ...], group: int, code: str, offset: bool = True
    ) -> None:
        if code in FOUR_BITS:
            codes = torch.randint(16, shape, device=target.device)
            self.packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8).contiguous()
            table = torch.tensor(FOUR_BITS[code], dtype=torch.float64, device=target.device)
            numbers = table[codes]
        else:
            codes = torch.randint(-128, 128, shape, device=target.device).to(torch.int8)
            if code == "e4m3":
                # NaN is of no use.
                codes = torch.where((codes & 127) == 127, 0, codes)
            self.packed = codes
            numbers = (codes.view(torch.float8_e4m3fn) if code == "e4m3" else codes).double()
        groups = (*shape[:-1], shape[-1] // group)
        largest = float(numbers.abs().max()) * shape[-1] ** 0.5
        self.scales = (torch.rand(groups, device=target.device) + 0.5) / largest
        if code == "e2m1":
            # Powers of two, as MXFP4 has them, in a byte.
            self.scales = self.scales.to(torch.float8_e8m0fnu)
        self.offsets = None
        exact = numbers.unflatten(-1, (groups[-1], group)) * self.scales.double()[..., None]
        if offset:
            scales = self.scales.float()
            self.offsets = (-8 * scales + torch.rand_like(scales) / 64).half()
            exact = exact + self.offsets.double()[..., None]
        self.exact = exact.flatten(-2)
        self.options: dict[str, Any] = {
            "scales": self.scales,
            "offsets": self.offsets,
            "code": code,
        }


#: Outputs, inputs, group, code: none fills a tile; whole rows; groups of several lengths, one of
#: which spans tiles.
SHAPES = [
    (1, 32, 32, "int4"),
    (6, 96, 96, "e2m1"),
    (70, 512, 32, "e2m1"),
    (66, 1152, 128, "int4"),
    (34, 2048, 1024, "int4"),
    (34, 96, 32, "iq4"),
    (6, 64, 16, "int8"),
    (66, 640, 128, "e4m3"),
    (5, 77, 77, "e4m3"),
]
#: The codes that some formats give offsets.
WITH_OFFSETS = ("int4", "int8")


@pytest.mark.parametrize("tokens", [1, 2, 3, 33])
@pytest.mark.parametrize(("outputs", "inputs", "group", "code"), SHAPES)
def test_products(
    target: Target, tokens: int, outputs: int, inputs: int, group: int, code: str
) -> None:
    x = target.randn(tokens, inputs)
    weight = Weight(target, (outputs, inputs), group, code, offset=code in WITH_OFFSETS)
    for module in (triton, ops):
        y = module.linear_small(x, weight.packed, **weight.options)
        assert y.dtype is target.dtype
        target.check(y, x.double() @ weight.exact.T)


@pytest.mark.parametrize("tokens", [1, 9])
def test_what_comes_before_and_after(target: Target, tokens: int) -> None:
    x, norm = target.randn(tokens, 640), target.randn(640)
    weight = Weight(target, (70, 640), 64, "int4")
    bias, added = target.randn(70), target.randn(tokens, 70)
    exact = x.double() @ weight.exact.T + bias.double()
    gates, ups = exact.chunk(2, -1)
    normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    for module in (triton, ops):

        def product(**options: Any) -> torch.Tensor:
            result: torch.Tensor = module.linear_small(  # noqa: B023
                x, weight.packed, **weight.options, **options
            )
            return result

        target.check(product(bias=bias, residual=added), exact + added.double())
        gated = torch.nn.functional.silu(gates) * ups
        target.check(product(bias=bias, activation="silu"), gated)
        target.check(product(norm=norm), normed @ weight.exact.T)


@pytest.mark.parametrize("counts", [[3, 0, 1, 0, 4], [5, 16, 0, 1, 17]], ids=str)
@pytest.mark.parametrize("code", CODES)
def test_experts(target: Target, counts: list[int], code: str) -> None:
    ends = torch.tensor(counts, device=target.device).cumsum(0).int()
    weight = Weight(target, (len(counts), 70, 160), 32, code, offset=code in WITH_OFFSETS)
    x, bias = target.randn(sum(counts), 160), target.randn(len(counts), 70)
    of = (torch.arange(len(x), device=x.device)[:, None] >= ends[None, :]).sum(1)
    parts = [
        weight.exact[e] @ row + bias[e].double() for row, e in zip(x.double(), of, strict=True)
    ]
    for module in (triton, ops):
        y = module.grouped_linear(x, weight.packed, ends, bias, **weight.options)
        target.check(y, torch.stack(parts))


FOUR = torch.zeros(3, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("weight", "options"),
    [
        (FOUR, {"scales": None}),
        (FOUR.int(), {}),
        (FOUR[:, :16], {}),
        (FOUR, {"scales": torch.ones(2, 2)}),
        (FOUR, {"scales": torch.ones(3, 3)}),
        (FOUR, {"scales": torch.ones(3, 8)}),
        (FOUR, {"scales": torch.ones(3, 2, dtype=torch.int32)}),
        (FOUR, {"offsets": torch.ones(3, 1)}),
        (FOUR, {"code": None, "offsets": torch.ones(3, 2)}),
    ],
)
def test_what_does_not_fit_is_refused(weight: torch.Tensor, options: dict[str, Any]) -> None:
    given = {"scales": torch.ones(3, 2), "code": "int4"} | options
    with pytest.raises(ValueError, match="kernel linear_small: shapes or dtypes"):
        ops.linear_small(torch.ones(2, 64), weight, **given)


def test_an_unknown_code_is_refused() -> None:
    with pytest.raises(ValueError, match="code='nf4': must be one of int4, e2m1, iq4"):
        ops.linear_small(torch.ones(2, 64), FOUR, scales=torch.ones(3, 2), code="nf4")


def test_tiles_fit() -> None:
    for outputs, inputs in [(6144, 4096), (28672, 4096), (4096, 14336), (1024, 2048)]:
        for tokens in range(1, SMALL_TOKENS + 1):
            tiles = tiles_for(outputs, inputs, tokens, 0.5)
            bucket = max(16, 1 << (tokens - 1).bit_length()) if tokens > 2 else tokens
            # The weight may be kept as its numbers in the dtype of the inputs.
            assert (tiles.rows / 2 + 2 * bucket) * tiles.depth * tiles.stages <= 163 << 10


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launched(tokens: int, outputs: int, inputs: int, group: int, **options: Any) -> Launch:
    with recorded() as launches:
        triton.linear_small(
            meta(tokens, inputs),
            meta(outputs, inputs // 2, dtype=torch.uint8),
            scales=meta(outputs, inputs // group),
            code=options.pop("code", "int4"),
            **options,
        )
    (launch,) = launches
    return launch


CASES = [
    (80, 1, 28672, 4096, 32, "int4", "silu"),
    (90, 2, 4096, 4096, 128, "int4", None),
    (80, 3, 6144, 4096, 32, "int4", None),
    (90, 16, 4096, 14336, 128, "int4", None),
    (90, 64, 28672, 4096, 32, "int4", "silu"),
    (80, 16, 5760, 2880, 32, "e2m1", None),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled(case: tuple[Any, ...]) -> None:
    capability, tokens, outputs, inputs, group, code, activation = case
    arrivals = meta(-(-outputs // 64), dtype=torch.int32)
    offsets = meta(outputs, inputs // group) if code == "int4" else None
    launch = launched(
        tokens,
        outputs,
        inputs,
        group,
        code=code,
        offsets=offsets,
        activation=activation,
        arrivals=arrivals,
    )
    assert launch.name == ("gemv" if tokens <= 2 else "skinny_gemm")
    machine = launch.compile(capability)
    assert machine.spills == 0
    assert machine.fits
    if tokens > 2:
        instruction = "HGMMA.64x" if capability == 90 else "HMMA.16816.F32.BF16"
        assert machine.count(instruction) >= 2
    # The weight goes past the registers while earlier inputs are computed.
    assert machine.count("LDGSTS") >= 2
