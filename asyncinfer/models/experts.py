"""Reading the keys of a mixture of experts from `config.json`."""

from __future__ import annotations

from dataclasses import replace

from asyncinfer.layers import RopeConfig
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.names import PredictorNames, TensorNames
from asyncinfer.models.parts import ExpertsConfig, LayerConfig
from asyncinfer.models.reader import JsonReader

__all__ = [
    "dense_first",
    "plain_layers",
    "read_experts",
    "read_grouped_experts",
    "sparse_by_list",
    "with_experts",
    "with_further_layers",
]

#: Over all layers: several times as many as any model has, since each means a few tensors.
_MOST_EXPERTS = 1 << 17
_MOST = 1 << 16
#: The most layers that predict further tokens: far above any known model.
_MOST_FURTHER = 16


def read_experts(
    config: JsonReader, llama: ModelConfig, count_key: str, intermediate_size: int
) -> ExpertsConfig:
    """The experts, whose number is under `count_key`, and of which a token takes
    `num_experts_per_tok`."""
    count = config.integer(count_key, 1, _MOST_EXPERTS // llama.num_layers)
    return ExpertsConfig(
        count=count,
        active=config.integer("num_experts_per_tok", 1, count),
        intermediate_size=intermediate_size,
    )


def plain_layers(config: JsonReader, layers: int) -> set[int]:
    """The layers that `decoder_sparse_step` and `mlp_only_layers` leave without experts."""
    every = config.integer("decoder_sparse_step", 1, 1 << 10, 1)
    plain = {layer for layer in range(layers) if (layer + 1) % every}
    if config.has("mlp_only_layers"):
        plain |= set(config.integers("mlp_only_layers", None, 0, layers - 1))
    return plain


def read_grouped_experts(config: JsonReader, llama: ModelConfig) -> ExpertsConfig:
    """The experts of DeepSeek-V3, by its keys: sigmoid scores, groups, shared experts."""
    size = config.integer("moe_intermediate_size", 1, _MOST)
    experts = read_experts(config, llama, "n_routed_experts", size)
    groups = config.integer("n_group", 1, experts.count)
    if experts.count % groups or experts.count // groups < 2:
        raise config.refuse("n_group", f"must share out {experts.count} experts, two or more")
    active_groups = config.integer("topk_group", 1, groups)
    if experts.active > active_groups * (experts.count // groups):
        raise config.refuse("topk_group", f"has no {experts.active} experts for a token")
    return replace(
        experts,
        normalise=config.boolean("norm_topk_prob"),
        scoring="sigmoid",
        groups=groups,
        active_groups=active_groups,
        group_best=2,
        correction=True,
        scale=config.number("routed_scaling_factor", 1e-6, 1e6),
        shared_size=size * config.integer("n_shared_experts", 0, 64),
    )


def dense_first(config: JsonReader, count: int, rope: RopeConfig | None) -> tuple[LayerConfig, ...]:
    """The settings of `count` layers, the first `first_k_dense_replace` of which have no
    experts."""
    dense = config.integer("first_k_dense_replace", 0, _MOST)
    if dense == 0:
        return ()
    return tuple(LayerConfig(rope=rope, experts=layer >= dense) for layer in range(count))


def sparse_by_list(
    config: JsonReader, count: int, rope: RopeConfig | None
) -> tuple[LayerConfig, ...]:
    """`dense_first`, unless `mlp_layer_types` says for each layer whether it has experts."""
    if not config.has("mlp_layer_types"):
        return dense_first(config, count, rope)
    kinds = config.strings("mlp_layer_types", count, ("dense", "sparse"))
    if "dense" not in kinds:
        return ()
    return tuple(LayerConfig(rope=rope, experts=kind == "sparse") for kind in kinds)


def with_experts(base: ModelConfig, sparse: tuple[LayerConfig, ...]) -> ModelConfig:
    """`base`, whose layers have experts where those of `sparse` do; all have where that is
    empty."""
    layers = (replace(base.layer(i), experts=each.experts) for i, each in enumerate(sparse))
    return replace(base, layers=tuple(layers) or base.layers)


def with_further_layers(config: JsonReader, llama: ModelConfig) -> TensorNames:
    """The names, with those of the first layer that predicts further tokens, which may be loaded
    with the model. Further such layers are ignored."""
    first, names = llama.num_layers, llama.names
    extra = config.integer("num_nextn_predict_layers", 0, _MOST_FURTHER, 1)
    if not extra:
        return names
    predictor = PredictorNames(
        prefix=f"model.layers.{first}.",
        join="eh_proj",
        token_norm="enorm",
        hidden_norm="hnorm",
        norm="shared_head.norm",
        copies=("embed_tokens", "shared_head.head"),
    )
    others = tuple(rf"model\.layers\.{layer}\..*" for layer in range(first + 1, first + extra))
    return replace(names, predictor=predictor, ignored=(*names.ignored, *others))
