"""Writes transformers models as GGUF files, as llama.cpp's converter lays their tensors out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from models.gguf_experts import expert_metadata, expert_pieces
from models.gguf_gemma4 import gemma4_metadata, gemma4_tensors
from models.gguf_hybrids import HYBRIDS, hybrid_metadata, hybrid_pieces
from models.gguf_rotation import rotation_metadata, rotation_tensors
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

#: transformers' name of a family -> GGUF's.
ARCHITECTURES = {
    "afmoe": "afmoe",
    "apertus": "apertus",
    "arcee": "arcee",
    "cohere2": "cohere2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "dots1": "dots1",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone4": "exaone4",
    "exaone_moe": "exaone-moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "glm_moe_dsa": "glm-dsa",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "llama": "llama",
    "llama4_text": "llama4",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mistral4": "mistral4",
    "mixtral": "llama",
    "nemotron": "nemotron",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "phi": "phi2",
    "phi3": "phi3",
    "phimoe": "phimoe",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
    **HYBRIDS,
}
#: GGUF's architectures whose files say which layers have a window.
PATTERNED = ("exaone-moe", "exaone4", "olmo2")
#: GGUF's architectures whose files may hold a layer that predicts a further token.
FURTHER = ("exaone-moe", "glm4moe")
#: Families whose queries and keys have the rows that are rotated together side by side in a file.
GRANITES = ("granite", "granitemoe", "granitemoehybrid")
INTERLEAVED = (*GRANITES, "arcee", "llama", "ministral3", "mistral", "mixtral", "smollm3")
#: What families call the number of experts that a token takes.
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
TOKENS = 199

Array = np.ndarray[Any, Any]
Q = gguf.GGMLQuantizationType


def write_gguf(
    model: PreTrainedModel, path: Path, kind: Q = Q.F32, name: str = "", **metadata: Any
) -> Path:
    """Write `model` with its matrices as `kind`, where their rows have whole blocks of it. `name`
    is GGUF's of an architecture, in the place of the family's own."""
    folder = path.parent / "published"
    model.save_pretrained(folder)
    stored = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    name = name or architecture_of(model)
    # Gemma 4's layers differ in their heads; what differs is said apart.
    model.config.allow_global_per_layer_attribute_access = True
    writer = gguf.GGUFWriter(path, name)
    lists = _activation(stored)
    for key, value in {**_metadata(model.config, name), **lists, **metadata}.items():
        _add(writer, key, value)
    for tensor, values in _tensors(model.config, name, stored):
        block = gguf.GGML_QUANT_SIZES[kind][0]
        matrix = values.ndim > 1 and values.shape[-1] % block == 0
        packed = gguf.quantize(values.astype(np.float32), kind if matrix else Q.F32)
        writer.add_tensor(tensor, packed, raw_dtype=kind if matrix else Q.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def architecture_of(model: PreTrainedModel) -> str:
    """GGUF's name of the family's architecture."""
    config: Any = model.config
    name = ARCHITECTURES[config.model_type]
    if name == "nemotron_h" and "moe" in config.layers_block_type:
        return "nemotron_h_moe"
    return name


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _metadata(config: Any, name: str) -> dict[str, Any]:
    def get(*keys: str) -> Any:
        return next((getattr(config, key) for key in keys if hasattr(config, key)), None)

    heads = get("num_attention_heads", "n_head")
    hidden = get("hidden_size", "n_embd")
    head_dim = get("head_dim") or hidden // heads
    rope = get("rope_parameters") or {}
    parts = rope.get("full_attention", rope)
    rotated = int(head_dim * (parts.get("partial_rotary_factor") or 1.0))
    eps = get("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
    experts = get("num_local_experts", "num_experts", "n_routed_experts")
    values = {
        "context_length": get("max_position_embeddings", "n_positions"),
        "embedding_length": hidden,
        "block_count": get("num_hidden_layers", "n_layer"),
        "feed_forward_length": get("intermediate_size") or get("n_inner") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_epsilon": float(eps),
        "attention.layer_norm_rms_epsilon": float(eps),
        "attention.sliding_window": get("sliding_window"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "expert_count": experts,
        "expert_used_count": None if experts is None else get(*ACTIVE),
        "expert_feed_forward_length": get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": get("shared_expert_intermediate_size"),
        "expert_shared_count": get("moe_num_shared_experts"),
        "leading_dense_block_count": get("moe_layer_start_index"),
        "interleave_moe_layer_step": get("moe_layer_interval"),
        "rope.freq_base": parts.get("rope_theta"),
        "rope.dimension_count": None if name == "gpt2" else rotated,
        "embedding_scale": get("embedding_multiplier"),
        "attention.scale": get("attention_multiplier"),
        "residual_scale": get("residual_multiplier"),
        "logit_scale": get("logits_scaling", "logit_scale"),
        "use_parallel_residual": get("use_parallel_residual"),
    }
    if get("layer_types") and values["attention.sliding_window"] and name in PATTERNED:
        pattern = [kind == "sliding_attention" for kind in config.layer_types]
        values["attention.sliding_window_pattern"] = pattern
    values |= expert_metadata(config)
    values |= rotation_metadata(config, name, parts, head_dim)
    if config.model_type in HYBRIDS:
        values |= hybrid_metadata(config)
    if name == "gemma4":
        values |= gemma4_metadata(config)
    named = {f"{name}.{key}": value for key, value in values.items()}
    return {**named, **_tokenizer()}


def _activation(stored: dict[str, Array]) -> dict[str, list[float]]:
    """xIELU's weights: a list of all layers for each."""
    lists: dict[str, list[float]] = {}
    for name in sorted(name for name in stored if ".act_fn." in name):
        lists.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(stored[name].item())
    return lists


def _tokenizer() -> dict[str, Any]:
    """A byte-level one of most bytes, three marks and one merge."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = ["<s>", "</s>", "<pad>", *bytes_[: TOKENS - 4], "!!"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (TOKENS - 3),
        "tokenizer.ggml.merges": ["! !"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def _tensors(config: Any, name: str, stored: dict[str, Array]) -> Iterator[tuple[str, Array]]:
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    layers = getattr(config, "num_hidden_layers", None) or config.n_layer
    names = gguf.get_tensor_name_map(arch, layers)
    merged: dict[str, list[tuple[int, Array]]] = {}
    if name in FURTHER:
        # Of the layer that predicts a further token, which is not read.
        yield f"blk.{layers}.nextn.eh_proj.weight", np.ones((4, 4), np.float32)
    for theirs, values in stored.items():
        if ".act_fn." in theirs:
            # A list of the metadata.
            continue
        for part, array in _split(config, name, theirs, values):
            expert = part.split(".experts.")
            if len(expert) == 2 and expert[1][0].isdigit():
                number, _, rest = expert[1].partition(".")
                merged.setdefault(f"{expert[0]}.experts.{rest}", []).append((int(number), array))
                continue
            yield _named(names, part), _laid_out(config, part, array)
    for part, arrays in merged.items():
        stacked = np.stack([array for _, array in sorted(arrays, key=lambda one: one[0])])
        yield _named(names, part), stacked
    yield from gemma4_tensors(config) if name == "gemma4" else rotation_tensors(config)


def _named(names: gguf.TensorNameMap, part: str) -> str:
    if part.startswith("blk."):
        return part
    if part.endswith("self_attn.sinks"):
        part += ".weight"
    if part.endswith("mlp.expert_bias"):
        part += ".bias"
    found = names.get_name(part, try_suffixes=(".weight", ".bias"))
    assert found is not None, part
    return str(found)


def _split(config: Any, architecture: str, name: str, values: Array) -> Iterator[tuple[str, Array]]:
    """What a file keeps in several tensors, and with the outputs first."""
    pieces = expert_pieces(config, architecture, name, values)
    if pieces is not None:
        yield from pieces
        return
    if config.model_type in HYBRIDS:
        yield from hybrid_pieces(config, name, values)
        return
    if config.model_type == "gpt_oss" and ".experts." in name:
        stem, _, kind = name.rpartition(".")[2].partition("_proj")
        base = name[: name.rindex(".")]
        suffix = ".bias" if kind == "_bias" else ".weight"
        turned = values if kind == "_bias" else values.swapaxes(1, 2)
        if stem == "down":
            yield f"{base}.down_proj{suffix}", turned
        else:
            yield f"{base}.gate_proj{suffix}", turned[:, 0::2]
            yield f"{base}.up_proj{suffix}", turned[:, 1::2]
        return
    if config.model_type == "granitemoe" and name.endswith("input_linear.weight"):
        gate, up = np.split(values, 2, axis=1)
        base = name.removesuffix("block_sparse_moe.input_linear.weight")
        yield f"{base}mlp.experts.gate_proj.weight", gate
        yield f"{base}mlp.experts.up_proj.weight", up
        return
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    yield name.replace("layer_scalar", "layer_scalar.weight"), values


def _laid_out(config: Any, name: str, values: Array) -> Array:
    kind, heads = config.model_type, getattr(config, "num_attention_heads", 1)
    if kind in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
        count = heads if ".q_proj." in name else config.num_key_value_heads
        rows = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
        return rows.swapaxes(1, 2).reshape(values.shape)
    if kind in ("gemma", "gemma2", "gemma3_text") and "norm" in name:
        return values + 1
    if kind == "nemotron" and name.endswith("norm.weight"):
        return values + 1
    if values.ndim == 2 and len(values) == 1:
        return values[0]
    if kind == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return values.T
    if kind == "gpt_neox" and ".query_key_value." in name:
        by_head = values.reshape(heads, 3, values.shape[0] // heads // 3, *values.shape[1:])
        return by_head.swapaxes(0, 1).reshape(values.shape)
    return values
