"""Linear layers for few tokens against float64, and as machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.compiled import recorded
from kernels.targets import ONE_DTYPE, Target

from asyncinfer.kernels import ops, triton
from asyncinfer.kernels.linear_tiles import SMALL_TOKENS, Tiles, tiles_for

GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}
#: Tokens, outputs and inputs. Tokens on both sides of every bucket where a sum is split; outputs
#: and inputs that fill no tile, for each kernel.
SHAPES = [(1, 1), (6, 7), (70, 256), (130, 300)]
PRODUCTS = [
    *((tokens, 66, 1100) for tokens in (1, 2, 3, 4, 5, 16, 17, 33, 64)),
    *((tokens, *shape) for tokens in (1, 4, 17) for shape in SHAPES),
]
#: The projections of a Llama-3.1-8B: qkv, out, gate and up, down, head.
LAYERS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]


def exact(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    x = x.double()
    if norm is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (norm.double() + plus_one)
    y = x @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if activation is not None:
        gates, ups = y.chunk(2, -1)
        y = GATES[activation](gates) * ups
    return y if residual is None else y + residual.double()


def check(target: Target, *arguments: Any, **options: Any) -> None:
    for module in (triton, ops):
        y = module.linear_small(*arguments, **options)
        assert y.dtype is target.dtype
        target.check(y, exact(*arguments, **options))


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), PRODUCTS)
def test_products(target: Target, tokens: int, outputs: int, inputs: int) -> None:
    x, weight = target.randn(tokens, inputs), target.randn(outputs, inputs) * inputs**-0.5
    check(target, x, weight)


@pytest.mark.parametrize("tokens", [1, 4, 9, 20])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 96), (34, 600)])
@pytest.mark.parametrize("target", ONE_DTYPE, indirect=True)
def test_what_comes_before_and_after(
    target: Target, tokens: int, outputs: int, inputs: int
) -> None:
    x, weight = target.randn(tokens, inputs), target.randn(outputs, inputs) * inputs**-0.5
    bias, norm = target.randn(outputs), target.randn(inputs)
    check(target, x, weight, bias)
    check(target, x, weight, norm=norm, eps=1e-2)
    check(target, x, weight, bias, norm=norm, plus_one=True, residual=target.randn(tokens, outputs))
    for activation in GATES:
        check(target, x, weight, activation=activation)
    half = target.randn(tokens, outputs // 2)
    check(target, x, weight, bias, norm=norm, activation="silu", residual=half)


@pytest.mark.parametrize("tokens", [3, 6])
def test_rows_that_lie_apart(target: Target, tokens: int) -> None:
    wide, weight = target.randn(tokens, 200), target.randn(40, 64) / 8
    x, residual = wide[:, 3:67], wide[:, 90:130]
    check(target, x, weight, residual=residual)
    check(target, target.randn(64, tokens).t(), weight)


def test_no_tokens(target: Target) -> None:
    for module in (triton, ops):
        y = module.linear_small(target.randn(0, 8), target.randn(6, 8), activation="silu")
        assert y.shape == (0, 3)


def test_programs_that_share_a_sum_leave_their_counters_at_zero(target: Target) -> None:
    x, weight = target.randn(8, 1024), target.randn(128, 1024) / 32
    arrivals = torch.zeros(2, dtype=torch.int32, device=target.device)
    assert tiles_for(128, 1024, 8, weight.element_size()).splits > 1
    first = triton.linear_small(x, weight, arrivals=arrivals)
    again = triton.linear_small(x, weight, arrivals=arrivals)
    assert not arrivals.any()
    assert torch.equal(first, again)
    assert torch.equal(first, triton.linear_small(x, weight))
    target.check(first, exact(x, weight))


@pytest.mark.parametrize("bucket", [(5, 16), (17, 32), (33, 64)])
def test_a_token_does_not_depend_on_the_others_of_its_bucket(
    target: Target, bucket: tuple[int, int]
) -> None:
    x, weight = target.randn(bucket[1], 600), target.randn(70, 600) / 25
    few = triton.linear_small(x[: bucket[0]], weight)
    assert torch.equal(few, triton.linear_small(x, weight)[: bucket[0]])


REFUSED: list[tuple[str, Callable[[], object]]] = [
    ("tokens is 65", lambda: ops.linear_small(torch.ones(65, 4), torch.ones(2, 4))),
    (
        "activation='relu'",
        lambda: ops.linear_small(torch.ones(1, 4), torch.ones(2, 4), activation="relu"),
    ),
    (
        "shapes or dtypes",
        lambda: ops.linear_small(torch.ones(1, 4), torch.ones(3, 4), activation="silu"),
    ),
    (
        "shapes or dtypes",
        lambda: ops.linear_small(
            torch.ones(1, 4), torch.ones(2, 4), arrivals=torch.zeros(0, dtype=torch.int32)
        ),
    ),
]


@pytest.mark.parametrize(("message", "call"), REFUSED)
def test_what_does_not_fit_is_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_and_cover(itemsize: int) -> None:
    shapes = [
        *LAYERS,
        *SHAPES,
        (66, 1100),
        (1024, 3072),
        (19456, 2560),
        (2560, 9728),
        (262144, 8192),
    ]
    for outputs, inputs in shapes:
        for tokens in range(1, SMALL_TOKENS + 1):
            tiles = tiles_for(outputs, inputs, tokens, itemsize)
            bucket = max(16, 1 << (tokens - 1).bit_length()) if tokens > 4 else 1
            staged = (tiles.rows + bucket) * tiles.depth * itemsize * tiles.stages
            assert staged <= 163 << 10
            assert tiles.splits == 1 or (tokens > 4 and inputs >= tiles.splits * 256)
            # One counter for every 64 outputs is enough.
            assert tiles.splits == 1 or tiles.rows >= 64
    assert tiles_for(4096, 4096, 5, 2) == tiles_for(4096, 4096, 16, 2)
    assert tiles_for(1024, 2048, 1, 2) == Tiles(rows=2, depth=256, warps=1, stages=8)


def launched(tokens: int, outputs: int, inputs: int, **options: Any) -> Any:
    x = torch.empty(tokens, inputs, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    with recorded() as launches:
        triton.linear_small(x, weight, **options)
    (launch,) = launches
    return launch


@pytest.mark.parametrize(
    ("capability", "tokens", "gated"),
    [(80, 1, True), (90, 2, False), (90, 4, True), (80, 4, False)],
)
def test_gemv_compiled(capability: int, tokens: int, gated: bool) -> None:
    norm = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    activation = "silu" if gated else None
    launch = launched(tokens, 28672, 4096, norm=norm, activation=activation)
    assert launch.name == "gemv"
    code = launch.compile(capability)
    assert code.spills == 0
    assert code.fits
    # Weights, inputs and the norm go to shared memory ahead of their use, 16 bytes a lane, and
    # nothing else is loaded or exchanged in the loop.
    assert code.count("LDGSTS.E.BYPASS.128") == code.count("LDGSTS") > 0
    assert code.count("LDG") == code.count("LDGSTS") + code.count("LDGDEPBAR")


@pytest.mark.parametrize(
    ("capability", "tokens", "outputs", "inputs", "activation"),
    [
        (80, 16, 6144, 4096, None),
        (90, 16, 4096, 14336, None),
        (90, 32, 128256, 4096, None),
        (80, 64, 4096, 4096, None),
        (80, 64, 28672, 4096, "silu"),
        (90, 64, 28672, 4096, "silu"),
    ],
)
def test_skinny_gemm_compiled(
    capability: int, tokens: int, outputs: int, inputs: int, activation: str | None
) -> None:
    arrivals = torch.empty(-(-outputs // 64), dtype=torch.int32, device="meta")
    launch = launched(tokens, outputs, inputs, activation=activation, arrivals=arrivals)
    assert launch.name == "skinny_gemm"
    code = launch.compile(capability)
    assert code.spills == 0
    assert code.fits
    instruction = "HGMMA.64x" if capability == 90 else "HMMA.16816.F32.BF16"
    assert code.count(instruction) >= 4
    assert code.count("LDGSTS.E.BYPASS.128") == code.count("LDGSTS") >= 10
    assert code.count("ATOMG") == (launch.grid[1] > 1)
