"""Quantised checkpoints and made formats as a GPU holds and multiplies them, on a CPU's tensors:
with the kernels' reference, with the kernels interpreted, and in steps recorded on the fake
device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_recorded_experts import OPTIONS, OnFakeDevice, answers
from fakes.fake_device import FakeDevice
from gguf import GGMLQuantizationType as Q
from kernels.interpreted import interpreted
from models.checkpoints import Sequences
from models.families import config_of
from models.gguf_files import write_gguf
from models.test_gguf import random_model
from models.test_quantised import FAMILIES, WIDE, experts, matrices_by, write
from quantization.quantised import CASES

from asyncinfer.attention import PagedAttention
from asyncinfer.bench.weight_bytes import weight_bytes
from asyncinfer.kernels import dispatch, native
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.layers import FusedLayer, FusedMLP
from asyncinfer.models import (
    Decoder,
    decoder,
    layer_weights,
    load_model,
    parse_config,
    read_config,
)
from asyncinfer.models.layouts import weight_layouts
from asyncinfer.quantization import (
    CudaLinear,
    as_tensor,
    cuda_packed,
    fp8,
    grouped,
    int8,
    linear,
)
from asyncinfer.quantization.cuda_packed import CudaPackedLinear, PackedGrouped
from asyncinfer.testing import InlineEngine, RandomModel
from asyncinfer.weights import loader

#: Of each code one by rows, in groups, in blocks, with offsets and without.
PUBLISHED = (
    "fp8 in blocks",
    "fbgemm_fp8",
    "modelopt nvfp4",
    "int4 in groups",
    "int4 in groups, asymmetric",
    "int8 by output",
    "mxfp4 by compressed-tensors",
    "gptq",
    "gptq of 8 bits",
    "awq",
    "hqq",
)
FILES = (Q.Q4_0, Q.Q4_1, Q.Q5_1, Q.Q8_0)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU holds of weights."""
    for module in (cuda_packed, fp8, int8):
        monkeypatch.setattr(module, "on_gpu", lambda weight: True)
    monkeypatch.setattr(grouped, "_has_kernels", lambda weight: True)
    monkeypatch.setattr(native, "available", lambda: True)
    monkeypatch.setattr(layer_weights, "held_for_rows", as_tensor)
    # Numbers are laid for a CPU's products only.
    monkeypatch.setattr(loader, "laying_kernels", lambda: None)


@pytest.fixture
def fused(as_on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of few launches, too."""
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda weight: True)
    monkeypatch.setattr(decoder, "begin_attention", PagedAttention)
    monkeypatch.setitem(linear._FORMATS, "plain", CudaLinear)


def logits(made: Decoder) -> torch.Tensor:
    """Of a prompt of more tokens than the kernels for few take, and of three tokens after it."""
    ids = [torch.randint(3, 190, (74,), generator=torch.Generator().manual_seed(3))]
    run = Sequences(made, ids)
    run.step(s0=71)
    for _ in range(3):
        run.step(s0=1)
    return run.logits[0]


def loaded(path: Path, storage: str = "plain") -> Decoder:
    return load_model(path, "cpu", torch.float32, max_context=256, storage=storage)


def check(path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """The same logits as of floats, which take more memory. Gives the model."""
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "has_fused_kernels", lambda weight: False)
        floats = loaded(path, "floats")
    made = loaded(path)
    right = logits(floats)
    assert right.std() > 0.05
    # Scales and offsets are rounded to float16, which large random weights multiply.
    torch.testing.assert_close(logits(made), right, rtol=0.0, atol=5e-2)
    assert weight_bytes(made) < weight_bytes(floats)
    return made


def is_packed(made: Decoder, layouts: tuple[WeightLayout, ...]) -> None:
    """The layers are those of few launches, and their matrices have the layouts told beforehand."""
    (layer,) = made.layers
    assert isinstance(layer, FusedLayer)
    matrices = [layer.qkv, layer.out]
    if isinstance(layer.mlp, FusedMLP):
        matrices += [layer.mlp.up, layer.mlp.down]
    for matrix in matrices:
        assert isinstance(matrix, CudaPackedLinear)
        assert matrix.scales is not None
        code, width = matrix.code, matrix.scales.shape[1]
        inputs = matrix.weight.shape[1] * (2 if matrix.weight.dtype is torch.uint8 else 1)
        offsets = matrix.offsets is not None
        # A group that is a whole row is called so.
        assert any(
            (layout.code, layout.offsets) == (code, offsets)
            and width == inputs // (layout.group or inputs)
            for layout in layouts
        )


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.usefixtures("fused")
def test_published(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = "llama" if name != "gptq" else "qwen3"
    changes = {**FAMILIES[family], "num_hidden_layers": 1, "intermediate_size": 128}
    path = tmp_path / "q"
    write(path, family, changes, CASES[name].config, matrices_by(name))
    made = check(path, monkeypatch)
    is_packed(made, weight_layouts(path, read_config(path), "plain"))


@pytest.mark.parametrize("kind", FILES, ids=lambda kind: kind.name)
@pytest.mark.usefixtures("fused")
def test_gguf(kind: Q, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(random_model("llama", "plain"), tmp_path / "model.gguf", kind)
    made = check(path, monkeypatch)
    (layout,) = weight_layouts(path, made.config, "plain")
    assert layout.readable
    for layer in made.layers:
        assert isinstance(layer, FusedLayer)
        assert isinstance(layer.qkv, CudaPackedLinear)
        assert layer.qkv.code == layout.code


@pytest.mark.usefixtures("as_on_gpu")
def test_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss' MXFP4: experts in one grouped product each, attention in floats."""
    small = {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    write(tmp_path / "q", "gpt_oss", small, config, experts)
    seen: list[PackedGrouped] = []
    made_of = PackedGrouped.__init__

    def noted(self: PackedGrouped, *args: Any) -> None:
        made_of(self, *args)
        seen.append(self)

    monkeypatch.setattr(PackedGrouped, "__init__", noted)
    check(tmp_path / "q", monkeypatch)
    assert len(seen) == 2 * small["num_hidden_layers"]
    config_read = read_config(tmp_path / "q")
    assert weight_layouts(tmp_path / "q", config_read, "plain") == (WeightLayout("e2m1", 32),)


@pytest.mark.parametrize("name", ["fp8 in blocks", "awq", "int8 by output"])
@pytest.mark.usefixtures("fused")
def test_kernels_interpreted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "q"
    changes = {**FAMILIES["llama"], "num_hidden_layers": 1}
    write(path, "llama", changes, CASES[name].config, matrices_by(name))
    made = loaded(path)
    right = logits(made)
    products = ("linear_small", "grouped_linear")
    monkeypatch.setattr(dispatch, "has_triton_kernel", lambda kernel, _: kernel in products)
    with interpreted():
        torch.testing.assert_close(logits(made), right, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("storage", ["int8", "fp8", "int4"])
@pytest.mark.parametrize(
    ("family", "architecture"),
    [("llama", "LlamaForCausalLM"), ("mixtral", "MixtralForCausalLM")],
)
@pytest.mark.usefixtures("as_on_gpu")
def test_recorded_steps(storage: Any, family: str, architecture: str) -> None:
    """The same tokens as of steps that are not recorded: what stands in for a kernel asks the host
    for nothing."""
    config = config_of(family, "plain", vocab_size=300).to_dict()
    source = RandomModel(parse_config({**config, "architectures": [architecture]}), seed=3)
    options = {**OPTIONS, "weights": storage}
    expected = answers(InlineEngine(source, **options))
    with FakeDevice() as device:
        assert answers(InlineEngine(OnFakeDevice(source, device), **options)) == expected
    assert device.calls["Graph.replay"] > 5
    assert len({token for tokens in expected for token in tokens}) > 5
