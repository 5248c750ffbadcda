"""Reads the keys of Mamba-2's layers from `config.json`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.parts import MOST_HEAD_DIM, MOST_HEADS, MOST_WIDTH, MambaConfig
from asyncinfer.models.reader import JsonReader

__all__ = ["layer_kinds", "read_mamba", "step_bounds"]

#: Names that kinds of layers had before transformers 5.
_FORMER = {"mamba": "linear_attention", "attention": "full_attention"}


def layer_kinds(config: JsonReader, key: str, count: int, kinds: Sequence[str]) -> tuple[str, ...]:
    """The kind of each layer, one of `kinds`, in the current spelling."""
    former = [name for name, now in _FORMER.items() if now in kinds]
    return tuple(_FORMER.get(kind, kind) for kind in config.strings(key, count, [*kinds, *former]))


def step_bounds(config: JsonReader) -> tuple[float, float]:
    """`time_step_limit`: the bounds of a token's step."""
    if not config.has("time_step_limit"):
        return 0.0, math.inf
    values = config.values["time_step_limit"]
    if isinstance(values, list):
        # JSON has no infinity, which transformers writes as this object.
        values = [math.inf if value == {"__float__": "Infinity"} else value for value in values]
        config = config.replaced({"time_step_limit": values})
    low, high = config.numbers("time_step_limit", 2, 0.0, math.inf)
    if low > high:
        raise config.refuse("time_step_limit", "must be in order")
    return low, high


def read_mamba(config: JsonReader, llama: ModelConfig, inner: int | None = None) -> MambaConfig:
    """Read the layer by the keys of Bamba and related models. `inner`: dimensions of all heads
    together; None: `mamba_expand` times those of the hidden state."""
    if llama.activation != "silu":
        raise config.refuse("hidden_act", "must be silu: Mamba-2's layers have no other here")
    if inner is None:
        inner = config.integer("mamba_expand", 1, 64) * llama.hidden_size
    heads = config.integer("mamba_n_heads", 1, MOST_HEADS)
    if config.values.get("mamba_d_head", "auto") == "auto":
        head_dim = inner // heads
    else:
        head_dim = config.integer("mamba_d_head", 1, MOST_HEAD_DIM)
    if heads * head_dim != inner or not 0 < inner <= MOST_WIDTH:
        raise config.refuse("mamba_n_heads", f"must share out {inner} dimensions")
    groups = config.integer("mamba_n_groups", 1, heads)
    if heads % groups:
        raise config.refuse("mamba_n_groups", f"must divide mamba_n_heads={heads}")
    bias = config.boolean("mamba_proj_bias")
    return MambaConfig(
        heads=heads,
        head_dim=head_dim,
        state_dim=config.integer("mamba_d_state", 1, MOST_HEAD_DIM),
        groups=groups,
        width=config.integer("mamba_d_conv", 2, 1 << 10),
        conv_bias=config.boolean("mamba_conv_bias"),
        in_bias=bias,
        out_bias=bias,
        steps=step_bounds(config),
    )
