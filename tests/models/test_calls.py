"""What the generality of the decoder costs a plain layer: not one call."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import Sequences, load, random_llama
from torch.utils._python_dispatch import TorchDispatchMode

from asyncinfer.attention import gathered
from asyncinfer.kernels.native import BlockedWeight, between


class Calls(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def test_operators_of_a_plain_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step of a layer more calls these operators more; views are free. Where there is
    native code, little of it is operators of torch."""
    monkeypatch.setattr(gathered, "native_rows", lambda *_: None)
    monkeypatch.setattr(BlockedWeight, "most_rows", 0)
    monkeypatch.setattr(between, "_kernels", lambda _: None)
    counts = []
    for layers in (2, 3):
        decoder = load(random_llama(num_hidden_layers=layers), tmp_path / str(layers))
        run = Sequences(decoder, [torch.arange(30)] * 2)
        run.step(s0=20, s1=20)
        run.step(s0=1, s1=1)
        run.step(s0=1, s1=1)
        with Calls() as calls:
            run.step(s0=1, s1=1)
        counts.append(calls.counts)
    views = {"select", "slice", "unbind", "view", "reshape", "chunk", "to", "expand", "t"}
    layer = {name: n for name, n in (counts[1] - counts[0]).items() if name not in views}
    work = {
        # The norms, with a mul and a mul_ each.
        "linalg_vector_norm": 2,
        "hypot_": 2,
        "div_": 2,
        "roll": 1,
        "mul": 3,
        "addcmul_": 1,
        "stack": 1,
        "index_copy_": 2,
        "scaled_dot_product_attention": 1,
        "silu": 1,
        "mul_": 3,
        "add_": 2,
    }
    # A weight of few outputs may stay plain where others are laid out for oneDNN.
    products = layer.pop("_linear_pointwise", 0) + layer.pop("linear", 0)
    assert products == 4
    assert layer == work
