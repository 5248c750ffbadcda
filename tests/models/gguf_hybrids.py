"""What llama.cpp's converter writes of models with layers that keep a state, beside what it writes
of every model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from models.families import GLOBAL

__all__ = ["HYBRIDS", "hybrid_metadata", "hybrid_pieces"]

#: transformers' name of a family -> GGUF's.
HYBRIDS = {
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "kimi_linear": "kimi-linear",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "nemotron_h": "nemotron_h",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_next": "qwen3next",
}
DELTAS = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")

Array = np.ndarray[Any, Any]


def hybrid_metadata(config: Any) -> dict[str, Any]:
    """Values of the file, by keys without the architecture's name."""
    kind = config.model_type
    if kind.startswith("lfm2"):
        return _lfm2(config)
    if kind in DELTAS:
        return _delta(config)
    if kind == "kimi_linear":
        return {}
    if kind == "nemotron_h":
        return _nemotron(config)
    inner = config.mamba_d_ssm if kind == "falcon_h1" else None
    values = {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.time_step_rank": config.mamba_n_heads,
        "ssm.inner_size": inner or config.mamba_expand * config.hidden_size,
    }
    if kind == "granitemoehybrid":
        values |= {
            "attention.head_count_kv": _kv_heads(config, config.layer_types),
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            # What files call it that attention is rotated.
            "rope.scaling.finetuned": config.position_embedding_type == "rope",
        }
    return values


def _kv_heads(config: Any, kinds: list[str]) -> list[int]:
    return [config.num_key_value_heads if kind == GLOBAL else 0 for kind in kinds]


def _lfm2(config: Any) -> dict[str, Any]:
    values = {
        "attention.head_count_kv": _kv_heads(config, config.layer_types),
        "shortconv.l_cache": config.conv_L_cache,
    }
    if config.model_type == "lfm2_moe":
        return {
            **values,
            "leading_dense_block_count": config.num_dense_layers,
            "expert_gating_func": 2,
            # The converter leaves it out: no published model has another.
            "expert_weights_scale": float(config.routed_scaling_factor),
        }
    width = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width = int(config.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // config.block_multiple_of) * config.block_multiple_of
    return {**values, "feed_forward_length": width}


def _delta(config: Any) -> dict[str, Any]:
    heads = config.linear_num_value_heads
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config.linear_value_head_dim,
        "full_attention_interval": config.layer_types.index(GLOBAL) + 1,
    }


def _nemotron(config: Any) -> dict[str, Any]:
    kinds = config.layers_block_type
    fed, width = "mlp", config.intermediate_size
    values = {
        "attention.head_count_kv": _kv_heads(config, kinds),
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
    }
    if "moe" in kinds:
        fed, width = "moe", config.moe_intermediate_size
        values |= {
            "expert_shared_count": config.n_shared_experts,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": float(config.routed_scaling_factor),
        }
    else:
        # A config of transformers has numbers of experts also where no layer has any.
        values |= {"expert_count": None, "expert_used_count": None}
    return {**values, "feed_forward_length": [width if kind == fed else 0 for kind in kinds]}


def hybrid_pieces(config: Any, name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """The tensors that a file has in the place of a checkpoint's, by the names of checkpoints."""
    if config.model_type == "falcon_h1":
        values = values * _factors(config, name, len(values))
    if config.model_type in DELTAS:
        if config.model_type != "qwen3_next" and "linear_attn." in name:
            values = _tiled(config, name, values)
        if name.endswith("norm.weight") and "linear_attn." not in name:
            values = values + 1
        if "in_proj_qkvz" in name:
            yield from _by_kind(config, name, values)
            return
    if config.model_type == "kimi_linear":
        yield _kimi(name, values)
        return
    if ".shared_mlp." in name:
        # A layer without other experts has an ordinary feed-forward part in a file.
        base, _, linear = name.partition("shared_mlp.")
        base += "mlp.shared_expert." if config.num_local_experts else "mlp."
        if linear.startswith("output"):
            yield f"{base}down_proj.weight", values
            return
        gate, up = np.split(values, 2)
        yield f"{base}gate_proj.weight", gate
        yield f"{base}up_proj.weight", up
        return
    if ".experts." in name:
        # The names that the converter has for tensors of all experts.
        name = name.replace("backbone.", "model.").replace("mixer", "mlp")
        if config.model_type == "lfm2_moe":
            name = name.removeprefix("model.")
    if name.endswith("block_sparse_moe.input_linear.weight"):
        gate, up = np.split(values, 2, axis=1)
        base = name.removesuffix("block_sparse_moe.input_linear.weight")
        yield f"{base}mlp.experts.gate_proj.weight", gate
        yield f"{base}mlp.experts.up_proj.weight", up
        return
    if ".A_log" in name:
        values = -np.exp(values)
    if ".conv1d.weight" in name or "conv.conv.weight" in name:
        values = values.squeeze(1)
    if config.model_type not in DELTAS:
        if name.endswith((".A_log", ".D")):
            values = values.reshape(-1, 1)
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            groups = getattr(config, "n_groups", None) or config.mamba_n_groups
            values = values.reshape(groups, -1)
    name = name.replace(".dt_bias", ".dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
    yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def _kimi(name: str, values: Array) -> tuple[str, Array]:
    """With rates as they are, and convolutions of four dimensions."""
    if name.endswith(".A_log"):
        values = -np.exp(values)
    if "_conv1d." in name:
        values = values.reshape(1, len(values), 1, -1)
    module, _, linear = name.rpartition("block_sparse_moe.")
    if module and linear.startswith(("gate_proj", "up_proj", "down_proj")):
        # As published checkpoints call a layer without experts.
        name = f"{module}mlp.{linear}"
    name = name.replace(".dt_bias", ".dt_proj.bias")
    return name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def _factors(config: Any, name: str, rows: int) -> Any:
    """By what the rows of a tensor are multiplied: Falcon's multipliers are part of its weights."""
    entry, gate_factor = config.attention_in_multiplier, config.mlp_multipliers[0]
    by_name = {
        "embed_tokens.weight": config.embedding_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "gate_proj.weight": gate_factor,
        "down_proj.weight": config.mlp_multipliers[1],
        "q_proj.weight": entry,
        "k_proj.weight": entry * config.key_multiplier,
        "v_proj.weight": entry,
        "o_proj.weight": config.attention_out_multiplier,
        "out_proj.weight": config.ssm_out_multiplier,
    }
    if name.endswith("in_proj.weight"):
        inner = config.mamba_d_ssm or config.mamba_expand * config.hidden_size
        state = config.mamba_n_groups * config.mamba_d_state
        sizes = [inner, inner, state, state, config.mamba_n_heads]
        assert sum(sizes) == rows
        return config.ssm_in_multiplier * np.repeat(config.ssm_multipliers, sizes)[:, None]
    return next((by for end, by in by_name.items() if name.endswith(f".{end}") or name == end), 1.0)


def _by_kind(config: Any, name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """Queries, keys, values and gates, which a checkpoint has key head after key head."""
    keys, shared = config.linear_num_key_heads, config.linear_num_value_heads
    shared //= keys
    width = shared * config.linear_value_head_dim
    sizes = np.cumsum([config.linear_key_head_dim, config.linear_key_head_dim, width])
    rows = values.reshape(keys, -1, values.shape[-1])
    *qkv, gates = (part.reshape(-1, values.shape[-1]) for part in np.split(rows, sizes, axis=1))
    yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate(qkv)
    yield name.replace("in_proj_qkvz", "in_proj_z"), gates


def _tiled(config: Any, name: str, values: Array) -> Array:
    """Value heads beside those of the other key heads, not beside those of the same."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    before = 2 * keys * config.linear_key_head_dim

    def tiled(rows: Array, axis: int = 0) -> Array:
        rows = np.moveaxis(rows, axis, 0)
        apart = rows.reshape(keys, heads // keys, -1, *rows.shape[1:])
        return np.moveaxis(apart.swapaxes(0, 1).reshape(rows.shape), 0, axis)

    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate((values[:before], tiled(values[before:])))
    if "out_proj" in name:
        return tiled(values, 1)
    return values if name.endswith("norm.weight") else tiled(values)
