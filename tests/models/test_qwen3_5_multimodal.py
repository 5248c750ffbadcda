"""Qwen3.5 as it is published, with a part for images: its text is computed as transformers does."""

from __future__ import annotations

from pathlib import Path

import torch
from models.hybrids import DELTA, GLOBAL, LINEAR
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from asyncinfer.models import load_model, read_config
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


def test_its_text_model(tmp_path: Path) -> None:
    text = {**DELTA, "layer_types": [LINEAR, GLOBAL], "rope_parameters": ROPE}
    config = Qwen3_5Config(text_config=text, vision_config=VISION)
    model = Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty_like(parameter).normal_(0.0, 0.15, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.save_pretrained(tmp_path)
    assert read_config(tmp_path).notes == ("images are not supported: only text is read",)
    decoder = load_model(tmp_path, "cpu", torch.float32, max_context=64)
    ids = torch.randint(3, 199, (50,), generator=generator)
    with torch.inference_mode():
        right = model(ids[None]).logits[0].clone()
    cut = pieces(decoder, ids.tolist())
    torch.testing.assert_close(cut.logits[0], right, rtol=0.0, atol=1e-4)
