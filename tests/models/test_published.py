"""Checkpoints as they are published: what their `config.json` says, in the spellings of its time,
is understood or refused with the exact reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import expected
from models.families import randomised
from models.published import CONFIGS, PARAMETERS
from transformers import AutoConfig

from asyncinfer.errors import ModelLoadError
from asyncinfer.models import examine, load_model, parse_config
from asyncinfer.planner import ModelSize, find_gpu, plan_config
from asyncinfer.testing.decoder_run import DecoderRun

#: What is published quantised, and in which format.
QUANTISED = {
    "gpt-oss-20b": "mxfp4",
    "DeepSeek-V3": "fp8",
    "DeepSeek-V3.2": "fp8",
    "MiniMax-M2": "fp8",
}
#: What is here without its tower: `test_sparse.py` and `test_gemma4.py` load such checkpoints.
TEXT_ALONE = {"Llama-4-Scout-17B-16E", "gemma-4-26B-A4B"}
#: Layers that look like their models' own: some with windows, without rotation, without experts.
LAYERS = 7
#: What is smaller than published; heads that are as many as queries stay so.
SMALL = {
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 199,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "n_embd": 96,
    "n_head": 6,
    "n_layer": LAYERS,
    "num_local_experts": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 48,
    "moe_num_experts": 6,
    "moe_k": 2,
    "rotary_dim": 8,
    "n_routed_experts": 16,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "index_n_heads": 17,
    "index_head_dim": 18,
    "index_topk": 24,
    "num_experts_per_token": 2,
    "model_max_length": 256,
    "max_position_embeddings": 256,
    "original_max_position_embeddings": 64,
}


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The config with smaller numbers, and all that it says otherwise."""
    small = {
        key: SMALL[key] if config[key] is not None and key in SMALL else config[key]
        for key in config
    }
    if config.get("num_key_value_heads") == config.get("num_attention_heads"):
        small |= {"num_key_value_heads": 6} if "num_key_value_heads" in config else {}
    if (config.get("sliding_window") or 1 << 30) < config.get("max_position_embeddings", 1 << 20):
        small["sliding_window"] = 24
    for key in ("layer_types", "no_rope_layers"):
        if key in config:
            small[key] = config[key][:LAYERS]
    if config.get("rope_scaling"):
        rope = small["rope_scaling"] = dict(config["rope_scaling"])
        frequencies = int(16 * config.get("partial_rotary_factor", 1.0)) // 2
        for key in ("long_factor", "short_factor"):
            if key in rope:
                rope[key] = rope[key][:frequencies]
        if "original_max_position_embeddings" in rope:
            # Beyond it transformers' Phi-3.5-MoE goes on with the factors of short texts.
            trained = 256 if config["model_type"] == "phimoe" else 64
            rope["original_max_position_embeddings"] = trained
            if "original_max_position_embeddings" in small:
                small["original_max_position_embeddings"] = trained
    if "partial_rotary_factor" in config.get("rope_parameters", {}):
        rotated, plain = SMALL["qk_rope_head_dim"], SMALL["qk_nope_head_dim"]
        small["head_dim"] = plain + rotated
        share = rotated / small["head_dim"]
        small["rope_parameters"] = {**config["rope_parameters"], "partial_rotary_factor": share}
    if "linear_attn_config" in config:
        own = small["linear_attn_config"] = {**config["linear_attn_config"]}
        own |= {"head_dim": 6, "num_heads": 5}
        for key in ("full_attn_layers", "kda_layers"):
            own[key] = [layer for layer in own[key] if layer <= LAYERS]
    if "text_config" in config:
        whole = {**SMALL, **shrunk(config["text_config"]), "max_position_embeddings": 4096}
        keys = ("n_embd", "n_head", "n_layer", "num_local_experts")
        keys += ("original_max_position_embeddings",)
        small["text_config"] = {key: whole[key] for key in whole if key not in keys}
        small |= {"image_token_index": 190, "boi_token_index": 191, "eoi_token_index": 192}
        small["mm_tokens_per_image"] = 4
        small["vision_config"] = {
            **config["vision_config"],
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "image_size": 28,
            "num_hidden_layers": 1,
        }
    small.pop("quantization_config", None)
    return small


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - TEXT_ALONE))
def test_a_model_of_this_config(name: str, tmp_path: Path) -> None:
    """A small one by transformers, with `config.json` as it is published and not as transformers
    writes it today."""
    config = shrunk(CONFIGS[name])
    # What transformers is not to look for: code, and the class.
    of_theirs = ("architectures", "auto_map", "dtype", "model_type", "torch_dtype")
    known = {key: value for key, value in config.items() if key not in of_theirs}
    if known.get("rope_scaling", 0) is None:
        # transformers warns of the old key even where it says nothing.
        del known["rope_scaling"]
    model = randomised(AutoConfig.for_model(config["model_type"], **known))
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not examine(tmp_path).problems

    ids = torch.randint(0, 180, (100,), generator=torch.Generator().manual_seed(3))
    run = DecoderRun(load_model(tmp_path, "cpu", torch.float32), [ids.tolist()])
    run.step({0: 80})
    for _ in range(20):
        run.step({0: 1})
    right = expected(model, ids)
    assert right.std() > 0.1
    torch.testing.assert_close(run.logits[0], right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_its_size_and_plan(name: str) -> None:
    config = parse_config(CONFIGS[name])
    assert ModelSize.of(config).parameters == PARAMETERS[name]
    found = plan_config(config, gpu=find_gpu("h200"))
    assert found.parameters == PARAMETERS[name]
    # What has more bytes than the GPU in bfloat16 has no room in one of them.
    assert (found.formats[0].sequences > 0) == (2 * PARAMETERS[name] < 140e9)


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_what_is_published_quantised(name: str) -> None:
    scheme = parse_config(CONFIGS[name]).scheme
    assert scheme is not None
    assert scheme.method == QUANTISED[name]
    matrix = {
        "gpt-oss-20b": "mlp.experts.down_proj",
        "DeepSeek-V3": "mlp.experts.3.down_proj",
        "DeepSeek-V3.2": "mlp.experts.3.down_proj",
        "MiniMax-M2": "block_sparse_moe.experts.3.w2",
    }[name]
    assert scheme.planned(f"model.layers.5.{matrix}") is not None
    if name == "gpt-oss-20b":
        assert scheme.planned("model.layers.5.self_attn.q_proj") is None


def test_what_comes_with_a_published_config() -> None:
    for name in (
        "Phi-3-mini-4k",
        "Phi-3-mini-128k",
        "Phi-4-mini",
        "DeepSeek-V2-Lite",
        "Kimi-Linear-48B-A3B",
        "MiniMax-M2",
    ):
        assert "auto_map is set aside" in parse_config(CONFIGS[name]).notes[0]
    gemma = parse_config(CONFIGS["gemma-3-4b"])
    assert gemma.notes == ("images are not supported: only text is read",)
    assert gemma.eos_token_ids == (1, 106)
    assert [gemma.layer(i).window for i in range(7)] == [1024] * 5 + [None, 1024]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config": [1]}, "text_config"),
        ({"text_config": {"hidden_size": 0}}, "hidden_size"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
)
def test_a_config_of_text_and_images_that_lies(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelLoadError, match=f": {key}="):
        parse_config({**CONFIGS["gemma-3-4b"], **changes})


def test_another_model_of_text_and_images_says_so() -> None:
    config = {**CONFIGS["gemma-3-4b"], "architectures": ["LlavaForConditionalGeneration"]}
    with pytest.raises(ModelLoadError, match=r"none of these is known; it has a text_config"):
        parse_config(config)
