"""`Predictor`: the layer of a checkpoint that predicts the token after the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from asyncinfer.errors import ModelLoadError
from asyncinfer.layers import ForwardPass, Layer
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.layer import LayerBuilder, build_norm
from asyncinfer.models.layer_weights import LayerWeights
from asyncinfer.weights import TensorFiles

__all__ = ["Predictor", "check_predictor", "with_predictor"]


class Predictor:
    """Multi-token prediction (DeepSeek-V3, 2024): from the model's hidden state of a token and the
    token after it to a state that predicts the token after both.

        state = layer(join(token_norm(embedding(next token)), hidden_norm(norm(hidden))))

    Its layer attends to its own results for earlier tokens, and so has KV like any other layer.
    Embedding and head are the model's own.
    """

    def __init__(self, config: ModelConfig, weights: LayerWeights, builder: LayerBuilder) -> None:
        """The predictor's layer is the last one of `config`."""
        #: The number of its layer's KV.
        self.layer = index = config.num_layers - 1
        name = f"layers.{index}.predictor"
        self._token_norm = build_norm(config, f"{name}.token_norm", weights)
        self._hidden_norm = build_norm(config, f"{name}.hidden_norm", weights)
        #: The norm of states before the head.
        self.norm = build_norm(config, f"{name}.norm", weights)
        self._join = weights.linear(f"{name}.join", False)
        self._decoder_layer: Layer = builder.layer(index)

    def carried(self, states: torch.Tensor) -> torch.Tensor:
        """The predictor's input in place of the model's normed state for its own predictions."""
        return self.norm(states)

    def __call__(
        self, embedded: torch.Tensor, hidden: torch.Tensor, one: ForwardPass
    ) -> torch.Tensor:
        """States `[tokens, hidden]`, before `norm`. `embedded` are the tokens after those of the
        model's normed states `hidden`, both `[tokens, hidden]`; `one` has the positions of
        `hidden`."""
        both = torch.cat((self._token_norm(embedded), self._hidden_norm(hidden)), dim=-1)
        return self._decoder_layer(self._join(both), one)


def with_predictor(config: ModelConfig) -> ModelConfig:
    """The config with the layer that predicts a further token as its last layer. Raises
    `ModelLoadError` for an architecture without a known one."""
    if config.names.predictor is None:
        raise ModelLoadError(
            f"draft='mtp': no layer that predicts further tokens is known of {config.architecture}"
        )
    layers = config.layers
    if layers:
        layers = (*layers, layers[config.kv_layers[-1]])
    return replace(config, num_layers=config.num_layers + 1, layers=layers, predicts=True)


def check_predictor(config: ModelConfig, checkpoint: TensorFiles[Any]) -> None:
    """Refuse a checkpoint that was saved without the layer that predicts further tokens, as
    transformers saves it: the error would else name a tensor that users do not know."""
    names = config.names.predictor
    if names is None or not any(name.startswith(names.prefix) for name in checkpoint.tensors):
        raise ModelLoadError(
            "draft='mtp': the checkpoint has no layer that predicts further tokens",
            file=str(checkpoint.folder),
        )
