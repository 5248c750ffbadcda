"""Values of `config.json` for models with layers that keep a state, from GGUF files."""

from __future__ import annotations

from typing import Any

from asyncinfer.models.gguf.derived import granite_experts, latent_values
from asyncinfer.models.gguf.facts import Facts
from asyncinfer.models.windows import FULL

__all__ = [
    "delta_values",
    "falcon_values",
    "granite_hybrid_values",
    "kimi_values",
    "lfm2_moe_values",
    "lfm2_values",
    "nemotron_values",
]

_LINEAR = "linear_attention"


def lfm2_values(facts: Facts) -> dict[str, Any]:
    """Which layers attend."""
    return _attending(facts, "layer_types", "conv")


def lfm2_moe_values(facts: Facts) -> dict[str, Any]:
    """Which layers attend, and whether a bias takes part in choosing experts."""
    return {**lfm2_values(facts), "use_expert_bias": "exp_probs_b.bias" in facts.parts}


def granite_hybrid_values(facts: Facts) -> dict[str, Any]:
    """Granite 4 with Mamba-2 layers. The file calls a rotation that is used "finetuned"."""
    inner, hidden = facts.get("ssm.inner_size"), facts.get("embedding_length")
    whole = type(inner) is int and type(hidden) is int and hidden > 0
    rotated = facts.get("rope.scaling.finetuned") is True
    return {
        **_attending(facts, "layer_types", _LINEAR),
        **_mamba(facts),
        **granite_experts(facts),
        "mamba_expand": inner // hidden if whole else None,
        "position_embedding_type": "rope" if rotated else None,
    }


def falcon_values(facts: Facts) -> dict[str, Any]:
    """The state space in parallel with attention. In llama.cpp a norm always follows its gate."""
    return {
        **_mamba(facts),
        "mamba_d_ssm": facts.get("ssm.inner_size"),
        "mamba_rms_norm": "ssm_norm.weight" in facts.parts,
        "mamba_norm_before_gate": False,
    }


def nemotron_values(facts: Facts) -> dict[str, Any]:
    """The kind of each layer: those with KV heads attend, those with a width feed forward."""
    widths, heads = facts.by_layer("feed_forward_length"), _kv_heads(facts)
    fed = "moe" if facts.get("expert_count") else "mlp"
    kinds = [
        FULL if count else fed if width else _LINEAR
        for count, width in zip(heads, widths, strict=False)
    ]
    mamba = _mamba(facts)
    return {
        "num_key_value_heads": _most(heads),
        "intermediate_size": _most(widths),
        "layers_block_type": kinds,
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "ssm_state_size": mamba["mamba_d_state"],
        "n_groups": mamba["mamba_n_groups"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
    }


def delta_values(facts: Facts) -> dict[str, Any]:
    """Heads of gated delta nets, and which layers have them, if the file lists these."""
    inner, heads = facts.get("ssm.inner_size"), facts.get("ssm.time_step_rank")
    whole = type(inner) is int and type(heads) is int and heads > 0
    listed = facts.by_layer("attention.recurrent_layers")
    kinds = [_LINEAR if flag else FULL for flag in listed]
    return {
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads if whole else None,
        **({"layer_types": kinds} if kinds else {}),
    }


def kimi_values(facts: Facts) -> dict[str, Any]:
    """Heads of Kimi Delta Attention, which layers without KV heads have. In llama.cpp experts are
    always normalised."""
    return {
        **latent_values(facts),
        "layer_types": [FULL if count else _LINEAR for count in _kv_heads(facts)],
        "linear_num_heads": facts.get("attention.head_count"),
        "norm_topk_prob": True,
    }


def _attending(facts: Facts, key: str, other: str) -> dict[str, Any]:
    """The kinds of layers, with `other` for those without KV heads, and the number of KV heads."""
    heads = _kv_heads(facts)
    kinds = [FULL if count else other for count in heads]
    return {"num_key_value_heads": _most(heads), key: kinds}


def _kv_heads(facts: Facts) -> list[Any]:
    return facts.by_layer("attention.head_count_kv")


def _most(values: list[Any]) -> Any:
    """The only number besides zeros; all values if there is another one."""
    found = {value for value in values if value}
    return found.pop() if len(found) == 1 else values


def _mamba(facts: Facts) -> dict[str, Any]:
    get = facts.get
    inner, heads = get("ssm.inner_size"), get("ssm.time_step_rank")
    whole = type(inner) is int and type(heads) is int and heads > 0
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads if whole else None,
        "mamba_d_state": get("ssm.state_size"),
        "mamba_n_groups": get("ssm.group_count"),
        "mamba_d_conv": get("ssm.conv_kernel"),
        "mamba_conv_bias": "ssm_conv1d.bias" in facts.parts,
    }
