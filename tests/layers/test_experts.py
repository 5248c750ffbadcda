"""The mixture of experts against a loop over tokens; the grouped products against one another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernels.compiled import recorded
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from asyncinfer.kernels import dispatch
from asyncinfer.kernels.reference.grouped_linear import grouped_linear
from asyncinfer.layers import Experts, GroupedRouter, Route, SoftmaxRouter, activation
from asyncinfer.quantization import (
    GroupedLinear,
    QuantisedWeight,
    make_grouped_linear,
    make_linear,
)
from asyncinfer.quantization.cuda_packed import PackedGrouped
from asyncinfer.quantization.dense import DenseLinear
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
    for layer in (SeparateLinears(weight, b, "plain"), DenseGrouped(weight, b)):
        torch.testing.assert_close(layer(x, ends), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 300])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("routed_by_groups", [False, True])
def test_on_a_gpu_the_host_waits_for_nothing(
    tokens: int, int8: bool, routed_by_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without values: whatever asks for one, or for a shape that hangs on one, is refused.
    Kernels of our own are launched with sizes that the host knows."""

    monkeypatch.setattr(dispatch, "has_triton_kernel", lambda *_: True)
    with FakeTensorMode(), recorded() as launches:
        logits = DenseLinear(torch.empty(8, HIDDEN, dtype=torch.bfloat16), None)
        route: Route = SoftmaxRouter(logits, 2, True)
        if routed_by_groups:
            route = GroupedRouter(
                logits,
                2,
                True,
                sigmoid=True,
                groups=4,
                active_groups=2,
                group_best=2,
                correction=torch.empty(8),
                scale=1.5,
            )
        layers: list[GroupedLinear] = []
        for shape in ((8, 2 * SIZE, HIDDEN), (8, HIDDEN, SIZE)):
            if int8:
                numbers, scales = torch.empty(shape, dtype=torch.int8), torch.empty(*shape[:2], 1)
                packed = QuantisedWeight(numbers, scales, None, torch.bfloat16)
                layers.append(PackedGrouped(packed, None))
            else:
                layers.append(DenseGrouped(torch.empty(shape, dtype=torch.bfloat16), None))
        up, down = layers
        gate = activation("silu", gated=True)
        experts = Experts(route, up, gate, down, torch.arange(8))
        x = torch.empty(tokens, HIDDEN, dtype=torch.bfloat16)
        assert experts(x).shape == x.shape
        weight = torch.empty(8, 4, HIDDEN, dtype=x.dtype)
        ends = torch.empty(8, dtype=torch.int32)
        assert grouped_linear(x, weight, ends).shape == (tokens, 4)
        with pytest.raises(DataDependentOutputException):
            ends.tolist()
    kind = "grouped_gemv" if tokens == 1 else "grouped_gemm"
    assert [launch.name for launch in launches if "grouped" in launch.name] == [kind, kind]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [1, 40])
def test_on_a_gpu(tokens: int, numbers: torch.Generator) -> None:
    """As on a CPU, and recorded as a CUDA graph."""
    router = torch.randn(COUNT, HIDDEN, generator=numbers)
    up = torch.randn(COUNT, 2 * SIZE, HIDDEN, generator=numbers) / 4
    down = torch.randn(COUNT, HIDDEN, SIZE, generator=numbers) / 4
    x = torch.randn(tokens, HIDDEN, generator=numbers)

    def made(device: str) -> Experts:
        return Experts(
            SoftmaxRouter(DenseLinear(router.to(device), None), 2, True),
            make_grouped_linear(up.to(device)),
            activation("silu", gated=True),
            make_grouped_linear(down.to(device)),
            torch.arange(COUNT, device=device),
        )

    right, experts, there = made("cpu")(x), made("cuda"), x.cuda()
    torch.testing.assert_close(experts(there).cpu(), right, rtol=1e-4, atol=1e-4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = experts(there)
    there.copy_(x.flip(0))
    graph.replay()
    torch.testing.assert_close(got.cpu(), right.flip(0), rtol=1e-4, atol=1e-4)
