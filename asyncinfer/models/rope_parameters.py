"""`config.json`'s rope settings, in the spellings that transformers has had."""

from __future__ import annotations

import math
from collections.abc import Mapping

from asyncinfer.layers import RopeConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["read_rope", "scaled_context"]

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_THETA = (1.0 + 1e-6, 1e15)
_FACTOR = (1.0, 1e6)
_MOST_CONTEXT = 2**31 - 1


def read_rope(config: JsonReader, max_context: int, head_dim: int) -> RopeConfig:
    """`rope_scaling` (with `type` or `rope_type`) or the newer `rope_parameters`, theta in there or
    beside it; the first that says something wins, as in transformers. `max_context` is
    `max_position_embeddings`."""
    theta = config.number("rope_theta", *_THETA, 10_000.0)
    rope = config.object("rope_scaling") or config.object("rope_parameters")
    for holder in (config, rope):
        if holder and holder.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
            raise holder.refuse("partial_rotary_factor", "only 1 is supported")
    if rope is None:
        return RopeConfig(theta=theta, original_context=max_context)

    for name, value in rope.values.items():
        if isinstance(value, Mapping):
            raise rope.refuse(name, "settings of their own for some layers are not supported")
    theta = rope.number("rope_theta", *_THETA, theta)
    key = "rope_type" if rope.has("rope_type") else "type"
    rope_type = rope.string(key, "default")
    trained = config if config.has("original_max_position_embeddings") else rope
    original = trained.integer("original_max_position_embeddings", 1, _MOST_CONTEXT, max_context)
    if rope_type == "default":
        return RopeConfig(theta=theta, original_context=max_context)
    if rope_type in ("linear", "dynamic"):
        # The dynamic base's exponent is head_dim / (head_dim - 2).
        if rope_type == "dynamic" and head_dim < 4:
            raise rope.refuse(key, f"needs a head_dim of 4 or more, not {head_dim}")
        factor = rope.number("factor", *_FACTOR)
        return RopeConfig(
            rope_type=rope_type, theta=theta, factor=factor, original_context=max_context
        )
    if rope_type == "llama3":
        return _llama3(rope, theta, original)
    if rope_type == "yarn":
        return _yarn(rope, theta, original, max_context)
    raise rope.refuse(key, f"must be one of {', '.join(_TYPES)}")


def scaled_context(rope: RopeConfig, max_context: int) -> int:
    """The longest sequence that the scaling stretches `max_position_embeddings` to."""
    if rope.rope_type in ("linear", "dynamic"):
        return min(int(max_context * rope.factor), _MOST_CONTEXT)
    if rope.rope_type == "yarn":
        # Some checkpoints count the factor in already.
        return max(max_context, min(int(rope.original_context * rope.factor), _MOST_CONTEXT))
    return max_context


def _llama3(rope: JsonReader, theta: float, original: int) -> RopeConfig:
    low = rope.number("low_freq_factor", 1e-6, 1e6)
    high = rope.number("high_freq_factor", 1e-6, 1e6)
    if high <= low:
        raise rope.refuse("high_freq_factor", f"must be above low_freq_factor={low:g}")
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=rope.number("factor", *_FACTOR),
        original_context=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: JsonReader, theta: float, original: int, max_context: int) -> RopeConfig:
    factor = rope.number("factor", *_FACTOR, max(1.0, max_context / original))
    beta_fast = rope.number("beta_fast", 1e-6, 1e6, 32.0)
    beta_slow = rope.number("beta_slow", 1e-6, 1e6, 1.0)
    if beta_fast < beta_slow:
        raise rope.refuse("beta_fast", f"must not be below beta_slow={beta_slow:g}")
    if rope.has("attention_factor"):
        attention_factor = rope.number("attention_factor", 1e-3, 1e3)
    elif rope.has("mscale") and rope.has("mscale_all_dim"):
        over = _mscale(factor, rope.number("mscale", 0.0, 1e3))
        attention_factor = over / _mscale(factor, rope.number("mscale_all_dim", 0.0, 1e3))
    else:
        attention_factor = _mscale(factor, 1.0)
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_context=original,
        attention_factor=attention_factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=rope.boolean("truncate", True),
    )


def _mscale(factor: float, mscale: float) -> float:
    """How much the attention's logits grow with the context (YaRN, section 3.4)."""
    # transformers takes an mscale of 0 for none given.
    return 0.1 * (mscale or 1.0) * math.log(factor) + 1.0 if factor > 1 else 1.0
