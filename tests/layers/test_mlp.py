"""The gated feed-forward layer, in tiles and whole."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncinfer.layers import GatedMLP
from asyncinfer.quantization import make_linear


def test_tiles_change_nothing() -> None:
    torch.manual_seed(0)
    gate, up, down = torch.randn(24, 16), torch.randn(24, 16), torch.randn(16, 24)
    mlp = GatedMLP(make_linear(torch.cat((gate, up))), make_linear(down), 24)
    x = torch.randn(300, 16)
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)
    mlp.tile = 128
    torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-4)
