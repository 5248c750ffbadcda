"""The tensors of an EAGLE-3 head, and how checkpoints store them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Final

import torch

from asyncinfer.errors import ModelLoadError
from asyncinfer.models.eagle3_config import Eagle3Config
from asyncinfer.models.names import TensorNames
from asyncinfer.weights import Packed, Piece, TensorFiles

__all__ = ["TOKENS", "eagle3_table", "fitted", "ignored_beside", "token_choice"]

#: The name of the layer in a checkpoint: SpecForge's and SGLang's, and vLLM's.
_LAYERS: Final = ("midlayer", "layers.0")
#: The tensor with the differences between a token's id and its number among the head's tokens.
TOKENS: Final = "d2t"
_CHOSEN: Final = "t2d"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


def fitted(config: Eagle3Config, there: Collection[str]) -> Eagle3Config:
    """The config with the parts that a checkpoint with these tensors has of its own."""
    prefix = _prefix(there)
    other_size = config.layer.hidden_size != config.target_size
    fewer = config.draft_vocab_size != config.layer.vocab_size
    return replace(
        config,
        own_embedding=f"{prefix}{_EMBEDDING}" in there or other_size,
        own_head=_HEAD in there or other_size or fewer,
        chooses=TOKENS in there or fewer,
    )


def eagle3_table(config: Eagle3Config, there: Collection[str]) -> dict[str, Packed]:
    """The head's tensors by name, in the order of loading, like `tensor_table` of a model. `there`
    are the names of the checkpoint's tensors."""
    shape, names = config.layer, TensorNames()
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    count, prefix = len(config.captures), _prefix(there)
    inside = next((each for each in _LAYERS if _has(there, f"{prefix}{each}.")), _LAYERS[0])
    inside = f"{prefix}{inside}."

    def one(name: str, *size: int) -> Packed:
        return Packed((Piece(name, size),))

    def linear(parts: tuple[str, ...], outputs: tuple[int, ...], inputs: int, end: str) -> Packed:
        sized = zip(parts, outputs, strict=True)
        size = (inputs,) if end == "weight" else ()
        return Packed(tuple(Piece(f"{inside}{part}.{end}", (n, *size)) for part, n in sized))

    table: dict[str, Packed] = {}
    if config.own_embedding:
        table["embedding"] = one(f"{prefix}{_EMBEDDING}", shape.vocab_size, hidden)
    if config.norm_each:
        for number in range(count):
            table[f"each.{number}"] = one(f"{prefix}fc_norm.{number}.weight", config.target_size)
    if config.norm_all:
        table["all"] = one(f"{prefix}input_norm.weight", count * config.target_size)
    table["join.weight"] = one(f"{prefix}fc.weight", hidden, count * config.target_size)
    table["token_norm"] = one(f"{inside}input_layernorm.weight", hidden)
    table["hidden_norm"] = one(f"{inside}hidden_norm.weight", hidden)
    for name, parts, outputs, inputs, bias in (
        ("attention.qkv", names.qkv, (q, kv, kv), 2 * hidden, shape.qkv_bias),
        ("attention.out", (names.out,), (hidden,), q, shape.out_bias),
        ("head.mlp.up", names.up, (inner, inner), hidden, shape.mlp_bias),
        ("head.mlp.down", (names.down,), (hidden,), inner, shape.mlp_bias),
    ):
        if name == "head.mlp.up":
            table["mlp_norm"] = one(f"{inside}post_attention_layernorm.weight", hidden)
        table[f"{name}.weight"] = linear(parts, outputs, inputs, "weight")
        if bias:
            table[f"{name}.bias"] = linear(parts, outputs, inputs, "bias")
    table["norm"] = one(f"{prefix}norm.weight", hidden)
    if config.own_head:
        table["head.weight"] = one(_HEAD, config.draft_vocab_size, hidden)
    return table


def ignored_beside(name: str) -> bool:
    """Whether a checkpoint may hold this tensor beside the table's."""
    return name in (TOKENS, _CHOSEN) or name.endswith("rotary_emb.inv_freq")


def token_choice(
    config: Eagle3Config, checkpoint: TensorFiles[Any], read: Callable[[str], torch.Tensor]
) -> torch.Tensor | None:
    """int64 `[draft_vocab_size]`: the token of each of the head's logits; None: all, in order.
    `read` gives a tensor of the checkpoint as it is stored. Raises `ModelLoadError`."""
    if not config.chooses:
        return None
    count, stored = config.draft_vocab_size, checkpoint.tensors.get(TOKENS)
    if stored is None:
        folder = str(checkpoint.folder)
        raise ModelLoadError("missing in the checkpoint", file=folder, tensor=TOKENS)
    if stored.shape != (count,) or stored.dtype not in ("I64", "I32"):
        bound = f"shape {list(stored.shape)} of {stored.dtype}, must be [{count}] of I64 or I32"
        raise ModelLoadError(bound, file=stored.file, tensor=TOKENS)
    offsets = read(TOKENS).long()
    tokens = offsets + torch.arange(count, device=offsets.device)
    most = config.layer.vocab_size
    if int(tokens.min()) < 0 or int(tokens.max()) >= most or len(set(tokens.tolist())) < count:
        bound = f"must give each of {count} tokens another one of the {most} that there are"
        raise ModelLoadError(bound, file=stored.file, tensor=TOKENS)
    return tokens


def _prefix(there: Collection[str]) -> str:
    return "model." if _has(there, "model.") else ""


def _has(there: Collection[str], start: str) -> bool:
    return any(name.startswith(start) for name in there)
