"""Builds one layer of the decoder from a config and weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncinfer.attention import MOST_HEAD_DIM, HeadNorms
from asyncinfer.layers import (
    Attention,
    DecoderLayer,
    FeedForward,
    FusedLayer,
    FusedMLP,
    HeadNorm,
    Layer,
    LoraLinear,
    Norm,
    NormedExperts,
    ParallelLayer,
    RMSNorm,
    RopeConfig,
    SublayerOnly,
    WithPerLayerInput,
    activation,
    added_attention,
    fed,
    followed,
    fused_gate,
    make_norm,
    normed_first,
    scaled,
)
from asyncinfer.models.attention import AttentionBuilder
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.feed_forward import FeedForwardBuilder
from asyncinfer.models.layer_weights import LayerWeights
from asyncinfer.models.mixer import build_mixer
from asyncinfer.models.tensors import block_norms
from asyncinfer.quantization import CudaLinear

__all__ = ["LayerBuilder", "build_norm"]


def build_norm(config: ModelConfig, name: str, weights: LayerWeights) -> Norm:
    """The norm of this name in the tensor table."""
    return make_norm(
        config.norm,
        weights.tensor(f"{name}.weight") if config.norm_weight else None,
        weights.tensor(f"{name}.bias") if config.norms_have_bias else None,
        config.norm_eps,
    )


class LayerBuilder:
    """Builds the layers one after another, asking for weights in the tensor table's order.

    `ropes` are the model's different rotations, in the order of a forward pass' angles. `fused`:
    whether the linear layers are `CudaLinear`s, which fuse their neighbours into one launch."""

    def __init__(
        self,
        config: ModelConfig,
        ropes: Sequence[RopeConfig],
        weights: LayerWeights,
        device: torch.device,
        dtype: torch.dtype,
        fused: bool,
    ) -> None:
        self._config = config
        self._fused_kernels = fused
        self._ropes = ropes
        self._weights = weights
        self._attention = AttentionBuilder(config, ropes, weights, device)
        self._feed_forward = FeedForwardBuilder(config, weights, device, dtype)

    def layer(self, index: int) -> Layer:
        config = self._config
        name = f"layers.{index}"
        if self._fuses(index):
            return self._fused(index, name)
        norms = {
            norm: build_norm(config, f"{name}.{norm}", self._weights)
            for norm in block_norms(config, index)
        }
        attention = self._mixed(index, name)
        mlp: FeedForward | None = None
        if config.layer(index).feed_forward:
            mlp = self._feed_forward.build(index, name)
        experts = config.layer_experts(index)
        if mlp is not None and experts is not None and experts.beside:
            mlp = self._feed_forward.with_experts(experts, name, norms.pop("mlp_norm"), mlp)
        attention = attention and scaled(attention, config.residual_scale)
        mlp = mlp and scaled(mlp, config.residual_scale)
        if attention is None:
            assert mlp is not None
            return SublayerOnly(norms["mlp_norm"], fed(mlp))
        if mlp is None:
            return SublayerOnly(norms["attention_norm"], attention)
        block = config.layer_block(index)
        if block == "parallel":
            return ParallelLayer(norms["attention_norm"], attention, norms["mlp_norm"], mlp)
        if block == "parallel-shared":
            return ParallelLayer(norms["attention_norm"], attention, None, mlp)
        if "attention_out_norm" in norms:
            attention = followed(attention, norms["attention_out_norm"])
            mlp = followed(mlp, norms["mlp_out_norm"])
        return self._completed(
            index,
            DecoderLayer(
                norms.get("attention_norm", _same), attention, norms.get("mlp_norm", _same), mlp
            ),
        )

    def _completed(self, index: int, layer: Layer) -> Layer:
        """The layer with what follows its feed-forward part."""
        config, name = self._config, f"layers.{index}"
        if config.per_layer_inputs:
            gate, out = (
                self._linear(f"{name}.per_layer.{part}", False) for part in ("gate", "out")
            )
            norm = make_norm(
                config.norm, self._tensor(f"{name}.per_layer.norm"), None, config.norm_eps
            )
            activate = activation(config.activation, gated=False)
            layer = WithPerLayerInput(layer, index, gate, activate, out, norm)
        if config.layer_scale:
            layer = scaled(layer, self._tensor(f"{name}.scale").item())
        return layer

    def _mixed(self, index: int, name: str) -> Attention | None:
        """Attention, a mixer in its place, or the sum of both."""
        config, layer = self._config, self._config.layer(index)
        mixed: Attention | None = None
        if layer.mixer is not None:
            eps = config.norm_eps
            mixed = build_mixer(
                index, layer.mixer, f"{name}.mixer", eps, self._tensor, self._linear
            )
        if not layer.attends:
            return mixed
        attention = self._attention.build(index, f"{name}.attention")
        return attention if mixed is None else added_attention(mixed, attention)

    def _fuses(self, index: int) -> bool:
        """Whether `FusedLayer` can compute the layer and its kernels run on this device."""
        config = self._config
        return (
            self._fused_kernels
            and config.latent is None
            # The paged kernels take no larger heads.
            and config.head_dim <= MOST_HEAD_DIM
            and (config.layer_block(index), config.residual_scale) == ("pre", 1.0)
            and config.norm in ("rms", "rms-plus-one")
            and config.norm_weight
            and (config.qk_norm is None or config.qk_norm == "head")
            and (config.qk_norm is None or (config.qk_norm_weight and config.layer(index).qk_norm))
            and (config.layer_experts(index) is not None or self._gate() is not None)
            and config.layer(index).rope is not None
            and config.layer(index).temperature is None
            and config.layer(index).mixer is None
            and config.layer(index).feed_forward
            and config.attention_out_scale == 1.0
            and not config.attention_gate
            and not (config.value_norm or config.layer_scale or config.per_layer_inputs)
            and config.uniform_kv
        )

    def _gate(self) -> str | None:
        """The feed-forward layer's gate as the name of a kernel's epilogue; None if no kernel has
        it."""
        return fused_gate(self._config.activation) if self._config.gated_mlp else None

    def _fused(self, index: int, name: str) -> FusedLayer:
        config = self._config
        plus_one = config.norm == "rms-plus-one"

        def norm(part: str) -> RMSNorm:
            return RMSNorm(self._tensor(f"{name}.{part}.weight"), config.norm_eps, plus_one)

        def linear(part: str, bias: bool) -> CudaLinear:
            made = self._weights.linear(f"{name}.{part}", bias)
            assert isinstance(made, CudaLinear)
            return made

        attention_norm, mlp_norm = norm("attention_norm"), norm("mlp_norm")
        qkv, out = (
            linear("attention.qkv", config.qkv_bias),
            linear("attention.out", config.out_bias),
        )
        head_norms, prepare = None, self._attention.rotation(index)
        if config.qk_norm is not None:
            q, k = (self._tensor(f"{name}.attention.{part}_norm") for part in "qk")
            head_norms = HeadNorms(q, k, config.norm_eps, plus_one)
            heads = config.num_heads, config.num_kv_heads
            prepare = normed_first(HeadNorm(q, k, *heads, config.norm_eps, plus_one), prepare)
        rope = config.layer(index).rope
        assert rope is not None
        variant = self._attention.variant(index, f"{name}.attention")
        mlp: FusedMLP | NormedExperts
        if config.layer_experts(index) is not None:
            mlp = NormedExperts(mlp_norm, self._feed_forward.build(index, name))
        else:
            gate = self._gate()
            assert gate is not None
            mlp = FusedMLP(
                name=f"{name}.mlp",
                norm=mlp_norm,
                up=linear("mlp.up", config.mlp_bias),
                down=linear("mlp.down", config.mlp_bias),
                activation=gate,
            )
        return FusedLayer(
            index=index,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            attention_norm=attention_norm,
            qkv=qkv,
            rope=self._ropes.index(rope),
            head_norms=head_norms,
            prepare=prepare,
            out=out,
            variant=variant,
            mlp=mlp,
        )

    def _tensor(self, name: str) -> torch.Tensor:
        return self._weights.tensor(name)

    def _linear(self, name: str, bias: bool) -> LoraLinear:
        return LoraLinear(self._weights.linear(name, bias), name)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x
