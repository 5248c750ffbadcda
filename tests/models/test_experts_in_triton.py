"""Mixtures of experts with the Triton kernel of the grouped product, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.interpreted import interpreted
from models.checkpoints import Sequences, expected
from models.families import FAMILIES, SMALL, randomised
from transformers import AutoConfig

from asyncinfer.kernels import dispatch, reference
from asyncinfer.kernels.triton import grouped_linear
from asyncinfer.models import layer_weights, load_model
from asyncinfer.quantization.grouped import DenseGrouped


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each call of the kernel, which runs wherever a grouped product is asked for."""
    rows: list[int] = []
    kernel_for = dispatch.kernel_for

    def counted(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        rows.append(x.shape[0])
        return grouped_linear(x, *arguments, **options)

    def chosen(function: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
        return counted if function is reference.grouped_linear else kernel_for(function, tensor)

    def grouped(
        weight: torch.Tensor, bias: torch.Tensor | None = None, *, storage: str = "plain"
    ) -> DenseGrouped:
        return DenseGrouped(weight, bias)

    monkeypatch.setattr(dispatch, "kernel_for", chosen)
    monkeypatch.setattr(layer_weights, "make_grouped_linear", grouped)
    with interpreted():
        yield rows


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_logits_are_transformers(family: str, calls: list[int], tmp_path: Path) -> None:
    changes = {**SMALL, **next(iter(FAMILIES[family].values()))}
    model: Any = randomised(AutoConfig.for_model(family, **changes))
    model.save_pretrained(tmp_path)
    made = load_model(tmp_path, "cpu", torch.float32, max_context=256)
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 199, (length,), generator=generator) for length in (40, 12)]
    run = Sequences(made, ids)
    run.step(s0=38, s1=11)
    run.step(s0=1)
    run.step(s0=1, s1=1)
    for got, sequence in zip(run.logits, ids, strict=True):
        torch.testing.assert_close(got, expected(model, sequence), rtol=0.0, atol=1e-4)
    # Rows of one token, and of many.
    assert min(calls) <= 8 < max(calls)
