"""`quantization_config`: what is understood, and what is refused by the key at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.utils import match_targets
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from models.hostile_json import VALUES, changed
from quantization.quantised import AWQ, BNB, CASES, GPTQ, GROUPS, ROUND, group, hqq_config
from transformers import LlamaConfig

from asyncinfer.errors import ModelLoadError
from asyncinfer.models import examine, parse_config, read_config
from asyncinfer.models.quantised import read_scheme
from asyncinfer.models.reader import JsonReader
from asyncinfer.planner import plan
from asyncinfer.quantization.schemes import (
    Bnb4Matrix,
    Fp4Matrix,
    Fp8Matrix,
    GptqMatrix,
    HqqMatrix,
    IntMatrix,
    Scheme,
)

PREFIX = "quantization_config."
FP8 = {"quant_method": "fp8"}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "model.layers.0.mlp.up_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    },
}
NVFP4 = Fp4Matrix(16, ".weight", ".weight_scale_2")
PACKED = group("pack-quantized", **GROUPS)


def refusal(config: Any) -> str:
    """What is said about a config that is refused; empty for one that is not."""
    try:
        found = read(config)
    except ModelLoadError as error:
        return str(error)
    if found is not None:
        found.format("model.layers.0.mlp.up_proj")
    return ""


def read(config: Any) -> Scheme | None:
    return read_scheme(JsonReader({"quantization_config": config}, "config.json"))


def weights(**changes: Any) -> dict[str, Any]:
    """compressed-tensors with other arguments of the weights."""
    return group("pack-quantized", **{**GROUPS, **changes})


def hqq(**changes: Any) -> dict[str, Any]:
    params = hqq_config(4, 64, 1)
    inner = {**params["quant_config"]["weight_quant_params"], **changes}
    return {**params, "quant_config": {"weight_quant_params": inner}}


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("quant_method", {"quant_method": "quark"}),
        ("quant_method", {"quant_method": "a\0b" * 200}),
        ("quant_method", {"bits": 4}),
        ("quant_method", {"quant_method": 4}),
        ("fmt", {**FP8, "fmt": "e5m2"}),
        ("activation_scheme", {**FP8, "activation_scheme": "sometimes"}),
        ("expert_dtype", {**FP8, "expert_dtype": "fp4"}),
        ("weight_block_size", {**FP8, "weight_block_size": [128]}),
        ("weight_block_size", {**FP8, "weight_block_size": [0, 128]}),
        ("weight_block_size", {**FP8, "weight_block_size": 128}),
        ("modules_to_not_convert", {**FP8, "modules_to_not_convert": "lm_head"}),
        ("modules_to_not_convert", {**FP8, "modules_to_not_convert": ["re:(a+)+"]}),
        ("ignored_layers", {**FP8, "ignored_layers": [3]}),
        ("quant_algo", {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}),
        ("quant_algo", {"quant_method": "modelopt"}),
        ("quant_algo", {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}),
        (
            "quantized_layers.a.quant_algo",
            {**MIXED, "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
        ),
        ("quantization.quant_algo", {"quantization": {"quant_algo": "INT4_AWQ"}}),
        ("packing_format", {**ROUND, "packing_format": "auto_round:auto_gptq:marlin"}),
        ("bits", {**ROUND, "bits": 3}),
        ("bits", {**ROUND, "bits": 16}),
        ("data_type", {**ROUND, "data_type": "mx_fp"}),
        ("extra_config.a.bits", {**ROUND, "extra_config": {"a": {"bits": 5}}}),
        ("extra_config", {**ROUND, "extra_config": {"(": {"bits": 8}}}),
        ("extra_config.a", {**ROUND, "extra_config": {"a": 8}}),
        ("bits", {**GPTQ, "bits": 3}),
        ("bits", {**GPTQ, "bits": None}),
        ("group_size", {**GPTQ, "group_size": 0}),
        ("group_size", {**GPTQ, "group_size": 2**40}),
        ("desc_act", {**GPTQ, "desc_act": "yes"}),
        ("checkpoint_format", {**GPTQ, "checkpoint_format": "marlin"}),
        ("is_marlin_format", {**GPTQ, "is_marlin_format": True}),
        ("pack_dtype", {**GPTQ, "pack_dtype": "int16"}),
        ("dynamic", {**GPTQ, "dynamic": [1]}),
        ("dynamic", {**GPTQ, "dynamic": {f"+:m{i}": {} for i in range(1025)}}),
        ("config_groups", {**PACKED, "config_groups": {f"g{i}": {} for i in range(1025)}}),
        ("dynamic.+:(", {**GPTQ, "dynamic": {"+:(": {"bits": 8}}}),
        ("bits", {**GPTQ, "dynamic": {".*up_proj": {"bits": 5}}}),
        ("version", {**AWQ, "version": "gemv"}),
        ("bits", {**AWQ, "bits": 2}),
        ("load_in_4bit", {**BNB, "load_in_4bit": False}),
        ("load_in_4bit", {**BNB, "load_in_4bit": "yes"}),
        ("bnb_4bit_quant_type", {**BNB, "bnb_4bit_quant_type": "int4"}),
        ("quant_config", {"quant_method": "hqq"}),
        ("quant_config.weight_quant_params", {"quant_method": "hqq", "quant_config": {"a": None}}),
        ("quant_config.weight_quant_params.nbits", hqq(nbits=3)),
        ("quant_config.weight_quant_params.axis", hqq(axis=2)),
        ("quant_config.weight_quant_params.view_as_float", hqq(view_as_float=True)),
        ("quant_config.weight_quant_params.channel_wise", hqq(channel_wise=False)),
        (
            "quant_config.scale_quant_params",
            {
                "quant_method": "hqq",
                "quant_config": {"weight_quant_params": {}, "scale_quant_params": {"nbits": 8}},
            },
        ),
        ("format", {**PACKED, "format": "marlin-24"}),
        ("format", {**PACKED, "format": None}),
        ("quantization_status", {**PACKED, "quantization_status": "calibration"}),
        ("sparsity_config.format", {**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}),
        ("transform_config", {**PACKED, "transform_config": {"config_groups": {"a": {}}}}),
        ("config_groups", {**PACKED, "config_groups": None}),
        ("config_groups", {**PACKED, "config_groups": {"a": {"weights": None}}}),
        ("config_groups.a", {**PACKED, "config_groups": {"a": 3}}),
        ("ignore", {**PACKED, "ignore": {"a": 1}}),
        ("config_groups.group_0.weights.num_bits", weights(num_bits=3)),
        ("config_groups.group_0.weights.type", weights(type="complex")),
        ("config_groups.group_0.weights.type", weights(type="float")),
        ("config_groups.group_0.weights.strategy", weights(strategy="block")),
        ("config_groups.group_0.weights.strategy", weights(strategy="token")),
        ("config_groups.group_0.weights.group_size", weights(group_size=None)),
        ("config_groups.group_0.weights.group_size", weights(group_size=-1)),
        ("config_groups.group_0.weights.actorder", weights(actorder="sorted")),
        ("config_groups.group_0.weights.symmetric", weights(symmetric=1)),
        ("config_groups.group_0.targets", group("int-quantized", ["re:["], num_bits=8)),
    ],
)
def test_what_is_refused(key: str, config: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError) as refused:
        read(config)
    said = str(refused.value)
    assert f": {PREFIX}{key}=" in said
    assert len(said) < 1_500


def test_weights_that_are_stored_turned() -> None:
    """GPT-2's are [in, out], where every scheme means something else."""
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": 199}
    values = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **small}
    assert parse_config(values).scheme is None
    with pytest.raises(ModelLoadError, match=r": quantization_config=.*GPT2LMHeadModel"):
        parse_config({**values, "quantization_config": GPTQ})


def test_as_they_are_published() -> None:
    """Values as in the files of their makers."""
    deepseek = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert read(deepseek) == Scheme("fp8", ((None, Fp8Matrix((128, 128))),))
    static = {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"}
    found = read(static)
    assert found is not None
    assert found.format("model.layers.0.mlp.up_proj") == Fp8Matrix(None)
    assert found.planned("lm_head") is None
    # Before a `quant_method` was written.
    older = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    found = read(older)
    assert found is not None
    assert found.format("x") == Bnb4Matrix("nf4", True)
    values = {"compression_config": {k: v for k, v in PACKED.items() if k != "quant_method"}}
    found = read_scheme(JsonReader(values, "config.json"))
    assert found is not None
    assert found.format("x") == IntMatrix(4, 32)
    # As Meta-Llama-3.1-8B-Instruct-FP8-hf has it, whose weights are compressed.
    assert read({**PACKED, "quantization_status": "frozen"}) == read(PACKED)
    # Of a model with images, whose text alone is quantised.
    nested = JsonReader({"text_config": {"quantization_config": PACKED}}, "config.json")
    assert read_scheme(nested) == read(PACKED)
    # The old spelling of a name, and that of the plugin of other engines.
    assert read({**PACKED, "quant_method": "compressed_tensors"}) == read(PACKED)
    assert read({**ROUND, "quant_method": "intel/auto-round"}) == read(ROUND)
    awq = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True}
    assert read(awq) is not None
    assert read({}) is None
    assert read(None) is None


def test_what_nvidia_writes_beside_the_config(tmp_path: Path) -> None:
    """At first `config.json` said nothing."""
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside = {"producer": {"name": "modelopt", "version": "0.19"}, "quantization": said}
    values = {**LlamaConfig(num_hidden_layers=1).to_dict(), "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    found = read_config(tmp_path).scheme
    assert found is not None
    assert found == examined(tmp_path) == read(beside)
    assert found.planned("model.layers.0.mlp.up_proj") == Fp8Matrix()
    assert found.planned("lm_head") is None
    assert {one.name for one in plan(tmp_path).stored} == {"modelopt", "bfloat16"}
    said["quant_algo"] = "W4A8_AWQ"
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(ModelLoadError, match=r"hf_quant_config\.json\.quantization\.quant_algo="):
        read_config(tmp_path)
    # Keys and values alone are quantised.
    del said["quant_algo"]
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert read_config(tmp_path).scheme is None


def examined(folder: Path) -> Scheme | None:
    found = examine(folder / "config.json").config
    assert found is not None
    return found.scheme


def test_formats_of_single_modules() -> None:
    found = read(
        {
            **ROUND,
            "extra_config": {
                "lm_head": {"bits": 16, "data_type": "fp"},
                "model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 64},
                ".*\\.1\\.mlp\\.up_proj": {"bits": 8, "group_size": 64},
            },
        }
    )
    assert found is not None
    wide = GptqMatrix(8, 64)
    assert found.planned("lm_head") is None
    assert found.planned("model.layers.0.mlp.up_proj") == wide
    assert found.planned("model.layers.1.mlp.up_proj") == wide
    assert found.planned("model.layers.2.mlp.up_proj") == GptqMatrix(4, 32)
    # A module's own settings come first, and expressions may begin anywhere.
    found = read(
        {
            **ROUND,
            "extra_config": {
                "mlp\\.(up|down)_proj$": {"bits": 8, "group_size": 64},
                "^model.*": {"bits": 2},
                "model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 16},
                "model.layers.0.mlp.down_proj": {"bits": 16},
            },
        }
    )
    assert found is not None
    assert found.format("model.layers.0.mlp.up_proj") == GptqMatrix(4, 16)
    assert found.planned("model.layers.0.mlp.down_proj") is None
    assert found.planned("model.layers.1.mlp.up_proj") == wide
    assert found.planned("model.layers.1.mlp.down_proj") == wide
    assert found.planned("model.layers.1.mlp.gate_proj") == GptqMatrix(2, 32)
    found = read(MIXED)
    assert found is not None
    assert found.format("model.layers.0.mlp.up_proj") == Fp8Matrix()
    assert found.format("model.layers.1.mlp.up_proj") == NVFP4
    assert found.format("model.layers.2.mlp.up_proj") is None


def test_formats_by_module() -> None:
    rules = {"+:.*up_proj": {"bits": 8, "group_size": -1}, "-:.*layers\\.0\\..*": {}}
    mixed = read({**GPTQ, "dynamic": rules})
    assert mixed is not None
    assert mixed.format("model.layers.1.mlp.up_proj") == GptqMatrix(8, None)
    assert mixed.format("model.layers.1.mlp.down_proj") == GptqMatrix(4, 32)
    assert mixed.planned("model.layers.0.mlp.down_proj") is None

    args = {"nbits": 4, "group_size": 64, "axis": 1}
    tags = {"self_attn.q_proj": {"weight_quant_params": args}}
    tags["mlp.up_proj"] = {"weight_quant_params": {**args, "nbits": 2, "axis": 0}}
    hqq_by_tag = read({"quant_method": "hqq", "quant_config": tags, "skip_modules": ["lm_head"]})
    assert hqq_by_tag is not None
    assert hqq_by_tag.format("model.layers.3.mlp.up_proj") == HqqMatrix(2, 64, 0)
    assert hqq_by_tag.format("model.layers.3.mlp.down_proj") is None

    groups = group("mixed-precision", ["re:.*self_attn.*"], **GROUPS)
    groups["config_groups"]["group_0"]["format"] = "pack-quantized"
    groups["config_groups"]["group_1"] = {
        "format": "float-quantized",
        "targets": ["re:.*mlp.*"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }
    two = read(groups)
    assert two is not None
    assert two.format("model.layers.0.self_attn.q_proj") == IntMatrix(4, 32)
    assert two.format("model.layers.0.mlp.up_proj") == Fp8Matrix()
    assert two.format("model.embed_tokens") is None


@pytest.mark.parametrize("turn", range(4))
def test_the_most_particular_target_of_compressed_tensors_decides(turn: int) -> None:
    """As its own library looks for one: else zero points that a matrix has would be left aside."""
    wide, skewed = {**GROUPS, "group_size": 64}, {**GROUPS, "symmetric": False}
    made = (
        (["Linear"], GROUPS, IntMatrix(4, 32)),
        (["re:.*down_proj"], skewed, IntMatrix(4, 32, symmetric=False)),
        (["re:.*[du].*_proj"], wide, IntMatrix(4, 64)),
        (["model.layers.1.mlp.down_proj"], {**GROUPS, "num_bits": 8}, IntMatrix(8, 32)),
    )
    several = (*made[turn:], *made[:turn])
    config = {**PACKED, "config_groups": {}}
    for number, (targets, args, _) in enumerate(several):
        config["config_groups"][f"group_{number}"] = {"targets": targets, "weights": args}
    found = read(config)
    assert found is not None
    linear, of = torch.nn.Linear(1, 1), {targets[0]: right for targets, _, right in several}
    for layer in range(2):
        for part in ("mlp.down_proj", "mlp.up_proj", "self_attn.o_proj"):
            module = f"model.layers.{layer}.{part}"
            assert found.format(module) == of[match_targets(module, linear, list(of))[0]]


@fuzz(400)
@given(data=st.data())
def test_fuzz(data: st.DataObject) -> None:  # fault 45
    bases = [case.config for case in CASES.values()]
    more = ("quant_method", "bits", "format", "ignore", "group_size", "dynamic", "config_groups")
    config = data.draw(st.sampled_from(bases).flatmap(lambda base: changed(base, more)))
    said = refusal(config)
    assert not said or ": quantization_config" in said
    assert len(said) < 3_000


@pytest.mark.parametrize("name", CASES)
def test_each_key(name: str) -> None:  # fault 45
    config = CASES[name].config
    for key in config:
        for value in VALUES[len(key) % 4 :: 4]:
            said = refusal({**config, key: value})
            assert not said or ": quantization_config" in said
