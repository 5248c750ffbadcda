"""Reading the rope settings of `config.json`, in all spellings that transformers has had."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from asyncinfer.layers import RopeConfig, RopeType
from asyncinfer.models.reader import JsonReader

__all__ = ["mscale_of", "read_rope", "scaled_context"]

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_THETA = (1.0 + 1e-6, 1e15)
_FACTOR = (1.0, 1e6)
_MOST_CONTEXT = 2**31 - 1


def read_rope(
    config: JsonReader, max_context: int, head_dim: int, layer_type: str | None = None
) -> RopeConfig:
    """`rope_scaling` (with `type` or `rope_type`) or the newer `rope_parameters`, theta in there or
    beside it; the first that is not empty wins, as in transformers. `max_context` is
    `max_position_embeddings`. `layer_type` names the part of the parameters to read if kinds of
    layers have parts of their own.
    """
    theta = config.number("rope_theta", *_THETA, 10_000.0)
    rope = config.object("rope_scaling") or config.object("rope_parameters")
    if rope is not None and layer_type is not None and _has_parts(rope):
        rope = rope.object(layer_type)
    if rope is None:
        size = _rotated_size(config, head_dim)
        return RopeConfig(theta=theta, original_context=max_context, size=size)

    if _has_parts(rope):
        part = next(name for name, value in rope.values.items() if isinstance(value, Mapping))
        raise rope.refuse(part, "settings of their own for some layers are not supported")
    holder = rope if rope.has("partial_rotary_factor") else config
    theta = rope.number("rope_theta", *_THETA, theta)
    if rope.string("rope_type", "default") == "proportional":
        turning = int(holder.number("partial_rotary_factor", 0.0, 1.0, 1.0) * head_dim // 2)
        return RopeConfig(
            rope_type="proportional",
            factor=rope.number("factor", *_FACTOR, 1.0),
            theta=theta,
            size=head_dim,
            turning=turning,
            original_context=max_context,
        )
    size = _rotated_size(holder, head_dim)
    scaled = _scaling(config, rope, max_context, size or head_dim)
    return replace(scaled, theta=theta, size=size)


def _has_parts(rope: JsonReader) -> bool:
    return any(isinstance(value, Mapping) for value in rope.values.values())


def _rotated_size(holder: JsonReader, head_dim: int) -> int | None:
    factor = holder.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    if factor == 1.0:
        return None
    size = int(head_dim * factor)
    if size < 2 or size % 2:
        raise holder.refuse(
            "partial_rotary_factor", f"rotates {size} of {head_dim} dimensions: must be even"
        )
    return size


def _scaling(config: JsonReader, rope: JsonReader, max_context: int, size: int) -> RopeConfig:
    key = "rope_type" if rope.has("rope_type") else "type"
    rope_type = rope.string(key, "default")
    trained = config if config.has("original_max_position_embeddings") else rope
    original = trained.integer("original_max_position_embeddings", 1, _MOST_CONTEXT, max_context)
    if rope_type == "default":
        return RopeConfig(original_context=max_context)
    if rope_type in ("linear", "dynamic"):
        # The dynamic base's exponent is size / (size - 2).
        if rope_type == "dynamic" and size < 4:
            raise rope.refuse(key, f"needs a head_dim of 4 or more, not {size}")
        factor = rope.number("factor", *_FACTOR)
        kind: RopeType = "linear" if rope_type == "linear" else "dynamic"
        return RopeConfig(rope_type=kind, factor=factor, original_context=max_context)
    if rope_type == "llama3":
        return _llama3(rope, original)
    if rope_type == "yarn":
        return _yarn(rope, original, max_context)
    if rope_type in ("longrope", "su"):
        return _longrope(rope, original, max_context, size)
    raise rope.refuse(key, f"must be one of {', '.join(_TYPES)}")


def scaled_context(rope: RopeConfig, max_context: int) -> int:
    """The longest sequence, if the scaling extends `max_position_embeddings`."""
    if rope.rope_type in ("linear", "dynamic"):
        return min(int(max_context * rope.factor), _MOST_CONTEXT)
    if rope.rope_type == "yarn":
        # In some checkpoints `max_position_embeddings` includes the factor.
        return max(max_context, min(int(rope.original_context * rope.factor), _MOST_CONTEXT))
    return max_context


def _llama3(rope: JsonReader, original: int) -> RopeConfig:
    low = rope.number("low_freq_factor", 1e-6, 1e6)
    high = rope.number("high_freq_factor", 1e-6, 1e6)
    if high < low:
        raise rope.refuse("high_freq_factor", f"must not be below low_freq_factor={low:g}")
    return RopeConfig(
        rope_type="llama3",
        factor=rope.number("factor", *_FACTOR),
        original_context=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: JsonReader, original: int, max_context: int) -> RopeConfig:
    factor = rope.number("factor", *_FACTOR, max(1.0, max_context / original))
    beta_fast = rope.number("beta_fast", 1e-6, 1e6, 32.0)
    beta_slow = rope.number("beta_slow", 1e-6, 1e6, 1.0)
    if beta_fast < beta_slow:
        raise rope.refuse("beta_fast", f"must not be below beta_slow={beta_slow:g}")
    # transformers takes a 0 for none.
    over, below = (rope.number(key, 0.0, 1e3, 0.0) for key in ("mscale", "mscale_all_dim"))
    both = over and below
    grown = mscale_of(factor, over if both else 1.0) / (mscale_of(factor, below) if both else 1.0)
    return RopeConfig(
        rope_type="yarn",
        factor=factor,
        original_context=original,
        attention_factor=rope.number("attention_factor", 1e-3, 1e3, grown),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=rope.boolean("truncate", True),
    )


def _longrope(rope: JsonReader, original: int, max_context: int, size: int) -> RopeConfig:
    """LongRoPE (Ding et al., 2024): a factor for each frequency, one set within the trained context
    and one for engines that go beyond it."""
    factor = rope.number("factor", *_FACTOR, max(1.0, max_context / original))
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if original > 1 else 1.0
    return RopeConfig(
        rope_type="longrope",
        factor=factor,
        original_context=original,
        attention_factor=rope.number("attention_factor", 1e-3, 1e3, default),
        factors=rope.numbers("short_factor", size // 2, 1e-3, 1e6),
        long_factors=rope.numbers("long_factor", size // 2, 1e-3, 1e6),
    )


def mscale_of(factor: float, mscale: float) -> float:
    """How much the attention's logits grow with the context (YaRN, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
