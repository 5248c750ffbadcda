"""What families outside can bring: activations of their own, with weights and without, interleaved
rotations, norms without weights. Logits equal transformers' within 1e-4 in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models.checkpoints import Sequences, expected
from models.families import LONGROPE, SMALL, random_model, randomised
from models.outside_families import OUTSIDE
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from asyncinfer import plugins
from asyncinfer.errors import ModelLoadError, PluginError
from asyncinfer.layers import LearnedActivation, activation
from asyncinfer.models import (
    Decoder,
    Family,
    JsonReader,
    ModelConfig,
    examine,
    load_model,
    tensor_table,
)
from asyncinfer.plugins.groups import models

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
THREE_TO_ONE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.7},
    "cohere, biases, untied": {
        "logit_scale": 0.7,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "glm": {"head_dim": 16},
    "glm, whole heads": {"head_dim": 24, "rope_parameters": {"partial_rotary_factor": 1.0}},
    "olmo": {},
    "olmo, biases": {**THREE_TO_ONE, "attention_bias": True, "tie_word_embeddings": True},
}


def config_of(kind: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind.split(",")[0], **{**SMALL, **KINDS[kind], **changes})


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_registered", {})
    monkeypatch.setattr(models, "_loaded", {})
    for name, family in OUTSIDE.items():
        plugins.register("asyncinfer.models", name, family)


def ids_of(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 199, (length,), generator=generator) for length in lengths]


def check(decoder: Decoder, right: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Whole prompts, chunks, decode steps, a mixed batch and a shared prefix."""
    ids = ids_of(70, 33, 47)
    ids[2][:32] = ids[0][:32]
    run = Sequences(decoder, ids)
    run.step(s0=40, s1=7)
    run.step(s0=1, s1=20)
    run.share(2, 0, 32)
    for _ in range(6):
        run.step(s0=1, s1=1, s2=1)
    run.step(s0=23, s2=9)
    for row, hit in ((0, 0), (1, 0), (2, 32)):
        done = slice(hit, run.done[row])
        torch.testing.assert_close(run.logits[row][done], right(ids[row])[done], **TOLERANCE)


def of(model: PreTrainedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda ids: expected(model, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_logits(kind: str, tmp_path: Path) -> None:
    model = randomised(config_of(kind))
    model.save_pretrained(tmp_path)
    assert not examine(tmp_path).problems
    decoder = load_model(tmp_path, "cpu", torch.float32, max_context=256)
    assert expected(model, ids_of(30)[0]).std() > 0.1
    check(decoder, of(model))


@pytest.mark.parametrize("storage", ["plain", "int8"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "," not in kind])
def test_bfloat16_is_near(kind: str, storage: str, tmp_path: Path) -> None:
    model = randomised(config_of(kind))
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, "cpu", torch.bfloat16, max_context=256, storage=storage)
    (ids,) = ids_of(60)
    run = Sequences(decoder, [ids])
    run.step(s0=40)
    for _ in range(20):
        run.step(s0=1)
    right = expected(model, ids)
    assert (run.logits[0] - right).norm() / right.norm() < 0.08


#: A rotation that the checkpoint keeps side by side is the same as the other one with its rows put
#: apart: heads with norms, biases, fused projections, parts of heads.
ROTATED = {
    "qwen3": {"attention_bias": True, "head_dim": 24},
    "olmo2": {"attention_bias": True},
    "phi3": {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75}},
    "phi": {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    "gpt_neox": {"rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
    "smollm3": {"num_hidden_layers": 4},
    "longrope": {"rope_parameters": LONGROPE, "max_position_embeddings": 1024},
}


@pytest.mark.parametrize("kind", ROTATED)
def test_an_interleaved_rotation(kind: str, tmp_path: Path) -> None:
    family = {"longrope": "phi3"}.get(kind, kind)
    model = random_model(family, "plain", **ROTATED[kind])
    model.save_pretrained(tmp_path)
    config = examine(tmp_path).config
    assert config is not None

    class Interleaved(type(models.resolve(config.architecture))):  # type: ignore[misc]
        def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
            other = super().configure(config, llama)
            layers = (
                replace(one, rope=one.rope and replace(one.rope, interleaved=True))
                for one in other.layers
            )
            rope = replace(other.rope, interleaved=True)
            return replace(other, rope=rope, layers=tuple(layers))

    plugins.register("asyncinfer.models", "Interleaved", Interleaved)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
        rope = config.layer(layer).rope
        if rope is not None:
            tensors[name] = beside(config, name, tensor, rope.size or config.head_dim)
    save_file(tensors, file)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace(config.architecture, "Interleaved"))
    decoder = load_model(tmp_path, "cpu", torch.float32, max_context=256)
    check(decoder, of(model))


def beside(config: ModelConfig, name: str, tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor of a checkpoint, the dimensions of each head that are rotated together side by side
    if it is one of queries and keys. Written out element by element, unlike the engine's own."""
    heads = {
        "q_proj": config.num_heads,
        "k_proj": config.num_kv_heads,
        "q_norm": config.num_heads,
        "k_norm": config.num_kv_heads,
        "qkv_proj": config.num_heads + config.num_kv_heads,
        "query_key_value": 3 * config.num_heads,
    }.get(name.split(".")[-2])
    if heads is None:
        return tensor
    changed = tensor.clone()
    for head in range(min(heads, len(tensor) // config.head_dim)):
        if "query_key_value" in name and head % 3 == 2:
            continue  # These are values.
        start = head * config.head_dim
        for pair in range(size // 2):
            changed[start + 2 * pair] = tensor[start + pair]
            changed[start + 2 * pair + 1] = tensor[start + size // 2 + pair]
    return changed


def with_activation(chosen: Any, gated: bool = True) -> type[Family]:
    class Own(Family):
        def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
            return replace(llama, activation=chosen)

    return Own


def own(folder: Path, chosen: Any, **changes: Any) -> tuple[PreTrainedModel, Path]:
    """A Llama with an activation that no name is known of."""
    model = randomised(AutoConfig.for_model("llama", **{**SMALL, **changes}))
    model.save_pretrained(folder)
    text = (folder / "config.json").read_text()
    act = changes.get("hidden_act", "silu")
    text = text.replace("LlamaForCausalLM", "OwnForCausalLM").replace(f'"{act}"', '"silu"')
    (folder / "config.json").write_text(text)
    plugins.register("asyncinfer.models", "OwnForCausalLM", with_activation(chosen))
    return model, folder


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("mish", F.mish),
        ("leaky_relu", lambda x: torch.where(x > 0, x, 0.01 * x)),
        ("relu", "relu"),
        ("relu2", "relu2"),
        ("quick_gelu", LearnedActivation(lambda x: x * torch.sigmoid(1.702 * x), ())),
    ],
)
def test_an_activation_of_ones_own(name: str, chosen: Any, tmp_path: Path) -> None:
    model, folder = own(tmp_path, chosen, hidden_act=name)
    check(load_model(folder, "cpu", torch.float32, max_context=256), of(model))


def failing(x: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        (failing, r"activation <function failing.*raised ZeroDivisionError\('no'\)"),
        (lambda x: x.double(), r"gave \[1, 112\] torch.float64 for \[1, 112\] torch.float32"),
        (lambda x: x[:, 1:], r"gave \[1, 111\] torch.float32 for \[1, 112\]"),
        (lambda x: None, r"gave NoneType for"),
        (lambda x, y: x, r"raised TypeError"),
    ],
)
def test_one_that_is_wrong_is_found_when_the_model_is_loaded(
    chosen: Any, says: str, tmp_path: Path
) -> None:
    _, folder = own(tmp_path, chosen)
    with pytest.raises(PluginError, match=says):
        load_model(folder, "cpu", torch.float32)


def test_one_that_fails_later_is_named() -> None:
    def sometimes(x: torch.Tensor) -> torch.Tensor:
        return failing(x) if len(x) > 1 else x

    activate = activation(sometimes, gated=False)
    assert activate(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
    with pytest.raises(PluginError, match=r"sometimes.*ZeroDivisionError"):
        activate(torch.ones(2, 2))


def test_one_with_weights_in_a_gated_layer() -> None:
    """The gate alone goes through it."""
    scaled = LearnedActivation(lambda x, by: x.tanh() * by, (("mlp.act.by", (3,)),))
    by = torch.tensor([1.0, 2.0, 3.0])
    gate, up = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
    packed = torch.cat((gate, up), dim=1)
    got = activation(scaled, gated=True, weights=[by])(packed)
    torch.testing.assert_close(got, gate.tanh() * by * up)


@pytest.mark.parametrize("kind", ["apertus", "olmo"])
def test_tensors_that_are_missing_or_left_over(kind: str, tmp_path: Path) -> None:  # fault 45
    randomised(AutoConfig.for_model(kind, **SMALL)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.act_fn.beta"
    if kind == "olmo":
        name = "model.layers.1.input_layernorm.weight"
        save_file({**tensors, name: torch.ones(64)}, file)
    else:
        del tensors[name]
        save_file(tensors, file)
    with pytest.raises(ModelLoadError) as caught:
        load_model(tmp_path, "cpu", torch.float32)
    assert caught.value.tensor == name


def test_norms_of_heads_without_weights() -> None:
    """No table names any, and they act as with ones."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=199,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_context=256,
        tied_head=True,
    )
    for norm in ("head", "projection"):
        logits = []
        for weighted in (True, False):
            shape = replace(config, qk_norm=norm, norm_weight=weighted)
            table = tensor_table(shape)
            assert weighted == any("norm" in name for name in table)
            numbers = torch.Generator().manual_seed(5)
            weights = {
                name: torch.ones(packed.shape)
                if "norm" in name
                else torch.randn(packed.shape, generator=numbers) * 0.3
                for name, packed in table.items()
            }
            run = Sequences(Decoder(shape, weights.__getitem__), ids_of(40))
            run.step(s0=40)
            logits.append(run.logits[0])
        torch.testing.assert_close(*logits)
