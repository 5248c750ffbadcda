"""Every field of `ModelConfig` and its parts is checked when it is made: what no decoder can have
is refused with the field, its value and what it may be."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from asyncinfer.layers import ACTIVATIONS, LearnedActivation, NormKind, RopeConfig
from asyncinfer.models import (
    AttentionTemperature,
    ExpertsConfig,
    GatedDeltaConfig,
    IndexerConfig,
    KimiDeltaConfig,
    LatentConfig,
    LayerConfig,
    MambaConfig,
    ModelConfig,
    PredictorNames,
    ShortConvConfig,
    TensorNames,
)

NAN, INF = float("nan"), float("inf")
ROPE = RopeConfig(original_context=128)
TEMPERATURE = AttentionTemperature(scale=0.1, period=8)
LAYER = LayerConfig(rope=ROPE)
CONVOLUTION = ShortConvConfig(width=3)
CONVOLVED = LayerConfig(rope=None, mixer=CONVOLUTION)
DELTA = GatedDeltaConfig(key_heads=2, heads=4, key_dim=8, value_dim=6, width=4)
MAMBA = MambaConfig(heads=4, head_dim=8, state_dim=6, groups=2, width=4)
EXPERTS = ExpertsConfig(count=8, active=2, intermediate_size=16)
LATENT = LatentConfig(query_rank=None, kv_rank=16, plain=12, rotated=8, value=12)
INDEXER = IndexerConfig(heads=4, size=6, most=9)
INDEXED = IndexerConfig(heads=4, size=8, most=9)
KIMI = KimiDeltaConfig(heads=4, head_dim=8, width=4)
LLAMA = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=128,
)
SIZES = (0, -1, 2**40, 1.5, True, "8", None)
NUMBERS = (0.0, -1.0, NAN, INF, "1", True, [1.0], 10**400)
OPTIONAL = tuple(value for value in NUMBERS if value is not None)
FLAGS = (None, 1, "yes")

MODEL: dict[str, tuple[Any, ...]] = {
    "architecture": (None, 3, ["LlamaForCausalLM"]),
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), SIZES),
    **dict.fromkeys(("num_layers", "num_heads", "head_dim", "max_context"), SIZES),
    "num_kv_heads": (*SIZES, 3, 8),
    "block": ("banana", None, "Pre", ["pre"]),
    "norm": ("banana", "layernorm", "rmsnorm", None, {}),
    "norm_eps": (*NUMBERS, 2.0, None),
    "qk_norm": ("heads", True, ("head",)),
    "rope": ("default", {}, LAYER),
    "layers": ([LAYER, LAYER], (LAYER,), (ROPE, ROPE), None),
    "learned_positions": (0, 127, 128.0, True),
    "activation": ("banana", "SiLU", None, 3, ["silu"]),
    "norm_weight": FLAGS,
    "experts": (8, {}, LATENT),
    "latent": (16, EXPERTS),
    "published": (16, EXPERTS),
    "scheme": (16, EXPERTS),
    **dict.fromkeys(("attention_scale", "attention_softcap", "logit_softcap"), OPTIONAL),
    "attention_out_scale": (*NUMBERS, None),
    **dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), (*NUMBERS, None)),
    **dict.fromkeys(("norm_bias", "gated_mlp", "tied_head", "qkv_bias", "out_bias"), FLAGS),
    **dict.fromkeys(("mlp_bias", "head_bias", "sinks", "attention_gate", "bidirectional"), FLAGS),
    # Nor True without the names.
    "predicts": (*FLAGS, True),
    **dict.fromkeys(("value_norm", "layer_scale", "qk_norm_weight"), FLAGS),
    "per_layer_inputs": (-1, 2**40, 1.5, True, None),
    "head_kv": (2, {}, LATENT),
    "lacking": (1, ["a"]),
    "names": ({}, None, "model."),
    "dtype": ("int8", "torch.float16", 16),
    "bos_token_id": (-1, 100, True, "1"),
    "eos_token_ids": ([1], (-1,), (100,), (True,), None, 1),
    "notes": (["a"], (1,), None, "a"),
}
TEMPERATURES: dict[str, tuple[Any, ...]] = {
    "scale": (*NUMBERS, None),
    "period": (0, -1, True, 1.5, 2**31),
    "offset": (-1, True, 1.5, 2**31),
}
ROPES: dict[str, tuple[Any, ...]] = {
    "rope_type": ("banana", "su", None, []),
    "size": (0, 3, -2, True, 2.0),
    "interleaved": FLAGS,
    "theta": (*NUMBERS, 1.0, None),
    **dict.fromkeys(("factor", "attention_factor", "beta_fast", "beta_slow"), (*NUMBERS, None)),
    "original_context": (-1, 2**31, 1.5, None),
    "turning": (-1, 2**40, 1.5, True, None),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), (*NUMBERS, None)),
    "truncate": FLAGS,
    **dict.fromkeys(("factors", "long_factors"), ([1.0], (0.0,), (NAN,), ("1",), None)),
}
LAYERS: dict[str, tuple[Any, ...]] = {
    "rope": ("default", {}),
    "mixer": ("convolution", {}, EXPERTS),
    "block": ("banana", "Pre", 1, ["pre"]),
    "attention": (1, "yes"),
    "feed_forward": FLAGS,
    "window": (0, -1, True, 1.5, 2**40),
    # True is right beside a window.
    "chunked": (*FLAGS, True),
    "temperature": (0.1, {}, ROPE),
    **dict.fromkeys(("experts", "qk_norm"), FLAGS),
    **dict.fromkeys(("head_dim", "num_kv_heads", "intermediate_size"), (0, -1, True, 1.5, 2**40)),
    "shares_kv": (-1, True, 1.5, 2**40),
    "keys_as_values": FLAGS,
}
MIXTURES: dict[str, tuple[Any, ...]] = {
    "count": SIZES,
    "active": (*SIZES, 9),
    "intermediate_size": SIZES,
    **dict.fromkeys(("normalise", "router_bias", "bias", "correction"), FLAGS),
    "scoring": ("banana", None, "tanh", "sparse-mixer"),
    "groups": (0, 3, 9, True),
    "active_groups": (0, 2, True),
    "group_best": (0, 9, True),
    "scale": (*NUMBERS, None),
    "epsilon": (*NUMBERS, None, 1.5),
    "jitter": (*NUMBERS, None, 1.5),
    "shared_size": (-1, 1.5, True),
    # True is right beside a shared expert.
    "shared_gate": (*FLAGS, True),
    **dict.fromkeys(("weigh_inputs", "router_norm", "expert_scale", "beside"), FLAGS),
    "clamped_swiglu": ((1.0,), [1.0, 2.0], (0.0, 1.0), (1.0, NAN), ("1", 2.0), 7.0),
}
LATENTS: dict[str, tuple[Any, ...]] = {
    "query_rank": (0, -1, True, 1.5),
    **dict.fromkeys(("kv_rank", "plain", "value"), SIZES),
    "rotated": (*SIZES, 7),
    "interleaved": FLAGS,
    # One that is right needs a query_rank, and room for what is rotated.
    "indexer": (8, {}, EXPERTS, INDEXER),
}
INDEXERS: dict[str, tuple[Any, ...]] = {
    "interleaved": FLAGS,
    **dict.fromkeys(("heads", "size"), SIZES),
    "most": (0, -1, True, 1.5, 2**40),
}
KIMIS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("heads", "head_dim"), SIZES),
    "width": (0, 1, True, 2.5, 1025),
}
MAMBAS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("heads", "head_dim", "state_dim"), SIZES),
    "groups": (*SIZES, 3),
    "width": (0, 1, True, 2.5, 1025),
    **dict.fromkeys(("conv_bias", "in_bias", "out_bias"), FLAGS),
    "norm": ("rms", True, ("gate-first",)),
    "steps": (None, [0.0, 1.0], (0.0,), (-1.0, 1.0), (2.0, 1.0), (NAN, 1.0), ("0", 1.0)),
    "in_scales": (None, (1.0,), [1.0] * 5, (1.0, 1.0, 1.0, 1.0, INF), (NAN,) * 5),
    "out_scale": (*NUMBERS, None),
}
DELTAS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("key_heads", "key_dim", "value_dim"), SIZES),
    "heads": (*SIZES, 3),
    "width": (0, 1, True, 2.5, 1025),
    "beta_scale": (*NUMBERS, None),
    "norm_eps": (*OPTIONAL, 2.0),
}
LEARNED: dict[str, tuple[Any, ...]] = {
    "function": ("silu", None),
    "weights": (None, [], ("beta",), (("beta", 1),), (("", (1,)),), (("b", (0,)),), (["b", (1,)],)),
}
NAMES: dict[str, tuple[Any, ...]] = {
    field.name: (None, 3, ("a",), "")
    if isinstance(field.default, str)
    else FLAGS
    if isinstance(field.default, bool)
    else (None, "a", ["a"], ("",), (3,))
    for field in fields(TensorNames)
}
NAMES["fused_experts"] = ("a", ("a",), ["a", "b"], ("a", ""), ("a.{}", "b"), ("a", 3))
NAMES["mlp_modules"] = NAMES["other_prefix"] = NAMES["fused_experts"]
NAMES["prefix"] = (None, 3, ("a",))
NAMES["predictor"] = ("mtp.", ("mtp.",), {})
NAMES["qkv"] += (("q", "kv"), ("g", "q", "k", "v", "x"), ())
NAMES["up"] += (("a", "b", "c"), ())
NAMES["shared_up"] += ((),)
NAMES["delta_in"] += ((), ("a", "b", "c"))
NAMES["delta_conv"] += ((), ("a", "b"))
NAMES["delta_conv_rows"] = (3, (), (0,), (1, 2), [1], (True,))
NAMES["spellings"] = (None, "norm", ("norm",), (("a_norm", "b"),), (("qkv", "b"),), (("norm", ""),))
NAMES["delta_gates"] += ((),)
NAMES["kimi_forget"] += (("a",),)
NAMES["kimi_gate"] += ((),)
NAMES["expert_up"] += (("w1", "w3"), ("{}.w1", "w3"), ("{0}.w1",), ("{.w1",), ())
NAMES["ignored"] += (("(",), ("*",))
PREDICTOR = PredictorNames(prefix="mtp.", join="fc", token_norm="a", hidden_norm="b", norm="c")
PREDICTORS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("prefix", "join", "token_norm", "hidden_norm", "norm"), (None, 3, ("a",), "")),
    "layer": (None, 3, ("a",)),
    "copies": ("a", None, ["a"], (3,)),
}

PARTS: list[tuple[Any, dict[str, tuple[Any, ...]]]] = [
    (LLAMA, MODEL),
    (ROPE, ROPES),
    (LAYER, LAYERS),
    (TEMPERATURE, TEMPERATURES),
    (CONVOLUTION, {"width": (0, 1, -3, True, 2.5, 1025), "bias": FLAGS}),
    (DELTA, DELTAS),
    (MAMBA, MAMBAS),
    (EXPERTS, MIXTURES),
    (LATENT, LATENTS),
    (INDEXER, INDEXERS),
    (KIMI, KIMIS),
    (TensorNames(), NAMES),
    (PREDICTOR, PREDICTORS),
    (LearnedActivation(abs, ()), LEARNED),
]


def refusal(part: Any, field: str, value: Any) -> str:
    """What is said about a value; nothing where it is taken."""
    try:
        replace(part, **{field: value})
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("part", "bad"), PARTS, ids=lambda it: type(it).__name__)
def test_every_field(part: Any, bad: dict[str, tuple[Any, ...]]) -> None:
    assert sorted(bad) == sorted(field.name for field in fields(part))
    for field, values in bad.items():
        for value in values:
            said = refusal(part, field, value)
            assert said.startswith(f"{type(part).__name__}.{field}="), (field, value)
            assert len(said) < 400


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        ("norm", get_args(NormKind)),
        ("activation", ACTIVATIONS),
        ("block", ("pre", "post", "sandwich", "parallel", "parallel-shared")),
        ("qk_norm", (None, "head", "projection")),
        ("dtype", (None, "float32", "float16", "bfloat16")),
    ],
)
def test_what_is_allowed_is_said_and_taken(field: str, choices: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="'banana'") as caught:
        replace(LLAMA, **{field: "banana"})
    for choice in choices:
        assert repr(choice) in str(caught.value)
        assert getattr(replace(LLAMA, **{field: choice}), field) == choice


SCALED = RopeConfig(rope_type="yarn", factor=2.0, original_context=64)
LONG = RopeConfig(
    rope_type="longrope", original_context=64, factors=(1.0,) * 4, long_factors=(2.0,) * 4
)
GROUPED = replace(EXPERTS, count=8, groups=4, active_groups=2, active=4)
MLA = replace(
    LLAMA, latent=LATENT, head_dim=24, num_kv_heads=1, rope=replace(ROPE, size=8, theta=5.0)
)
#: What is right, what is changed in it, the field that is blamed.
TOGETHER: list[tuple[Any, dict[str, Any], str]] = [
    (LLAMA, {"head_dim": 7}, "head_dim"),
    (LLAMA, {"head_dim": 2, "rope": RopeConfig(rope_type="dynamic", original_context=8)}, "head_d"),
    (LLAMA, {"rope": replace(ROPE, size=10)}, "rope"),
    (LLAMA, {"layers": (LAYER, LayerConfig(rope=replace(ROPE, size=10)))}, "rope"),
    (LLAMA, {"rope": replace(LONG, factors=(1.0,) * 3)}, "rope"),
    (LLAMA, {"rope": replace(LONG, long_factors=(1.0,) * 5)}, "rope"),
    (LLAMA, {"gated_mlp": False}, "names"),
    (LLAMA, {"names": TensorNames(transposed=True)}, "names"),
    (LLAMA, {"names": TensorNames(transposed=True, qkv=("qkv",))}, "names"),
    (LLAMA, {"names": TensorNames(qkv=("gate", "q", "k", "v"))}, "names"),
    (LLAMA, {"names": TensorNames(qkv_by_head=True)}, "names"),
    (LLAMA, {"names": TensorNames(qkv_by_head=True, qkv=("qkv",))}, "names"),
    (LLAMA, {"experts": EXPERTS, "gated_mlp": False}, "names"),
    (
        LLAMA,
        {"experts": replace(EXPERTS, clamped_swiglu=(1.0, 2.0)), "gated_mlp": False},
        "gated_mlp",
    ),
    (LLAMA, {"block": "post", "layers": (LAYER, replace(LAYER, feed_forward=False))}, "block"),
    (
        LLAMA,
        {"layers": (replace(LAYER, window=8), replace(LAYER, feed_forward=False))},
        "layers",
    ),
    (LAYER, {"mixer": CONVOLUTION}, "rope"),
    (LAYER, {"mixer": DELTA, "attention": False}, "rope"),
    (LAYER, {"attention": False}, "rope"),
    (LayerConfig(rope=None), {"attention": False, "feed_forward": False}, "feed_forward"),
    (
        replace(LLAMA, names=TensorNames(transposed=True, qkv=("qkv",), up=("up",))),
        {"experts": replace(EXPERTS, shared_size=8)},
        "names",
    ),
    (LLAMA, {"experts": EXPERTS, "activation": "xielu"}, "activation"),
    (LLAMA, {"norm": "rms-plus-one", "norm_weight": False}, "norm_weight"),
    (MLA, {"rope": replace(ROPE, size=8, interleaved=True)}, "rope"),
    (MLA, {"head_dim": 8}, "head_dim"),
    (MLA, {"attention_gate": True}, "attention_gate"),
    (LLAMA, {"attention_gate": True, "names": TensorNames(qkv=("qkv",))}, "attention_gate"),
    (LLAMA, {"attention_gate": True, "rope": replace(ROPE, interleaved=True)}, "attention_gate"),
    (MLA, {"num_kv_heads": 2}, "num_kv_heads"),
    (MLA, {"bidirectional": True}, "bidirectional"),
    (MLA, {"value_norm": True}, "value_norm"),
    (LLAMA, {"layers": (LAYER, replace(LAYER, num_kv_heads=3))}, "layers"),
    (LLAMA, {"layers": (LAYER, replace(LAYER, shares_kv=1))}, "layers"),
    (LLAMA, {"layers": (replace(LAYER, shares_kv=0), LAYER)}, "layers"),
    (LLAMA, {"layers": (LAYER, replace(LAYER, shares_kv=0, window=9))}, "layers"),
    (LLAMA, {"layers": (LAYER, replace(LAYER, shares_kv=0, head_dim=4))}, "layers"),
    (LLAMA, {"layers": (LayerConfig(rope=None), replace(LAYER, shares_kv=0))}, "layers"),
    (LLAMA, {"layers": (CONVOLVED, LayerConfig(rope=None, shares_kv=0))}, "layers"),
    (LayerConfig(rope=None), {"shares_kv": 0, "keys_as_values": True}, "shares_kv"),
    (LLAMA, {"bidirectional": True, "sinks": True}, "bidirectional"),
    (LLAMA, {"bidirectional": True, "attention_softcap": 30.0}, "bidirectional"),
    (LLAMA, {"bidirectional": True, "layers": (CONVOLVED, CONVOLVED)}, "bidirectional"),
    (MLA, {"qk_norm": "head"}, "qk_norm"),
    (
        replace(MLA, latent=replace(LATENT, query_rank=8, indexer=INDEXED), head_dim=32),
        {"rope": None},
        "rope",
    ),
    (replace(LATENT, query_rank=8), {"indexer": INDEXER}, "indexer"),
    (EXPERTS, {"beside": True, "shared_size": 8}, "beside"),
    (
        LLAMA,
        {"layers": tuple(LayerConfig(rope=ROPE, window=n, chunked=True) for n in (8, 16))},
        "layers",
    ),
    (
        LLAMA,
        {"layers": (LayerConfig(rope=ROPE, window=8, chunked=True), LAYER), "bidirectional": True},
        "bidirectional",
    ),
    (LayerConfig(rope=None, mixer=CONVOLUTION), {"temperature": TEMPERATURE}, "temperature"),
    (MLA, {"rope": ROPE}, "rope"),
    (SCALED, {"original_context": 0}, "original_context"),
    (SCALED, {"beta_slow": 33.0}, "beta_fast"),
    (SCALED, {"high_freq_factor": 0.9}, "high_freq_factor"),
    (SCALED, {"rope_type": "dynamic", "size": 2}, "size"),
    (LONG, {"factors": ()}, "factors"),
    (LONG, {"size": 6}, "factors"),
    (GROUPED, {"active": 5}, "active_groups"),
    (replace(GROUPED, active=2), {"groups": 8, "group_best": 2}, "group_best"),
]


@pytest.mark.parametrize(("right", "changes", "field"), TOGETHER)
def test_fields_that_do_not_go_together(right: Any, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{type(right).__name__}.{field}"):
        replace(right, **changes)


def test_scale_of_attention() -> None:
    """Nobody has to state what the number of dimensions says."""
    assert LLAMA.query_scale == 8**-0.5
    assert MLA.query_scale == 20**-0.5
    assert replace(MLA, attention_scale=2.0).query_scale == 2.0
