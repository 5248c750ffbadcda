"""Small models with a layer that predicts further tokens, as published checkpoints have it; and
what that layer predicts by transformers' own layers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from models.families import DEEPSEEK, GLM_MOE, GLOBAL, SMALL, randomised
from models.hybrids import DELTA, DELTA_MOE, LINEAR
from models.sparse import SPARSE
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

#: Where a checkpoint has the layer and what stands beside it, of DeepSeek-V3 and its like.
_LAST = {
    "layer": "model.layers.{}.",
    "join": "model.layers.{}.eh_proj",
    "token_norm": "model.layers.{}.enorm",
    "hidden_norm": "model.layers.{}.hnorm",
    "norm": "model.layers.{}.shared_head.norm",
}
_BESIDE = {
    "layer": "mtp.layers.0.",
    "join": "mtp.fc",
    "token_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
}
_DELTA_LAYERS = {"num_hidden_layers": 3, "layer_types": [LINEAR, GLOBAL, GLOBAL]}
#: The configs count the layer that predicts as their last one.
PREDICTING: dict[str, PreTrainedConfig] = {
    "deepseek": DeepseekV3Config(**SMALL | DEEPSEEK | {"n_group": 2, "topk_group": 1}),
    "deepseek-v3.2": SPARSE["deepseek-v3.2"][1][0],
    "glm": Glm4MoeConfig(
        **SMALL | GLM_MOE | {"head_dim": 16, "use_qk_norm": True, "first_k_dense_replace": 1}
    ),
    "qwen3-next": Qwen3NextConfig(**DELTA_MOE | _DELTA_LAYERS),
    "qwen3.5": Qwen3_5TextConfig(**DELTA | _DELTA_LAYERS),
}


class PredictingModel:
    """A model of transformers whose last layer is taken out of it, to predict further tokens."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.model: Any = randomised(copy.deepcopy(config))
        self._body = self.model.model
        #: The last one is that which predicts.
        self.layers: list[Any] = list(self._body.layers)
        self._kinds = list(getattr(config, "layer_types", None) or [])
        self._norm = self._body.norm
        hidden = config.hidden_size
        generator = torch.Generator().manual_seed(8)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.token_norm, self.hidden_norm, self.norm = (copy.deepcopy(self._norm) for _ in range(3))
        with torch.no_grad():
            self.join.weight.normal_(0.0, 0.15, generator=generator)
            for norm in (self.token_norm, self.hidden_norm, self.norm):
                norm.weight.add_(torch.empty(hidden).normal_(0.0, 0.1, generator=generator))

    def save(self, folder: Path, **config: Any) -> Path:
        """Write the checkpoint; `config` changes what `config.json` says."""
        self._use(self.layers, self._norm)
        self.model.save_pretrained(folder)
        file, last = folder / "model.safetensors", len(self.layers) - 1
        tensors = load_file(file)
        names = _BESIDE if LINEAR in self._kinds else _LAST
        for name in [name for name in tensors if name.startswith(f"model.layers.{last}.")]:
            part = name.removeprefix(f"model.layers.{last}.")
            tensors[names["layer"].format(last) + part] = tensors.pop(name)
        for part in ("join", "token_norm", "hidden_norm", "norm"):
            tensors[f"{names[part].format(last)}.weight"] = getattr(self, part).weight.detach()
        if names is _LAST:
            embedding = self._body.embed_tokens.weight.detach()
            tensors[f"model.layers.{last}.embed_tokens.weight"] = embedding.clone()
            head = self.model.lm_head.weight.detach()
            tensors[f"model.layers.{last}.shared_head.head.weight"] = head.clone()
        save_file(tensors, file, metadata={"format": "pt"})
        values = json.loads((folder / "config.json").read_text())
        values["num_hidden_layers"] = last
        for key in {"layer_types", "mlp_layer_types"} & values.keys():
            values[key] = values[key][:last]
        (folder / "config.json").write_text(json.dumps({**values, **config}))
        return folder

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 `[tokens, vocab]` of the model without the layer."""
        return self._head(self._hidden(ids))

    @torch.inference_mode()
    def predicted(self, ids: list[int]) -> torch.Tensor:
        """float32 `[tokens - 1, vocab]`: at `i` what comes after token `i + 1`."""
        embedded = self._body.embed_tokens(torch.tensor(ids[1:]))
        parts = self.token_norm(embedded), self.hidden_norm(self._hidden(ids)[:-1])
        joined = self.join(torch.cat(parts, dim=-1))
        return self._head(self._run(joined, self.layers[-1:], self.norm))

    @torch.inference_mode()
    def further(self, known: list[int], chain: list[int]) -> torch.Tensor:
        """float32 `[vocab]`: what comes after `known` and a chain of predicted tokens, each of
        which goes on from the state that told it."""
        hidden, tokens = self._hidden(known)[:-1], known[1:]
        for token in [*chain, None]:
            embedded = self._body.embed_tokens(torch.tensor(tokens))
            joined = self.join(torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), -1))
            states = self._run(joined, self.layers[-1:], self.norm)[-1:]
            if token is not None:
                hidden, tokens = torch.cat((hidden, states)), [*tokens, token]
        return self._head(states)[0]

    def _hidden(self, ids: list[int]) -> torch.Tensor:
        embedded = self._body.embed_tokens(torch.tensor(ids))
        return self._run(embedded, self.layers[:-1], self._norm)

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.lm_head(states)
        return logits.float()

    def _run(self, embedded: torch.Tensor, layers: list[Any], norm: nn.Module) -> torch.Tensor:
        """`[tokens, hidden]`: some of the layers, and a norm."""
        self._use(layers, norm)
        states: torch.Tensor = self._body(inputs_embeds=embedded[None], use_cache=False)[0][0]
        return states

    def _use(self, layers: list[Any], norm: nn.Module) -> None:
        config = self.model.config
        config.num_hidden_layers = len(layers)
        if self._kinds:
            config.layer_types = [self._kinds[self.layers.index(layer)] for layer in layers]
        self._body.layers, self._body.norm = nn.ModuleList(layers), norm


def agreeing(**changes: Any) -> PredictingModel:
    """A model whose predictor is its own first layer, fed with the next token alone. The other
    layer adds little, so that the two draw alike most of the time."""
    shape = {"head_dim": 16, "first_k_dense_replace": 0, **changes}
    config = Glm4MoeConfig(**SMALL | GLM_MOE | shape)
    model = PredictingModel(config)
    first, second, predictor = model.layers
    predictor.load_state_dict(first.state_dict())
    with torch.no_grad():
        for name, parameter in second.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.3)
        rows = model.model.model.embed_tokens.weight
        # A norm leaves such rows as they are.
        rows.div_(rows.square().mean(-1, keepdim=True).sqrt())
        model.token_norm.weight.fill_(1.0)
        model.norm.load_state_dict(model.model.model.norm.state_dict())
        model.join.weight.copy_(torch.eye(config.hidden_size, 2 * config.hidden_size))
    return model
