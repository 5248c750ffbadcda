"""`ModelConfig`: what `config.json` may say, and every lie refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncinfer.builtin import DRAFT_PATH, MODEL_PATH
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import parse_config, read_config

GOOD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MISSING = object()


def changed(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**GOOD, **changes}.items() if value is not MISSING}


def test_what_is_left_out() -> None:
    config = parse_config(changed(num_key_value_heads=MISSING))
    assert (config.num_kv_heads, config.head_dim, config.max_context) == (4, 16, 512)
    assert config.rope is not None
    assert (config.norm_eps, config.rope.theta) == (1e-6, 10_000.0)
    assert (config.tied_head, config.qkv_bias, config.mlp_bias) == (False, False, False)
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == (None, None, ())


def test_null_is_left_out() -> None:
    names = ("head_dim", "num_key_value_heads", "rope_scaling", "rope_theta", "rms_norm_eps")
    assert parse_config(changed(**dict.fromkeys(names), auto_map=None)) == parse_config(
        changed(num_key_value_heads=4)
    )


def test_a_key_that_nobody_reads_is_ignored() -> None:
    assert parse_config(changed(qk_layernorm=True, nobody_reads_this=3)) == parse_config(GOOD)


def test_what_is_given() -> None:
    config = parse_config(
        changed(head_dim=80, torch_dtype="torch.float16", bos_token_id=3, eos_token_id=[1, 2])
    )
    assert (config.head_dim, config.dtype) == (80, "float16")
    assert (config.bos_token_id, config.eos_token_ids) == (3, (1, 2))
    assert parse_config(changed(eos_token_id=7)).eos_token_ids == (7,)
    assert parse_config(changed(hidden_size=65, head_dim=16)).head_dim == 16


@pytest.mark.parametrize("folder", [MODEL_PATH, DRAFT_PATH], ids=["model", "draft"])
def test_shipped_models(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    config = read_config(folder)
    assert (config.vocab_size, config.num_layers) == (
        values["vocab_size"],
        values["num_hidden_layers"],
    )


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
#: What config.json says -> the key that the error names.
LIES: list[tuple[str, dict[str, Any]]] = [  # fault 45
    *[(key, {key: MISSING}) for key in GOOD if key != "num_key_value_heads"],
    *[(key, {key: value}) for key in GOOD for value in (0, -1, True, "64", 1.5, [4], 10**12)],
    ("architectures", {"architectures": ["Gpt17ForCausalLM"]}),
    ("architectures", {"architectures": []}),
    ("hidden_size", {"hidden_size": 66}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("num_key_value_heads", {"num_key_value_heads": 8}),
    ("head_dim", {"head_dim": 15}),
    ("head_dim", {"head_dim": 4096}),
    ("head_dim", {"num_attention_heads": 64, "num_key_value_heads": 64}),
    ("hidden_act", {"hidden_act": "relu6"}),
    ("hidden_act", {"hidden_act": 3}),
    ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
    ("rms_norm_eps", {"rms_norm_eps": -1e-5}),
    ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
    ("attention_bias", {"attention_bias": 1}),
    ("mlp_bias", {"mlp_bias": "no"}),
    ("dtype", {"dtype": "float8_e4m3fn"}),
    ("torch_dtype", {"torch_dtype": "int8"}),
    ("eos_token_id", {"eos_token_id": 100}),
    ("eos_token_id", {"eos_token_id": [1, "2"]}),
    ("bos_token_id", {"bos_token_id": -1}),
    ("quantization_config.quant_method", {"quantization_config": {"quant_method": "quark"}}),
    ("quantization_config.bits", {"quantization_config": {"quant_method": "gptq"}}),
    ("quantization_config.quant_method", {"quantization_config": {"bits": 4}}),
    ("quantization_config", {"quantization_config": "gptq"}),
    ("rope_theta", {"rope_theta": 0}),
    ("rope_theta", {"rope_theta": float("inf")}),
    ("rope_scaling", {"rope_scaling": "linear"}),
    ("rope_scaling.type", {"rope_scaling": {"type": "magic", "factor": 2.0}}),
    ("rope_scaling.short_factor", {"rope_scaling": {"type": "longrope"}}),
    ("rope_scaling.short_factor", {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 7}}),
    ("rope_scaling.long_factor", {"rope_scaling": {**LONGROPE, "long_factor": [0.0] * 8}}),
    ("rope_scaling.long_factor", {"rope_scaling": {**LONGROPE, "long_factor": ["1"] * 8}}),
    ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": 3, "factor": 2.0}}),
    ("rope_scaling.factor", {"rope_scaling": {"type": "linear"}}),
    ("rope_scaling.factor", {"rope_scaling": {"type": "linear", "factor": 0.5}}),
    ("rope_scaling.factor", {"rope_scaling": {"type": "dynamic", "factor": float("nan")}}),
    ("rope_scaling.type", {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("rope_parameters.high_freq_factor", {"rope_parameters": {**LLAMA3, "high_freq_factor": 0.9}}),
    ("rope_parameters.low_freq_factor", {"rope_parameters": {**LLAMA3, "low_freq_factor": None}}),
    ("rope_parameters.beta_fast", {"rope_parameters": {**YARN, "beta_fast": 0.5}}),
    ("rope_parameters.truncate", {"rope_parameters": {**YARN, "truncate": 1}}),
    ("rope_parameters.attention_factor", {"rope_parameters": {**YARN, "attention_factor": -1}}),
    (
        "rope_parameters.original_max_position_embeddings",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 0}},
    ),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("rope_parameters.full_attention", {"rope_parameters": {"full_attention": YARN}}),
]


@pytest.mark.parametrize(("key", "changes"), LIES)
def test_a_config_that_lies(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError) as caught:
        parse_config(changed(**changes), file="some/config.json")
    assert caught.value.file == "some/config.json"
    assert f": {key}=" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe{}", "cannot be read as JSON"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"vocab_size": 1' + b"0" * 5_000 + b"}", "cannot be read as JSON"),
        (b"[]", "must hold a JSON object"),
        (b'{"a": 1, "vocab_size": 5, "vocab_size": 6}', "'vocab_size' occurs twice"),
        (b" " * ((16 << 20) + 1), "more than"),
    ],
)
def test_a_config_that_is_no_json(tmp_path: Path, content: bytes, why: str) -> None:  # fault 45
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=why) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in str(caught.value.file)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file"):
        read_config(tmp_path)
