"""`gguf_config`: the `ModelConfig` of a GGUF file, from its metadata and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from asyncinfer.errors import ModelLoadError
from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.gguf.architecture import GgufArchitecture
from asyncinfer.models.gguf.architectures import ARCHITECTURES, VARIANTS
from asyncinfer.models.gguf.facts import Facts, plain_value
from asyncinfer.models.windows import FULL, SLIDING
from asyncinfer.plugins import models
from asyncinfer.weights.gguf import GgufCheckpoint

__all__ = ["gguf_architecture", "gguf_config"]

#: Llama's keys of `config.json` -> the file's, without the architecture's name before them.
_KEYS: Final = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "is_causal": "attention.causal",
}
_EPS: Final = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
#: Ids that stand for no token: -1, also where it was written as an unsigned number.
_NO_TOKEN: Final = (-1, (1 << 32) - 1)
#: Models whose attention is scaled by `hidden_size / heads` though `head_dim` differs: architecture
#: and number of layers.
_SCALED_BY_WIDTH: Final = (("gemma2", 46), ("gemma3", 62))


def gguf_config(checkpoint: GgufCheckpoint) -> ModelConfig:
    """The shape of the model in a GGUF file. `ModelLoadError` names the file and the key."""
    file = str(checkpoint.folder)
    name, architecture = gguf_architecture(checkpoint.metadata, file)
    family = models.resolve(architecture.family)
    assert isinstance(family, Family), "the families that ship with the package are"
    facts = Facts(name, checkpoint)
    values = _values(name, architecture, facts, checkpoint)
    named = {family.keys.get(key, key): value for key, value in values.items()}
    named |= _given(**{key: facts.get(theirs) for key, theirs in architecture.own_keys.items()})
    try:
        read = family.read(architecture.family, named, file)
        return _as_stored(read, architecture, facts, checkpoint)
    except ValueError as error:
        raise ModelLoadError(f"is no {name} model: {error}", file=file) from error


def gguf_architecture(metadata: Mapping[str, Any], file: str) -> tuple[str, GgufArchitecture]:
    """The architecture's name in the file, and its entry in `ARCHITECTURES`. Raises
    `ModelLoadError`."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelLoadError(f"general.architecture={name!r}: must be a name", file=file)
    kind = name
    for variant, (key, wanted) in VARIANTS.items():
        stem = variant.partition("+")[0]
        found = plain_value(metadata.get(f"{stem}.{key}"))
        if kind == name == stem and (found == wanted if wanted is not None else found):
            kind = variant
    architecture = ARCHITECTURES.get(kind)
    if architecture is None:
        known = ", ".join(one for one in ARCHITECTURES if "+" not in one)
        raise ModelLoadError(f"general.architecture={name!r}: must be one of {known}", file=file)
    return name, architecture


def _values(
    name: str, architecture: GgufArchitecture, facts: Facts, checkpoint: GgufCheckpoint
) -> dict[str, Any]:
    """The content of the `config.json` that the file was converted from, by Llama's keys."""
    metadata, tensors, get = checkpoint.metadata, checkpoint.tensors, facts.get
    values = {key: get(theirs) for key, theirs in {**_KEYS, **architecture.keys}.items()}
    values["num_hidden_layers"] = facts.layers
    values["rms_norm_eps"] = next((get(key) for key in _EPS if get(key) is not None), None)
    if architecture.patterned:
        values |= _layer_types(metadata.get(f"{name}.attention.sliding_window_pattern"))
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(
            "missing in the file", file=str(checkpoint.folder), tensor="token_embd.weight"
        )
    values["vocab_size"] = embedding.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in tensors
    for key in ("bos", "eos"):
        token = plain_value(metadata.get(f"tokenizer.ggml.{key}_token_id"))
        values[f"{key}_token_id"] = None if token in _NO_TOKEN else token
    head_dim, rotated = values["head_dim"], get("rope.dimension_count")
    heads, width = values["num_attention_heads"], values["hidden_size"]
    by_width = None
    if type(heads) is int and type(width) is int and heads > 0:
        by_width = width // heads
        head_dim = by_width if head_dim is None else head_dim
    if type(rotated) is int and type(head_dim) is int and 0 < rotated < head_dim:
        values["partial_rotary_factor"] = rotated / head_dim
    if name.startswith("gemma"):
        wide = (name, values["num_hidden_layers"]) in _SCALED_BY_WIDTH
        values["query_pre_attn_scalar"] = by_width if wide else head_dim
    scaling = {key: get(theirs) for key, theirs in architecture.scaling_keys.items()}
    values |= _rope(facts, {**architecture.scaling, **_given(**scaling)})
    # The family has defaults for keys that the file omits.
    given = {key: value for key, value in values.items() if value is not None}
    if given.get("sliding_window") == 0:
        # Files of Phi-4 say so that it has no window, which the family's default would be.
        given["sliding_window"] = None
    derived = {} if architecture.derived is None else architecture.derived(facts)
    return {**given, **architecture.values, **derived}


def _layer_types(pattern: Any) -> dict[str, Any]:
    """Which layers have a window: a file's flag for each, or every how manieth has none."""
    if isinstance(pattern, np.ndarray):
        return {"layer_types": [SLIDING if flag else FULL for flag in pattern[: 1 << 12]]}
    return {"sliding_window_pattern": pattern}


def _rope(facts: Facts, taken: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of the rotation, from keys or from tensors of factors."""
    get = facts.get
    original = get("rope.scaling.original_context_length")
    trained = {} if original is None else {"original_max_position_embeddings": original}
    if facts.has("rope_factors_long.weight") and facts.has("rope_factors_short.weight"):
        scaling = {
            "rope_type": "longrope",
            "short_factor": facts.numbers("rope_factors_short.weight"),
            "long_factor": facts.numbers("rope_factors_long.weight"),
            **_given(attention_factor=get("rope.scaling.attn_factor")),
            **taken,
        }
        return {"rope_scaling": scaling, **trained}
    if facts.has("rope_freqs.weight"):
        # The factors of Llama 3's scaling.
        factors = facts.numbers("rope_freqs.weight")
        scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        return {"rope_scaling": {**scaling, "attention_factor": 1.0}}
    # The first files have another key for the factor, and no type. A factor of 0 stands for none.
    kind = get("rope.scaling.type") or "linear"
    factor = get("rope.scaling.factor") or get("rope.scale_linear")
    if kind == "none" or not factor:
        return {}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    scale = get("rope.scaling.yarn_log_multiplier")
    if isinstance(scale, float):
        # DeepSeek's factor of attention; llama.cpp takes that of the rotation to be the same.
        trained |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * scale)
    given = _given(
        attention_factor=get("rope.scaling.attn_factor"),
        beta_fast=get("rope.scaling.yarn_beta_fast"),
        beta_slow=get("rope.scaling.yarn_beta_slow"),
    )
    return {"rope_scaling": {"rope_type": kind, "factor": factor, **trained, **given, **taken}}


def _as_stored(
    config: ModelConfig, architecture: GgufArchitecture, facts: Facts, checkpoint: GgufCheckpoint
) -> ModelConfig:
    """`config` for the tensors of the file: their names, which biases exist, and the converter's
    changes."""
    parts, names = facts.parts, architecture.names
    if "attn_qkv.weight" in parts and "attn_q.weight" not in parts:
        names = replace(names, qkv=("attn_qkv",))
    if "ffn_gate.weight" not in parts:
        # The gate is packed with up, or there is no gate.
        names = replace(names, up=("ffn_up",))
    if "ffn_gate_up_exps.0.weight" in parts:
        names = replace(names, expert_up=("ffn_gate_up_exps.{}",))
    if "attn_kv_b.weight" in parts:
        names = replace(names, kv_up=("attn_kv_b",))
    if "ssm_in.weight" in parts:
        # The first files of Qwen3-Next pack queries, keys, values and gates in one tensor.
        names = replace(names, delta_in=("ssm_in",))
    further = range(config.num_layers, config.num_layers + facts.further)
    ignored = (rf"blk\.{layer}\..*" for layer in further)
    names = replace(names, ignored=(*names.ignored, *ignored))
    # Files of Gemma 4 contain keys and values of layers that use another layer's.
    shared = (i for i in range(config.num_layers) if config.layer(i).shares_kv is not None)
    ignored = (rf"blk\.{layer}\.attn_[kv](_norm)?\.weight" for layer in shared)
    names = replace(names, ignored=(*names.ignored, *ignored))
    projections = names.qkv if config.latent is None else (names.kv_down,)

    def has(*names: str) -> bool:
        return any(f"{name}.bias" in parts for name in names)

    rope, layers = config.rope, config.layers
    if architecture.interleaved:
        # The converter has made pairs in all layers, and adapters are made for the order before.
        names = replace(names, qk_paired=True)
        rope = _interleaved(rope)
        layers = tuple(replace(layer, rope=_interleaved(layer.rope)) for layer in layers)
    return replace(
        config,
        published=None if architecture.scaled else config,
        names=names,
        rope=rope,
        layers=layers,
        qkv_bias=has(*projections),
        out_bias=has(names.out),
        mlp_bias=has(names.down),
        head_bias="output.bias" in checkpoint.tensors,
        **architecture.changes,
    )


def _interleaved(rope: RopeConfig | None) -> RopeConfig | None:
    return None if rope is None else replace(rope, interleaved=True)


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
