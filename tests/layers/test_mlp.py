"""The feed-forward layer, in tiles and whole; its activations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from asyncinfer.layers import ACTIVATIONS, MLP, LoraLinear, activation, learned
from asyncinfer.quantization import make_linear


def test_tiles_change_nothing() -> None:
    torch.manual_seed(0)
    gate, up, down = torch.randn(24, 16), torch.randn(24, 16), torch.randn(16, 24)
    mlp = MLP(
        LoraLinear(make_linear(torch.cat((gate, up))), "up"),
        activation("silu", gated=True),
        LoraLinear(make_linear(down), "down"),
    )
    # Within a tile, to its end, and beyond it.
    for tokens in (255, 256, 257, 600):
        x = torch.randn(tokens, 16)
        expected = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name: str) -> None:
    theirs = ACT2FN[name]
    with_weights = learned(name)
    names = () if with_weights is None else (weight for weight, _ in with_weights.weights)
    weights = [getattr(theirs, weight.rpartition(".")[2]).detach().float() for weight in names]
    theirs = theirs.float() if weights else theirs
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(1)) * 3
    torch.testing.assert_close(
        activation(name, gated=False, weights=weights)(x), theirs(x), rtol=1e-5, atol=1e-6
    )
    gated = theirs(x[:, :12]) * x[:, 12:]
    torch.testing.assert_close(
        activation(name, gated=True, weights=weights)(x), gated, rtol=1e-5, atol=1e-6
    )
