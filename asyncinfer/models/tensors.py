"""Which tensors a decoder is made of, and under which names a checkpoint keeps them."""

from __future__ import annotations

import re

from asyncinfer.models.config import ModelConfig
from asyncinfer.weights import Packed, Piece

__all__ = ["ignored_tensor", "tensor_table"]


def tensor_table(config: ModelConfig) -> dict[str, Packed]:
    """The model's tensors by name, in the order they are loaded: each is one tensor of the
    checkpoint or several packed below each other."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    # Ours, the checkpoint's parts with their outputs, the inputs, whether there is a bias.
    linears = (
        ("attention.qkv", "self_attn", (("q_proj", q), ("k_proj", kv), ("v_proj", kv)), hidden),
        ("attention.out", "self_attn", (("o_proj", hidden),), q),
        ("mlp.gate_up", "mlp", (("gate_proj", inner), ("up_proj", inner)), hidden),
        ("mlp.down", "mlp", (("down_proj", hidden),), inner),
    )
    biased = {"self_attn": config.attention_bias, "mlp": config.mlp_bias}
    table = {"embedding": _one("model.embed_tokens.weight", config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        table[f"{ours}.attention_norm"] = _one(f"{theirs}.input_layernorm.weight", hidden)
        table[f"{ours}.mlp_norm"] = _one(f"{theirs}.post_attention_layernorm.weight", hidden)
        for name, module, parts, inputs in linears:
            table[f"{ours}.{name}.weight"] = Packed(
                tuple(Piece(f"{theirs}.{module}.{part}.weight", (n, inputs)) for part, n in parts)
            )
            if biased[module]:
                table[f"{ours}.{name}.bias"] = Packed(
                    tuple(Piece(f"{theirs}.{module}.{part}.bias", (n,)) for part, n in parts)
                )
    table["norm"] = _one("model.norm.weight", hidden)
    if not config.tied_head:
        table["head"] = _one("lm_head.weight", config.vocab_size, hidden)
    return table


def ignored_tensor(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint may hold this tensor without the model having a place for it: rope's
    frequencies, which old checkpoints saved, and a tied head's second copy."""
    if config.tied_head and name == "lm_head.weight":
        return True
    return re.fullmatch(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", name) is not None


def _one(name: str, *shape: int) -> Packed:
    return Packed((Piece(name, shape),))
