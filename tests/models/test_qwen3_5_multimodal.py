"""Qwen3.5 and Qwen3-VL as they are published, with a part for images: their text is computed as
transformers does, also where all experts of a layer are one tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import SEVEN_TO_ONE, SMALL
from models.hybrids import DELTA, DELTA_MOE, GLOBAL, LINEAR
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from asyncinfer.errors import ModelLoadError
from asyncinfer.models import TensorNames, load_model, read_config
from asyncinfer.testing.family_trial import pieces

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "num_position_embeddings": 16,
}
#: Of three positions, which are one in a text.
ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
CLASSES: dict[str, tuple[Any, type[PreTrainedModel], dict[str, Any]]] = {
    "vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, {**SMALL, "head_dim": 24}),
    "vl, tied": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {**SMALL, **SEVEN_TO_ONE, "head_dim": 24, "num_hidden_layers": 3, "attention_bias": True},
    ),
    "vl, experts": (
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        {
            **SMALL,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "vl, experts, tied": (
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        {
            **SMALL,
            **SEVEN_TO_ONE,
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "attention_bias": True,
        },
    ),
    "dense": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, DELTA),
    "experts": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, DELTA_MOE),
}


def saved(kind: str, folder: Path) -> PreTrainedModel:
    config_class, model_class, values = CLASSES[kind]
    text = {**values, "rope_parameters": ROPE}
    if kind.startswith("vl"):
        text["rope_parameters"] = {**ROPE, "partial_rotary_factor": 1.0, "mrope_section": [4, 4, 4]}
    else:
        text["layer_types"] = [LINEAR, GLOBAL]
    vision = {**VISION, "out_hidden_size": values["hidden_size"]}
    config = config_class(
        text_config=text, vision_config=vision, tie_word_embeddings=kind.endswith("tied")
    )
    model = model_class._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty_like(parameter).normal_(0.0, 0.15, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.save_pretrained(folder)
    return model


def check(model: PreTrainedModel, folder: Path) -> None:
    assert read_config(folder).notes == ("images are not supported: only text is read",)
    decoder = load_model(folder, "cpu", torch.float32, max_context=64)
    ids = torch.randint(3, 199, (50,), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        right = model(ids[None]).logits[0].clone()
    cut = pieces(decoder, ids.tolist())
    torch.testing.assert_close(cut.logits[0], right, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("kind", CLASSES)
def test_its_text_model(kind: str, tmp_path: Path) -> None:
    check(saved(kind, tmp_path), tmp_path)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    model = saved("experts", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        theirs = f"model.language_model.layers.{layer}.mlp.experts."
        parts: dict[str, list[torch.Tensor]] = {
            part: [tensors.pop(f"{theirs}{number}.{part}.weight") for number in range(8)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        gate, up, down = map(torch.stack, parts.values())
        tensors[f"{theirs}gate_up_proj"] = torch.cat((gate, up), dim=1)
        tensors[f"{theirs}down_proj"] = down
    save_file(tensors, file, metadata={"format": "pt"})
    check(model, tmp_path)


@pytest.mark.parametrize("names", [("up",), ("up", "experts.{}.down"), ("up", ""), ["up", "down"]])
def test_names_of_experts_in_one_tensor(names: Any) -> None:
    with pytest.raises(ValueError, match=r"fused_experts=.*two names without"):
        TensorNames(fused_experts=names)


def test_a_text_config_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"architectures": ["Qwen3_5MoeForConditionalGeneration"]}))
    with pytest.raises(ModelLoadError, match="text_config"):
        read_config(tmp_path)


def test_experts_as_they_are_published(tmp_path: Path) -> None:
    """Qwen3-VL's have inputs before outputs; transformers saves them the other way round."""
    model = saved("vl, experts", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file)
    check(model, tmp_path)
