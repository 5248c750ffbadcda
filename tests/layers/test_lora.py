"""Adapters grouped by the host against the operator's plain form, in every kind of batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.native import lora_kernel
from asyncinfer.layers import GroupedLoraRows, LoraLinear, LoraWeights

SIZES = (24, 8, 8)
RANKS = [4, 0, 7, 1, 2, 7]
BATCHES = {
    "one": [2],
    "none": [-1, -1, -1],
    "one-adapter": [3] * 12,
    "each-its-own": [5, 0, 2, 3, 4, 1],
    "uneven": [0, 0, 0, 0, 0, 5, 5, -1, 2],
    "far-apart": [0, 5, 0, 5],
    "prompts": [0, 3, -1, *[2] * 20, *[4] * 9, *[5] * 7],
    "long-prompts": [1, *[2] * 40, 0, -1, *[5] * 33, 2],
    "nobody-changes-it": [1, 1, -1],
}


@pytest.fixture
def weights(seed: int) -> LoraWeights:
    torch.manual_seed(seed)
    most, slots = max(RANKS), len(RANKS)
    down, up = torch.zeros(slots, most * 3, 20), torch.zeros(slots, most, sum(SIZES))
    for slot, rank in enumerate(RANKS):
        down[slot, : rank * 3] = torch.randn(rank * 3, 20)
        up[slot, :rank] = torch.randn(rank, sum(SIZES))
    ranks = torch.tensor(RANKS, dtype=torch.int32)
    return LoraWeights(down=down, up=up, sizes=SIZES, ranks=ranks, host_ranks=list(RANKS))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_products(weights: LoraWeights, batch: str, apart: bool, native: bool) -> None:
    kernel = lora_kernel(torch.float32) if native else None
    if native and kernel is None:
        pytest.skip("no kernel for this machine")
    slots = np.array(BATCHES[batch])
    x, y = torch.randn(len(slots), 20), torch.randn(len(slots), sum(SIZES))
    there = torch.from_numpy(slots).int()
    right = ops.lora_add(y.clone(), x, weights.down, weights.up, weights.ranks, there, sizes=SIZES)
    rows = GroupedLoraRows({"a": weights}, slots, kernel=kernel, apart=apart)
    got = y.clone()
    rows.add("a", x, got)
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    for first in range(0, len(slots), 5):
        part = y[first : first + 5].clone()
        rows.part(first, first + 5).add("a", x[first : first + 5], part)
        torch.testing.assert_close(part, right[first : first + 5], rtol=1e-5, atol=1e-5)
    rows.add("another layer", x, got)
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_a_linear_layer_with_and_without(weights: LoraWeights) -> None:
    base = torch.randn(sum(SIZES), 20)
    layer = LoraLinear(lambda x: x @ base.t(), "a")
    x = torch.randn(3, 20)
    plain = layer(x)
    assert torch.equal(plain, x @ base.t())
    changed = layer(x, GroupedLoraRows({"a": weights}, np.array([0, -1, 2])))
    assert torch.equal(changed[1], plain[1])
    assert (changed[0] - plain[0]).abs().max() > 0.1
