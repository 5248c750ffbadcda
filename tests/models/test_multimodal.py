"""Models of more than text whose files look other than the published ones: saved by other versions
of transformers, or by programs that save a model as transformers holds it in memory."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import SMALL
from safetensors.torch import save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Llama4Config,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from asyncinfer.models import load_model, parse_config
from asyncinfer.testing.decoder_run import DecoderRun

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_hidden_layers": 1,
}
TEXT = {**SMALL, "head_dim": 16, "sliding_window": 24}
CONFIGS: list[type[PreTrainedConfig]] = [
    Gemma3Config,
    Gemma4Config,
    Llama4Config,
    Mistral3Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_saved_as_it_is_in_memory(kind: str, tied: bool, tmp_path: Path) -> None:
    config: Any
    if kind == "gemma3":
        config = Gemma3Config(
            text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4, tie_word_embeddings=tied
        )
        kept = Gemma3ForConditionalGeneration
    else:
        text = {**TEXT, "model_type": "mistral"}
        vision = {**VISION, "model_type": "pixtral"}
        config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
        kept = Mistral3ForConditionalGeneration
    config.image_token_index = 190
    model = kept._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15, generator=generator)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert "model.language_model.layers.0.mlp.up_proj.weight" in tensors
    save_file(tensors, tmp_path / "model.safetensors")
    named = {**config.to_dict(), "architectures": [type(model).__name__]}
    (tmp_path / "config.json").write_text(json.dumps(named))

    ids = torch.randint(3, 180, (40,), generator=generator)
    with torch.inference_mode():
        right = model(input_ids=ids[None]).logits[0].clone()
    run = DecoderRun(load_model(tmp_path, "cpu", torch.float32), [ids.tolist()])
    run.step({0: 40})
    torch.testing.assert_close(run.logits[0], right, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_what_its_text_config_leaves_out(kind: type[PreTrainedConfig]) -> None:
    """transformers 4 left out of it all that is its class's default."""
    config: Any = kind()
    architecture = f"{kind.__name__.removesuffix('Config')}ForConditionalGeneration"
    whole = {**config.to_dict(), "architectures": [architecture]}
    text = whole["text_config"]
    stock = type(config.text_config)().to_dict()
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "model_type")
    # Each model has its own of these; the size of heads follows from others where it is left out.
    kept = (*sizes, "head_dim", "rope_parameters", "vocab_size")
    short = copy.deepcopy(whole)
    short["text_config"] = {
        key: value
        for key, value in text.items()
        if key in kept or key not in stock or stock[key] != value
    }
    assert len(short["text_config"]) < len(text)
    ends = {"bos_token_id": None, "eos_token_ids": ()}
    assert replace(parse_config(short), **ends) == replace(parse_config(whole), **ends)


def test_a_rotation_that_qwen3_vl_leaves_out() -> None:
    text = {**SMALL, "head_dim": 16, "rope_scaling": {"mrope_section": [4, 2, 2]}}
    values = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text}
    read = parse_config(values).rope
    assert read is not None
    assert read.theta == 5_000_000.0
