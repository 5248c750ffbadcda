"""Layers of few launches give what the layers launch by launch give, wherever they stand in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.interpreted import interpreted
from models.checkpoints import Sequences, expected
from models.families import FAMILIES, SMALL, randomised
from transformers import AutoConfig

from asyncinfer.attention import PagedAttention
from asyncinfer.kernels import ops
from asyncinfer.kernels import triton as triton_twins
from asyncinfer.layers import FusedLayer
from asyncinfer.models import Decoder, decoder, load_model
from asyncinfer.quantization import CudaLinear, linear

LLAMA: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 80},
    "gelu": {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}
FUSED = ("mistral", "qwen2", "qwen3", "phi3", "smollm3")
KINDS = {"llama": LLAMA, **{family: FAMILIES[family] for family in FUSED}}
CASES = [
    pytest.param(family, changes, id=f"{family}-{kind}".replace(" ", "-"))
    for family, kinds in KINDS.items()
    for kind, changes in kinds.items()
]
#: Fewer for the interpreter, which takes seconds for each.
INTERPRETED = ("llama-gelu", "qwen3-tied", "phi3-window")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused layers and paged attention, on a CPU's tensors."""
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda weight: True)
    monkeypatch.setitem(linear._FORMATS, "plain", CudaLinear)
    monkeypatch.setattr(decoder, "begin_attention", PagedAttention)


def loaded(family: str, changes: dict[str, Any], folder: Path) -> tuple[Any, Decoder]:
    model = randomised(AutoConfig.for_model(family, **{**SMALL, **changes}))
    model.save_pretrained(folder)
    made = load_model(folder, "cpu", torch.float32, max_context=256)
    fused = [isinstance(layer, FusedLayer) for layer in made._layers]
    # Layers without rotation are the only ones left out.
    rotated = [made.config.layer(i).rope is not None for i in range(made.config.num_layers)]
    assert fused == rotated
    assert any(fused)
    return model, made


def check(model: Any, made: Decoder, lengths: tuple[int, int], chunk: int) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 199, (length,), generator=generator) for length in lengths]
    run = Sequences(made, ids)
    run.step(s0=chunk, s1=lengths[1] - 2)
    run.step(s1=1, s0=lengths[0] - chunk - 2)
    for _ in range(2):
        run.step(s0=1, **({"s1": 1} if run.done[1] < lengths[1] else {}))
    assert run.done == list(lengths)
    for got, sequence in zip(run.logits, ids, strict=True):
        right = expected(model, sequence)
        torch.testing.assert_close(got, right, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_fused_layers_give_the_same_logits(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model, made = loaded(family, changes, tmp_path)
    # 140 tokens at once: beyond what the kernels of few tokens take.
    check(model, made, (150, 33), 140)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton twins themselves, wherever there is one."""
    twin = ops.twin

    def chosen(name: str, tensor: torch.Tensor, reference: bool) -> Any:
        there = name in triton_twins.__all__ and not reference
        return getattr(triton_twins, name) if there else twin(name, tensor, reference)

    monkeypatch.setattr(ops, "twin", chosen)
    with interpreted():
        yield


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("family", "changes"), [case for case in CASES if case.id in INTERPRETED])
def test_with_the_kernels_themselves(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model, made = loaded(family, changes, tmp_path)
    check(model, made, (30, 20), 9)
