"""Layers of few launches give what the layers launch by launch give, wherever they stand in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters.peft_models import loaded_pool, random_adapter
from kernels.interpreted import interpreted
from models.checkpoints import Sequences, expected
from models.families import FAMILIES, SMALL, randomised
from models.rounded_cache import NEAR, rounded_logits
from transformers import AutoConfig

from asyncinfer.attention import PagedAttention, begin_attention, kv_format
from asyncinfer.kernels import dispatch, triton
from asyncinfer.layers import FusedLayer
from asyncinfer.models import Decoder, ModelConfig, decoder, load_model, tensor_table
from asyncinfer.quantization import CudaLinear, linear

LLAMA: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 80},
    "gelu": {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}
FUSED = ("mistral", "qwen2", "qwen3", "phi3", "smollm3", "mixtral", "qwen3_moe", "gpt_oss")
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
    fused = [isinstance(layer, FusedLayer) for layer in made.layers]
    # Layers without rotation are the only ones left out.
    rotated = [made.config.layer(i).rope is not None for i in range(made.config.num_layers)]
    assert fused == rotated
    assert any(fused)
    return model, made


def check(
    model: Any, made: Decoder, lengths: tuple[int, int], chunk: int, kv: str = "plain"
) -> None:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 199, (length,), generator=generator) for length in lengths]
    run = Sequences(made, ids, format=kv_format(kv))
    run.step(s0=chunk, s1=lengths[1] - 2)
    run.step(s1=1, s0=lengths[0] - chunk - 2)
    for _ in range(2):
        run.step(s0=1, **({"s1": 1} if run.done[1] < lengths[1] else {}))
    assert run.done == list(lengths)
    for got, sequence in zip(run.logits, ids, strict=True):
        plain = expected(model, sequence)
        if kv == "plain":
            torch.testing.assert_close(got, plain, rtol=0.0, atol=1e-4)
        else:
            right = rounded_logits(model, sequence, kv)
            torch.testing.assert_close(got, right, rtol=0.0, atol=NEAR)
            assert (plain - right).abs().max() > 5 * NEAR


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_fused_layers_give_the_same_logits(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model, made = loaded(family, changes, tmp_path)
    # 140 tokens at once: beyond what the kernels of few tokens take.
    check(model, made, (150, 33), 140)


WITHOUT_PAGES = ("llama-biases", "qwen3-tied", "phi3-window", "gpt_oss-plain")


@pytest.mark.parametrize(
    ("family", "changes"), [case for case in CASES if case.id in WITHOUT_PAGES]
)
def test_fused_layers_attend_without_the_paged_kernels(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an engine stops trusting Triton's kernels after its model was loaded."""
    monkeypatch.setattr(decoder, "begin_attention", begin_attention)
    model, made = loaded(family, changes, tmp_path)
    check(model, made, (150, 33), 140)


def check_adapters(model: Any, made: Decoder, folder: Path, length: int = 30) -> None:
    """Two adapters and none in one batch, prompts and single tokens."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(0, 199, (length,), generator=generator) for _ in range(3)]
    configs: list[dict[str, Any]] = [
        {"target_modules": "all-linear"},
        {"target_modules": ["o_proj"], "r": 9},
    ]
    right = []
    for index, config in enumerate(configs):
        merged = random_adapter(model, folder / str(index), seed=index, **config)
        model.load_state_dict(merged, strict=False)
        right.append(expected(model, ids[index]))
        model.load_state_dict(before)
    right.append(expected(model, ids[2]))
    pool, slots = loaded_pool(made, [folder / "0", folder / "1"])
    run = Sequences(made, ids)
    run.adapters, run.pool, run.lora_on_device = [*slots, -1], pool, True
    run.step(s0=length - 3, s1=length - 2, s2=length - 3)
    for _ in range(2):
        run.step(s0=1, s1=1, s2=1)
    run.step(s0=1, s2=1)
    for got, right_one in zip(run.logits, right, strict=True):
        torch.testing.assert_close(got, right_one, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("case", ["llama-gelu", "qwen3-tied", "phi3-window"])
def test_adapters(case: str, tmp_path: Path) -> None:
    (family, changes) = next(each.values for each in CASES if each.id == case)
    model, made = loaded(str(family), changes, tmp_path)
    check_adapters(model, made, tmp_path)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton kernels themselves, wherever there is one."""
    monkeypatch.setattr(dispatch, "has_triton_kernel", lambda name, _: name in triton.__all__)
    with interpreted():
        yield


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("family", "changes"), [case for case in CASES if case.id in INTERPRETED])
def test_with_the_kernels_themselves(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    if "sliding_window" in changes:
        # Shorter than the texts, which are short for the interpreter.
        changes = {**changes, "sliding_window": 8}
    model, made = loaded(family, changes, tmp_path)
    check(model, made, (16, 11), 9)


@pytest.mark.usefixtures("kernels")
def test_adapters_with_the_kernels_themselves(tmp_path: Path) -> None:
    model, made = loaded("llama", LLAMA["plain"], tmp_path)
    # More than 64 tokens at once, beyond what the kernels of few tokens take.
    check_adapters(model, made, tmp_path, 25)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("family", "changes", "kv"),
    [("llama", LLAMA["gelu"], "fp8"), ("qwen3", FAMILIES["qwen3"]["tied"], "int8")],
)
def test_kv_in_8_bits_with_the_kernels_themselves(
    family: str, changes: dict[str, Any], kv: str, tmp_path: Path
) -> None:
    model, made = loaded(family, {**changes, "num_hidden_layers": 1}, tmp_path)
    check(model, made, (16, 11), 9, kv)


@pytest.mark.parametrize(("head_dim", "fused"), [(256, True), (512, False)])
def test_heads_that_the_paged_kernels_do_not_take(head_dim: int, fused: bool) -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        max_context=64,
    )
    table = tensor_table(config)
    (layer,) = Decoder(config, lambda name: torch.zeros(table[name].shape)).layers
    assert isinstance(layer, FusedLayer) == fused
