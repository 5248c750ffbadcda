"""`Family`: how one architecture differs from the shared decoder."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from asyncinfer.layers import ACTIVATIONS
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import (
    DTYPES,
    MOST_HEAD_DIM,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_VOCAB,
    MOST_WIDTH,
)
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.rope_parameters import read_rope, scaled_context

__all__ = ["Family"]

_MOST_CONTEXT = 1 << 30
#: The least epsilon that a norm of float32 shows.
_LEAST_EPS = 1e-30


class Family:
    """One architecture, as differences from Llama. Derive from it and state what differs."""

    #: The architecture's name under `model_type` in `config.json`. A checkpoint that comes with
    #: code, which is never run, is loaded only if this is given and equal to the checkpoint's.
    model_type: ClassVar[str | None] = None
    #: Llama's keys of `config.json` -> this architecture's names for them.
    keys: ClassVar[Mapping[str, str]] = MappingProxyType({})
    #: Values of keys that `config.json` leaves out.
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    #: The part of `rope_parameters` to read if kinds of layers have parts of their own.
    full_rope: ClassVar[str | None] = None
    #: Whether `partial_rotary_factor` means something.
    partial_rotary: ClassVar[bool] = False

    def read(self, architecture: str, values: Mapping[str, Any], file: str) -> ModelConfig:
        """The decoder's shape, by `complete` and `configure`; see `ModelFamily`."""
        config = JsonReader(self.complete(values), file, names=self.keys)
        return self.configure(config, _as_llama(config, self, architecture))

    def complete(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """The content of `config.json` with `defaults` for missing keys. A null stays null even if
        the key has a default: it means that the model has no such part."""
        return {**self.defaults, **values}

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        """The decoder's shape: `llama`, which is `config` read as Llama's, with the differences
        replaced. Raises `ModelLoadError` (see `JsonReader`) for what the decoder cannot do."""
        return llama


def _as_llama(config: JsonReader, family: Family, architecture: str) -> ModelConfig:
    hidden_size = config.integer("hidden_size", 1, MOST_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, MOST_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", 1, MOST_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"must divide num_attention_heads={num_heads}")
    if not config.has("head_dim") and hidden_size % num_heads:
        raise config.refuse("hidden_size", f"must divide by num_attention_heads={num_heads}")
    head_dim = config.integer("head_dim", 1, MOST_HEAD_DIM, hidden_size // num_heads)
    if head_dim % 2:
        raise config.refuse("head_dim", f"must be even, not {head_dim}")
    max_context = config.integer("max_position_embeddings", 1, _MOST_CONTEXT)
    rope = read_rope(config, max_context, head_dim, family.full_rope)
    if rope.size is not None and not family.partial_rotary:
        raise config.refuse("partial_rotary_factor", "only 1 is supported")
    vocab_size = config.integer("vocab_size", 1, MOST_VOCAB)
    activation = config.string("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise config.refuse("hidden_act", f"must be one of {', '.join(ACTIVATIONS)}")
    attention_bias = config.boolean("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", 1, MOST_WIDTH),
        num_layers=config.integer("num_hidden_layers", 1, MOST_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context=scaled_context(rope, max_context),
        norm_eps=config.number("rms_norm_eps", _LEAST_EPS, 1.0, 1e-6),
        rope=rope,
        activation=activation,
        tied_head=config.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        bidirectional=not config.boolean("is_causal", True),
        dtype=_dtype(config),
        bos_token_id=next(iter(_token_ids(config, "bos_token_id", vocab_size)), None),
        eos_token_ids=_token_ids(config, "eos_token_id", vocab_size),
    )


def _dtype(config: JsonReader) -> str | None:
    for key in ("dtype", "torch_dtype"):
        if config.has(key):
            name = config.string(key).removeprefix("torch.")
            if name not in DTYPES:
                raise config.refuse(key, f"must be one of {', '.join(DTYPES)}")
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
