"""The mixture of experts against a loop over tokens; the grouped products against one another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from asyncinfer.kernels.reference.grouped_linear import grouped_linear
from asyncinfer.layers import Experts, SoftmaxRouter, activation
from asyncinfer.quantization import make_grouped_linear, make_linear
from asyncinfer.quantization.grouped import DenseGrouped, SeparateLinears

COUNT, HIDDEN, SIZE = 6, 16, 24


@pytest.fixture
def numbers() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("active", [1, 2, COUNT])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_is_the_sum_over_each_tokens_experts(
    normalise: bool, active: int, tokens: int, numbers: torch.Generator
) -> None:
    router = torch.randn(COUNT, HIDDEN, generator=numbers)
    up = torch.randn(COUNT, 2 * SIZE, HIDDEN, generator=numbers)
    down = torch.randn(COUNT, HIDDEN, SIZE, generator=numbers)
    x = torch.randn(tokens, HIDDEN, generator=numbers)
    experts = Experts(
        SoftmaxRouter(make_linear(router.clone()), active, normalise),
        make_grouped_linear(up),
        activation("silu", gated=True),
        make_grouped_linear(down),
        torch.arange(COUNT),
    )
    got = experts(x)
    for token, row in enumerate(x):
        chances = (router @ row).softmax(0)
        best = chances.argsort(descending=True)[:active].tolist()
        total = sum(chances[e] for e in best) if normalise else 1.0
        right = torch.zeros(HIDDEN)
        for e in best:
            gate, value = (up[e] @ row).split(SIZE)
            right += chances[e] / total * (down[e] @ (F.silu(gate) * value))
        torch.testing.assert_close(got[token], right, rtol=1e-4, atol=1e-3)


def test_a_token_does_not_depend_on_its_batch(numbers: torch.Generator) -> None:
    experts = Experts(
        SoftmaxRouter(make_linear(torch.randn(COUNT, HIDDEN, generator=numbers)), 2, True),
        make_grouped_linear(torch.randn(COUNT, 2 * SIZE, HIDDEN, generator=numbers)),
        activation("gelu", gated=True),
        make_grouped_linear(torch.randn(COUNT, HIDDEN, SIZE, generator=numbers)),
        torch.arange(COUNT),
    )
    x = torch.randn(30, HIDDEN, generator=numbers)
    together, alone = experts(x), torch.cat([experts(row) for row in x.split(1)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "counts", [[4, 0, 3, 0, 0, 2], [0, 0, 0, 0, 0, 9], [9, 0, 0, 0, 0, 0], [1, 2, 1, 2, 1, 2]]
)
def test_grouped_products_agree(bias: bool, counts: list[int], numbers: torch.Generator) -> None:
    weight = torch.randn(COUNT, SIZE, HIDDEN, generator=numbers)
    b = torch.randn(COUNT, SIZE, generator=numbers) if bias else None
    x = torch.randn(9, HIDDEN, generator=numbers)
    ends = torch.tensor(counts).cumsum(0).int()
    right = grouped_linear(x, weight, ends, b)
    of = torch.repeat_interleave(torch.arange(COUNT), torch.tensor(counts))
    for row, expert in enumerate(of.tolist()):
        single = F.linear(x[row], weight[expert], None if b is None else b[expert])
        torch.testing.assert_close(right[row], single, rtol=1e-5, atol=1e-5)
    for layer in (SeparateLinears(weight, b, "none"), DenseGrouped(weight, b)):
        torch.testing.assert_close(layer(x, ends), right, rtol=1e-5, atol=1e-5)


def test_without_torchs_grouped_product(
    monkeypatch: pytest.MonkeyPatch, numbers: torch.Generator
) -> None:
    monkeypatch.delattr(F, "grouped_mm", raising=False)
    weight = torch.randn(COUNT, SIZE, HIDDEN, generator=numbers)
    x, ends = torch.randn(6, HIDDEN, generator=numbers), torch.arange(1, 7).int()
    assert torch.equal(DenseGrouped(weight, None)(x, ends), grouped_linear(x, weight, ends))
