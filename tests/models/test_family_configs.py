"""What the families read of `config.json`: old spellings, defaults, and lies."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import Sequences, expected
from models.families import (
    CASES,
    DEEPSEEK,
    FAMILIES,
    GLOBAL,
    LOCAL,
    MISTRAL4,
    SMALL,
    TEMPERED,
    causal_class,
    config_of,
    random_model,
)
from safetensors.torch import load_file, save_file

from asyncinfer.attention import KVCache
from asyncinfer.errors import ModelLoadError, PluginError
from asyncinfer.models import ModelConfig, load_model, parse_config, read_config, tensor_table
from asyncinfer.models.leftovers import ignored_tensor
from asyncinfer.plugins import models
from asyncinfer.weights import SafetensorsCheckpoint, WeightLoader

NEOX = {**SMALL, "num_key_value_heads": None}
GEMMA3 = {**SMALL, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 32}


def parse(architecture: str, values: dict[str, Any], **changes: Any) -> ModelConfig:
    return parse_config({"architectures": [architecture], **values, **changes})


@pytest.mark.parametrize(
    ("architecture", "base", "old", "new"),
    [
        (
            "GPTNeoXForCausalLM",
            NEOX,
            {"rotary_pct": 0.5, "rotary_emb_base": 5_000},
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 5_000.0}},
        ),
        (
            "PhiForCausalLM",
            SMALL,
            {"partial_rotary_factor": 0.25, "rope_theta": 5_000.0},
            {"rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 5_000.0}},
        ),
        (
            "Gemma3ForCausalLM",
            GEMMA3,
            {
                "rope_theta": 2e6,
                "rope_local_base_freq": 5_000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 3,
            },
            {
                "rope_parameters": {
                    GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                    LOCAL: {"rope_type": "default", "rope_theta": 5_000.0},
                },
                "layer_types": [LOCAL, LOCAL, GLOBAL] * 2,
            },
        ),
        ("Gemma3ForCausalLM", GEMMA3, {}, {"layer_types": [LOCAL] * 5 + [GLOBAL]}),
        (
            "SmolLM3ForCausalLM",
            {**SMALL, "num_hidden_layers": 4},
            {"rope_theta": 2e6},
            {"no_rope_layers": [1, 1, 1, 0]},
        ),
        (
            "Phi3ForCausalLM",
            {**SMALL, "original_max_position_embeddings": 64},
            {"rope_scaling": {"type": "su", "short_factor": [1] * 8, "long_factor": [2] * 8}},
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "short_factor": [1] * 8,
                    "long_factor": [2] * 8,
                    "factor": 4.0,
                }
            },
        ),
    ],
)
def test_old_spellings(
    architecture: str, base: dict[str, Any], old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert parse(architecture, base, **old) == parse(architecture, base, **new)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}".replace(" ", "-"))
def test_what_is_left_out_is_what_transformers_takes(case: tuple[str, str]) -> None:
    """A config that says only what is not its family's default reads as the whole one does."""
    config = config_of(*case)
    name = causal_class(config).__name__
    assert name in models.names()
    whole = {**config.to_dict(), "architectures": [name]}
    stock = type(config)().to_dict()
    if "num_attention_heads" in whole:
        # Computed from others where it is not given.
        stock.pop("head_dim", None)
    short = {
        key: value
        for key, value in whole.items()
        if key not in stock or stock[key] != value or key == "rope_parameters"
    }
    assert len(short) < len(whole)
    for key in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions"):
        if key in whole:
            short[key] = whole[key]
    required = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    )
    short |= {key: whole[key] for key in required if key in whole}
    ignored = {"bos_token_id": None, "eos_token_ids": (), "dtype": None}
    assert replace(parse_config(short), **ignored) == replace(parse_config(whole), **ignored)


GROUPS = {"n_group": 2, "topk_group": 1}
NOTHING = {"routed_scaling_factor": 0.0}
MXFP6 = {"quant_method": "mxfp6", "modules_to_not_convert": ["lm_head"]}
#: Architecture -> what config.json says -> the key that the error names.
LIES: list[tuple[str, str, dict[str, Any]]] = [
    ("MistralForCausalLM", "sliding_window", {"sliding_window": 0}),
    ("MistralForCausalLM", "sliding_window", {"sliding_window": 2**40}),
    ("MistralForCausalLM", "sliding_window", {"sliding_window": "wide"}),
    ("Qwen2ForCausalLM", "use_sliding_window", {"use_sliding_window": 1}),
    ("Qwen2ForCausalLM", "max_window_layers", {"max_window_layers": -1}),
    ("Qwen3ForCausalLM", "layer_types", {"use_sliding_window": True, "layer_types": [GLOBAL]}),
    ("SmolLM3ForCausalLM", "no_rope_layers", {"no_rope_layers": [1, 2]}),
    ("SmolLM3ForCausalLM", "no_rope_layers", {"no_rope_layers": [True, False]}),
    ("SmolLM3ForCausalLM", "no_rope_layers", {"no_rope_layers": [1]}),
    ("SmolLM3ForCausalLM", "no_rope_layer_interval", {"no_rope_layer_interval": 0}),
    ("GraniteForCausalLM", "embedding_multiplier", {"embedding_multiplier": 0}),
    ("GraniteForCausalLM", "logits_scaling", {"logits_scaling": 0.0}),
    ("GraniteForCausalLM", "residual_multiplier", {"residual_multiplier": float("nan")}),
    ("GraniteForCausalLM", "attention_multiplier", {"attention_multiplier": True}),
    ("Starcoder2ForCausalLM", "use_bias", {"use_bias": "both"}),
    ("Starcoder2ForCausalLM", "norm_epsilon", {"norm_epsilon": -1}),
    ("PhiForCausalLM", "qk_layernorm", {"qk_layernorm": True}),
    ("PhiForCausalLM", "partial_rotary_factor", {"partial_rotary_factor": 0.01}),
    ("PhiForCausalLM", "partial_rotary_factor", {"partial_rotary_factor": 0.2}),
    ("PhiForCausalLM", "partial_rotary_factor", {"partial_rotary_factor": 2.0}),
    ("GPTNeoXForCausalLM", "rotary_pct", {"rotary_pct": -0.5}),
    ("GPTNeoXForCausalLM", "rotary_emb_base", {"rotary_emb_base": 0}),
    ("GPTNeoXForCausalLM", "use_parallel_residual", {"use_parallel_residual": "no"}),
    ("GPT2LMHeadModel", "n_embd", {}),
    ("GPT2LMHeadModel", "n_inner", {"n_embd": 2**19, "n_head": 2**12, "n_positions": 9}),
    ("GPT2LMHeadModel", "n_head", {"n_embd": 64, "n_inner": 4, "n_head": 0}),
    ("Gemma2ForCausalLM", "attn_logit_softcapping", {"attn_logit_softcapping": -50.0}),
    ("Gemma2ForCausalLM", "final_logit_softcapping", {"final_logit_softcapping": 0}),
    ("Gemma2ForCausalLM", "query_pre_attn_scalar", {"query_pre_attn_scalar": 0}),
    ("Gemma2ForCausalLM", "layer_types", {"layer_types": [LOCAL, "chunked_attention"]}),
    ("Gemma2ForCausalLM", "layer_types", {"layer_types": LOCAL}),
    ("Gemma2ForCausalLM", "use_bidirectional_attention", {"use_bidirectional_attention": True}),
    ("Gemma2ForCausalLM", "hidden_activation", {"hidden_activation": "relu6"}),
    ("MixtralForCausalLM", "num_local_experts", {"num_local_experts": 0}),
    ("MixtralForCausalLM", "num_local_experts", {"num_local_experts": 2**20}),
    ("MixtralForCausalLM", "num_local_experts", {"num_local_experts": 2**17}),
    ("MixtralForCausalLM", "num_experts_per_tok", {"num_experts_per_tok": 9}),
    ("Qwen3MoeForCausalLM", "moe_intermediate_size", {"moe_intermediate_size": 2**30}),
    ("Qwen3MoeForCausalLM", "norm_topk_prob", {"norm_topk_prob": 1}),
    ("Qwen3MoeForCausalLM", "decoder_sparse_step", {"decoder_sparse_step": 0}),
    ("Qwen3MoeForCausalLM", "mlp_only_layers", {"mlp_only_layers": [2]}),
    ("Qwen3MoeForCausalLM", "mlp_only_layers", {"mlp_only_layers": "all"}),
    ("Qwen3MoeForCausalLM", "num_experts", {"num_experts": -1}),
    ("OlmoHybridForCausalLM", "hidden_act", {"hidden_act": "gelu"}),
    ("OlmoHybridForCausalLM", "linear_num_value_heads", {"linear_num_value_heads": 3}),
    ("OlmoHybridForCausalLM", "hidden_size", {"hidden_size": 10**400}),
    ("Qwen3NextForCausalLM", "hidden_act", {"hidden_act": "gelu"}),
    ("Qwen3NextForCausalLM", "layer_types", {"layer_types": [GLOBAL, LOCAL]}),
    ("Qwen3NextForCausalLM", "linear_num_value_heads", {"linear_num_value_heads": 24}),
    ("Qwen3NextForCausalLM", "linear_conv_kernel_dim", {"linear_conv_kernel_dim": 1}),
    ("Qwen3NextForCausalLM", "full_attention_interval", {"full_attention_interval": 0}),
    ("GptOssForCausalLM", "swiglu_limit", {"swiglu_limit": 0}),
    ("GptOssForCausalLM", "swiglu_alpha", {"swiglu_alpha": "x"}),
    (
        "GptOssForCausalLM",
        "quantization_config.quant_method",
        {"quantization_config": MXFP6},
    ),
    ("DeepseekV3ForCausalLM", "num_key_value_heads", {}),
    ("DeepseekV3ForCausalLM", "kv_lora_rank", {**DEEPSEEK, "kv_lora_rank": 0}),
    ("DeepseekV3ForCausalLM", "q_lora_rank", {**DEEPSEEK, "q_lora_rank": -1}),
    ("DeepseekV3ForCausalLM", "qk_rope_head_dim", {**DEEPSEEK, "qk_rope_head_dim": 7}),
    ("DeepseekV3ForCausalLM", "n_group", {**DEEPSEEK, "n_group": 3}),
    ("DeepseekV3ForCausalLM", "n_group", {**DEEPSEEK, "n_group": 8}),
    ("DeepseekV3ForCausalLM", "topk_group", {**DEEPSEEK, "n_group": 2, "topk_group": 3}),
    ("DeepseekV3ForCausalLM", "topk_group", {**DEEPSEEK, "n_group": 4, "topk_group": 1}),
    ("DeepseekV3ForCausalLM", "routed_scaling_factor", {**DEEPSEEK, **GROUPS, **NOTHING}),
    ("DeepseekV2ForCausalLM", "topk_method", {**DEEPSEEK, "topk_method": "best"}),
    ("DeepseekV2ForCausalLM", "norm_topk_prob", {**DEEPSEEK, "norm_topk_prob": True}),
    ("DeepseekV2ForCausalLM", "first_k_dense_replace", {**DEEPSEEK, "first_k_dense_replace": -1}),
    ("MinistralForCausalLM", "layer_types", {"layer_types": [GLOBAL]}),
    (
        "Ministral3ForCausalLM",
        "rope_parameters.llama_4_scaling_beta",
        {"rope_parameters": {**TEMPERED, "llama_4_scaling_beta": -1.0}},
    ),
    (
        "Mistral4ForCausalLM",
        "partial_rotary_factor",
        {**MISTRAL4, "rope_parameters": {**TEMPERED, "partial_rotary_factor": 0.5}},
    ),
    (
        "Mistral3ForConditionalGeneration",
        "text_config.model_type",
        {"text_config": {**SMALL, "model_type": "mixtral"}},
    ),
    ("Gemma3ForCausalLM", "sliding_window_pattern", {"sliding_window_pattern": 0}),
    ("Gemma3ForCausalLM", "rope_local_base_freq", {"rope_local_base_freq": -1}),
    (
        "Gemma3ForCausalLM",
        "rope_parameters.sliding_attention.rope_theta",
        {"rope_parameters": {LOCAL: {"rope_theta": 0}}},
    ),
]


@pytest.mark.parametrize(("architecture", "key", "changes"), LIES)
def test_a_config_that_lies(architecture: str, key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse(architecture, SMALL, **changes)
    assert f": {key}=" in str(caught.value)


WRONG: list[Any] = [None, True, -1, 0, 10**30, float("nan"), "x", [], [None], {}, {"factor": [1]}]


def places(values: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Each key with the object that has it, nested ones too."""
    found = [(values, key) for key in values]
    for value in values.values():
        found += places(value) if isinstance(value, dict) else []
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_whatever_a_config_says(family: str) -> None:
    """Each value of each key wrong in every way: refused with the file's name, or read."""
    config = config_of(family, list(FAMILIES[family])[-1])
    name = causal_class(config).__name__
    values = {**config.to_dict(), "architectures": [name]}
    read, refused = models.resolve(name).read, []
    read(name, values, "some/config.json")
    for place, key in places(values):
        right = place[key]
        for wrong in WRONG:
            place[key] = wrong
            try:
                read(name, values, "some/config.json")
            except ModelLoadError as error:
                refused.append(error)
        place[key] = right
    assert len(refused) > 50
    assert {error.file for error in refused} == {"some/config.json"}


def test_a_family_that_reads_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd:
        def read(self, architecture: str, values: Any, file: str) -> Any:
            return {"vocab_size": 3}

    monkeypatch.setattr(models, "_registered", {})
    monkeypatch.setattr(models, "_loaded", {})
    models.register("OddForCausalLM", Odd)
    with pytest.raises(PluginError, match=r"'OddForCausalLM'.*gave dict, not a ModelConfig"):
        parse("OddForCausalLM", SMALL)


def test_a_latent_cache_holds_one_vector_per_token() -> None:
    config = parse("DeepseekV3ForCausalLM", SMALL, **DEEPSEEK, **GROUPS)
    taken = KVCache.bytes_per_block(config, 16, torch.bfloat16)
    assert taken == 2 * 16 * config.num_layers * (32 + 8)


def test_what_corrects_the_choice_of_experts_stays_float32(tmp_path: Path) -> None:
    model = random_model("deepseek_v3", "plain")
    model.save_pretrained(tmp_path)
    table = tensor_table(read_config(tmp_path))
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        loader = WeightLoader(checkpoint, table, torch.device("cpu"), torch.bfloat16, None)
        correction = loader("layers.1.experts.correction")
        assert loader("layers.1.experts.router.weight").dtype is torch.bfloat16
    exact = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert correction.dtype is torch.float32
    assert torch.equal(correction, exact)


def test_layers_that_predict_further_tokens_are_left_out() -> None:
    config = parse("DeepseekV3ForCausalLM", SMALL, **DEEPSEEK, **GROUPS)
    assert ignored_tensor("model.layers.3.eh_proj.weight", config)
    assert not ignored_tensor("model.layers.2.eh_proj.weight", config)
    assert not ignored_tensor("model.layers.4.eh_proj.weight", config)


def test_a_window_beyond_the_context_is_none() -> None:
    config = parse("MistralForCausalLM", SMALL, sliding_window=256)
    assert config.layers == ()
    config = parse("MistralForCausalLM", SMALL, sliding_window=255)
    assert {config.layer(i).window for i in range(2)} == {255}


def test_a_checkpoint_without_the_prefix(tmp_path: Path) -> None:
    """As GPT-2's own: saved without its head, and with the masks of old."""
    model = random_model("gpt2", "plain")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 256, 256)
    save_file(tensors, file)
    (ids,) = [torch.arange(50)]
    run = Sequences(load_model(tmp_path, "cpu", torch.float32), [ids])
    run.step(s0=50)
    torch.testing.assert_close(run.logits[0], expected(model, ids), rtol=0, atol=1e-4)


def test_an_unknown_architecture_says_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": ["Gpt17"]}))
    with pytest.raises(ModelLoadError, match=r"architectures=\['Gpt17'\].*GPT2LMHeadModel") as e:
        load_model(tmp_path, "cpu", torch.float32)
    assert "adding-a-model" in str(e.value)


def test_a_model_file_is_short() -> None:
    """On average: it states what differs, and nothing else."""
    built_in = filter(models.is_built_in, models.names())
    families = {type(models.resolve(name)) for name in built_in}
    held = Counter(Path(inspect.getsourcefile(family) or "") for family in families)
    assert [file.name for file, count in held.items() if count > 1] == ["multimodal.py"]
    lines = [
        len(file.read_text("utf-8").splitlines()) for file, count in held.items() if count == 1
    ]
    assert sum(lines) / len(lines) < 80
    assert max(lines) < 120


def test_hunyuan_stretches_its_base_by_alpha() -> None:
    """And leaves the context as it is; what would shrink the base is refused."""

    def hunyuan(alpha: float) -> ModelConfig:
        scaling = {"type": "dynamic", "factor": 2.0, "alpha": alpha}
        return parse("HunYuanDenseV1ForCausalLM", SMALL, rope_scaling=scaling, rope_theta=5_000.0)

    read = hunyuan(1000.0)
    assert read.rope is not None
    assert (read.rope.rope_type, read.max_context) == ("default", 256)
    assert read.rope.theta == pytest.approx(5_000.0 * 1000.0 ** (16 / 14))
    with pytest.raises(ModelLoadError, match=r"alpha=0\.5"):
        hunyuan(0.5)
