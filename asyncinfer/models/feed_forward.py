"""Builds one layer's MLP or experts from a config and weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncinfer.layers import (
    MLP,
    Activation,
    Experts,
    FeedForward,
    GroupedRouter,
    LoraLinear,
    Norm,
    Route,
    SoftmaxRouter,
    SparseMixer,
    activation,
    added,
    clamped_swiglu,
    followed,
    gated,
    learned,
    make_norm,
    normed,
    scaled_by_expert,
)
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.layer_weights import LayerWeights
from asyncinfer.models.parts import ExpertsConfig

__all__ = ["FeedForwardBuilder"]


class FeedForwardBuilder:
    """Asks for weights in the tensor table's order. A router and a shared expert's gate stay in
    floats: they are small, and a choice must be exact. `dtype` is the dtype of the computation."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._weights = weights
        self._device = device
        self._dtype = dtype

    def build(self, index: int, name: str) -> FeedForward:
        """The feed-forward layer after a layer's attention: an MLP, or experts."""
        config = self._config
        experts = config.layer_experts(index)
        if experts is None or experts.beside:
            return self._mlp(f"{name}.mlp", config.layer_intermediate(index))
        mixture = self._experts(experts, f"{name}.experts")
        if not experts.shared_size:
            return mixture
        shared: FeedForward = self._mlp(f"{name}.shared", experts.shared_size)
        if experts.shared_gate:
            gate = self._weights.linear(f"{name}.experts.shared_gate", False, "plain")
            shared = gated(shared, gate)
        return added(mixture, shared)

    def with_experts(
        self, experts: ExpertsConfig, name: str, mlp_norm: Norm, mlp: FeedForward
    ) -> FeedForward:
        """`mlp` and its norm, which `build` has made, with experts in parallel."""
        norm, out_norm, dense_norm = (
            make_norm(
                self._config.norm,
                self._weights.tensor(f"{name}.experts.{part}"),
                None,
                self._config.norm_eps,
            )
            for part in ("norm", "out_norm", "dense_norm")
        )
        mixture = self._experts(experts, f"{name}.experts", norm)
        return added(followed(normed(mlp_norm, mlp), dense_norm), followed(mixture, out_norm))

    def _mlp(self, name: str, size: int) -> MLP:
        config = self._config
        width = size * (2 if config.gated_mlp else 1)
        up = self._linear(f"{name}.up", config.mlp_bias)
        activate = self._activation(f"{name}.activation", width)
        return MLP(up, activate, self._linear(f"{name}.down", config.mlp_bias))

    def _activation(self, name: str, width: int) -> Activation:
        """The activation of a layer. One that a family brings is called once here, so that a fault
        is found before the first request."""
        config = self._config
        with_weights = learned(config.activation)
        weights = [
            self._weights.tensor(f"{name}.{index}")
            for index in range(0 if with_weights is None else len(with_weights.weights))
        ]
        activate = activation(config.activation, gated=config.gated_mlp, weights=weights)
        if not isinstance(config.activation, str):
            activate(torch.zeros(1, width, dtype=self._dtype, device=self._device))
        return activate

    def _experts(self, experts: ExpertsConfig, name: str, norm: Norm | None = None) -> Experts:
        config = self._config
        if experts.clamped_swiglu is not None:
            activate = clamped_swiglu(*experts.clamped_swiglu)
        else:
            width = experts.intermediate_size * (2 if config.gated_mlp else 1)
            activate = self._activation(f"{name}.activation", width)
        return Experts(
            self._router(experts, name),
            self._weights.grouped(f"{name}.up", experts.bias, experts.count),
            activate,
            self._weights.grouped(f"{name}.down", experts.bias, experts.count),
            torch.arange(experts.count, device=self._device),
            norm=norm,
            weigh_inputs=experts.weigh_inputs,
        )

    def _router(self, experts: ExpertsConfig, name: str) -> Route:
        norm = None
        if experts.router_norm:
            weight = self._weights.tensor(f"{name}.router_norm")
            # The router divides the norm's outputs by the root of their number.
            scale = self._config.hidden_size**-0.5
            norm = make_norm("rms", weight * scale, None, self._config.norm_eps)
        linear = self._weights.linear(f"{name}.router", experts.router_bias, "plain")
        route = self._route(experts, name, linear if norm is None else followed(norm, linear))
        if not experts.expert_scale:
            return route
        return scaled_by_expert(route, self._weights.tensor(f"{name}.scale").float())

    def _route(
        self,
        experts: ExpertsConfig,
        name: str,
        logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> Route:
        if experts.scoring == "sparse-mixer":
            return SparseMixer(logits, experts.jitter)
        plain = ("softmax", 1, False, 1.0)
        if (experts.scoring, experts.groups, experts.correction, experts.scale) == plain:
            return SoftmaxRouter(logits, experts.active, experts.normalise)
        return GroupedRouter(
            logits,
            experts.active,
            experts.normalise,
            sigmoid=experts.scoring == "sigmoid",
            groups=experts.groups,
            active_groups=experts.active_groups,
            group_best=experts.group_best,
            correction=(self._weights.tensor(f"{name}.correction") if experts.correction else None),
            scale=experts.scale,
            epsilon=experts.epsilon,
        )

    def _linear(self, name: str, bias: bool) -> LoraLinear:
        return LoraLinear(self._weights.linear(name, bias), name)
