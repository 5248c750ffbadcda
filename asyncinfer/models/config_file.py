"""From a checkpoint's `config.json` to a `ModelConfig`, with suspicion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncinfer.errors import ModelLoadError
from asyncinfer.layers import ACTIVATIONS
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.registry import families
from asyncinfer.models.rope_parameters import read_rope, scaled_context
from asyncinfer.weights import checkpoint_file, read_json

__all__ = ["parse_config", "read_config"]

_FILE = "config.json"
_MOST_BYTES = 16 << 20
# Far above any model there is: what lies beyond is a mistake or an attack.
_MOST_WIDTH = 1 << 20
_MOST_VOCAB = 1 << 24
_MOST_LAYERS = 1 << 10
_MOST_HEADS = 1 << 12
_MOST_HEAD_DIM = 1 << 10
_MOST_CONTEXT = 1 << 30
_DTYPES = ("float32", "float16", "bfloat16")


def read_config(folder: str | Path) -> ModelConfig:
    """Read and check `folder/config.json`."""
    folder = Path(folder)
    path = checkpoint_file(folder, _FILE)
    if path is None:
        raise ModelLoadError("no such file", file=str(folder / _FILE))
    return parse_config(read_json(path, _MOST_BYTES), file=str(path))


def parse_config(values: Mapping[str, Any], *, file: str = _FILE) -> ModelConfig:
    """Read and check a `config.json`'s content; `ModelLoadError` names the key that lies."""
    architecture = _architecture(JsonReader(values, file))
    family = families.resolve(architecture)
    config = JsonReader(family.complete(values), file, names=family.keys)
    for key, why in (
        ("auto_map", "names code that comes with the checkpoint, which is never run"),
        (
            "quantization_config",
            "quantised checkpoints are not supported; save it dequantised, in bfloat16 say, first",
        ),
    ):
        if config.values.get(key):
            raise config.refuse(key, why)
    return family.configure(config, _llama(config, family, architecture))


def _llama(config: JsonReader, family: Family, architecture: str) -> ModelConfig:
    """What Llama's keys say."""
    hidden_size = config.integer("hidden_size", 1, _MOST_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, _MOST_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", 1, _MOST_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"must divide num_attention_heads={num_heads}")
    if not config.has("head_dim") and hidden_size % num_heads:
        raise config.refuse("hidden_size", f"must divide by num_attention_heads={num_heads}")
    head_dim = config.integer("head_dim", 1, _MOST_HEAD_DIM, hidden_size // num_heads)
    if head_dim % 2:
        raise config.refuse("head_dim", f"must be even, not {head_dim}")
    max_context = config.integer("max_position_embeddings", 1, _MOST_CONTEXT)
    rope = read_rope(config, max_context, head_dim, family.full_rope)
    if rope.size is not None and not family.partial_rotary:
        raise config.refuse("partial_rotary_factor", "only 1 is supported")
    vocab_size = config.integer("vocab_size", 1, _MOST_VOCAB)
    activation = config.string("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise config.refuse("hidden_act", f"must be one of {', '.join(ACTIVATIONS)}")
    attention_bias = config.boolean("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 1, _MOST_WIDTH),
        num_layers=config.integer("num_hidden_layers", 1, _MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context=scaled_context(rope, max_context),
        norm_eps=config.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=rope,
        activation=activation,
        tied_head=config.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        dtype=_dtype(config),
        bos_token_id=next(iter(_token_ids(config, "bos_token_id", vocab_size)), None),
        eos_token_ids=_token_ids(config, "eos_token_id", vocab_size),
    )


def _architecture(config: JsonReader) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.refuse("architectures", "must be a list of names")
    known = families.names()
    for name in names:
        if name in known:
            return str(name)
    raise config.refuse(
        "architectures",
        f"none of these is known; must name one of {', '.join(known)}, or one that a package adds "
        "(docs/adding-a-model.md)",
    )


def _dtype(config: JsonReader) -> str | None:
    for key in ("dtype", "torch_dtype"):
        if config.has(key):
            name = config.string(key).removeprefix("torch.")
            if name not in _DTYPES:
                raise config.refuse(key, f"must be one of {', '.join(_DTYPES)}")
            return name
    return None


def _token_ids(config: JsonReader, key: str, vocab_size: int) -> tuple[int, ...]:
    value = config.values.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise config.refuse(key, f"token ids must be between 0 and {vocab_size - 1}")
    return tuple(ids)
