"""EAGLE-3 heads of random weights as their makers publish them, and what they predict, in torch's
own operators."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models.families import SMALL, randomised
from safetensors.torch import save_file
from transformers import LlamaConfig

__all__ = ["LAYERS", "MADE_BY", "HeadedModel", "agreeing_head", "random_head"]

LAYERS = "eagle_aux_hidden_state_layer_ids"
EPS, THETA = 1e-5, 20_000.0
#: What each maker's `config.json` says beside the layer's shape, and where it has the layer.
MADE_BY: dict[str, dict[str, Any]] = {
    "specforge": {"architectures": ["LlamaForCausalLMEagle3"]},
    "eagle": {"architectures": ["LlamaForCausalLM"], LAYERS: [2, 3, 5]},
    "nvidia": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {LAYERS: [1, 2], "use_aux_hidden_state": True},
    },
    "vllm": {"architectures": ["Eagle3LlamaForCausalLM"], "fc_norm": True, "norm_output": True},
    "speculators": {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": True,
        "norm_before_fc": True,
        LAYERS: [0, 4, 7],
    },
}
CAPTURES = {"eagle": (2, 3, 5), "nvidia": (2, 3), "speculators": (0, 4, 7)}
HIDDEN, VOCAB = SMALL["hidden_size"], SMALL["vocab_size"]


@dataclass
class Head:
    """A head's weights by the names of a checkpoint, without the layer's prefix, and its shape."""

    tensors: dict[str, torch.Tensor]
    captures: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 3
    head_dim: int = 20
    inner: int = 56
    vocab: int = VOCAB
    options: dict[str, Any] = field(default_factory=dict)


def random_head(
    made_by: str, *, own_size: bool = False, tokens: int = 90, vocab: int = VOCAB
) -> Head:
    """A head of one of the makers, which can predict so many tokens; `own_size`: with another
    hidden size than the model's."""
    captures = CAPTURES.get(made_by, (2, 3, 4))
    head = Head({}, captures, vocab=vocab, options=dict(MADE_BY[made_by]))
    hidden, joined = (48 if own_size else HIDDEN), len(captures) * HIDDEN
    q, kv = head.heads * head.head_dim, head.kv_heads * head.head_dim
    generator = torch.Generator().manual_seed(11)

    def random(*shape: int) -> torch.Tensor:
        mean = 1.0 if len(shape) == 1 else 0.0
        return torch.empty(*shape).normal_(mean, 0.15, generator=generator)

    head.tensors = {
        "fc.weight": random(hidden, joined),
        "hidden_norm.weight": random(hidden),
        "input_layernorm.weight": random(hidden),
        "post_attention_layernorm.weight": random(hidden),
        "self_attn.q_proj.weight": random(q, 2 * hidden),
        "self_attn.k_proj.weight": random(kv, 2 * hidden),
        "self_attn.v_proj.weight": random(kv, 2 * hidden),
        "self_attn.o_proj.weight": random(hidden, q),
        "mlp.gate_proj.weight": random(head.inner, hidden),
        "mlp.up_proj.weight": random(head.inner, hidden),
        "mlp.down_proj.weight": random(hidden, head.inner),
        "norm.weight": random(hidden),
    }
    if made_by != "vllm" or own_size:
        # One without a choice of tokens takes the model's head.
        head.tensors["lm_head.weight"] = random(tokens, hidden)
        chosen = torch.randperm(vocab, generator=generator)[:tokens].sort().values
        head.tensors["d2t"] = chosen - torch.arange(tokens)
        head.tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    if made_by in ("nvidia", "speculators") or own_size:
        head.tensors["embed_tokens.weight"] = random(vocab, hidden)
    if head.options.get("fc_norm"):
        head.tensors |= {f"fc_norm.{i}.weight": random(HIDDEN) for i in range(len(captures))}
    if head.options.get("norm_before_fc"):
        head.tensors["input_norm.weight"] = random(joined)
    return head


class HeadedModel:
    """A Llama of transformers, and a head for it."""

    def __init__(self, head: Head, layers: int = 7) -> None:
        config = LlamaConfig(**SMALL | {"num_hidden_layers": layers, "vocab_size": head.vocab})
        self.model: Any = randomised(config)
        self.head = head

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write both checkpoints: the model's folder, and the head's."""
        model, beside = folder / "model", folder / "head"
        self.model.save_pretrained(model)
        beside.mkdir()
        tensors, options = self.head.tensors, dict(self.head.options)
        inside = "layers.0." if options["architectures"][0].startswith("Eagle3") else "midlayer."
        of_layer = ("self_attn", "mlp", "hidden_norm", "input_layernorm", "post_attention")
        named = {
            (inside if name.startswith(of_layer) else "") + name: tensor.clone()
            for name, tensor in tensors.items()
        }
        save_file(named, beside / "model.safetensors", metadata={"format": "pt"})
        hidden = tensors["fc.weight"].shape[0]
        shape = {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": self.head.inner,
            "num_hidden_layers": 1,
            "num_attention_heads": self.head.heads,
            "num_key_value_heads": self.head.kv_heads,
            "head_dim": self.head.head_dim,
            "rms_norm_eps": EPS,
            "rope_theta": THETA,
            "max_position_embeddings": 64,
            "vocab_size": self.head.vocab,
        }
        if hidden != HIDDEN:
            options["target_hidden_size"] = HIDDEN
        if "d2t" in tensors:
            options["draft_vocab_size"] = len(tensors["d2t"])
        if options["architectures"] == ["Eagle3Speculator"]:
            options["transformer_layer_config"] = shape
        else:
            options |= shape
        (beside / "config.json").write_text(json.dumps(options))
        return model, beside

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 `[tokens, vocab]` of the model."""
        logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits.float()

    @torch.inference_mode()
    def further(self, known: list[int], chain: list[int]) -> torch.Tensor:
        """float32 `[vocab]`: what may come after `known` and a chain of predicted tokens."""
        features = self._features(known[:-1])
        tokens = known[1:]
        for token in [*chain, None]:
            states = self._layer(tokens, features)[-1:]
            if token is not None:
                carried = self._norm("norm", states) if self._has("norm_output") else states
                features, tokens = torch.cat((features, carried)), [*tokens, token]
        return self._head(states)[0]

    def _features(self, ids: list[int]) -> torch.Tensor:
        """`[tokens, hidden]`: the model's hidden states, joined."""
        body, entering, left = self.model.model, [], []
        hooks = [
            layer.register_forward_pre_hook(lambda _, args: entering.append(args[0]))
            for layer in body.layers
        ]
        hooks.append(body.layers[-1].register_forward_hook(lambda *args: left.append(args[-1])))
        body(torch.tensor([ids]), use_cache=False)
        for hook in hooks:
            hook.remove()
        last = left[0][0] if isinstance(left[0], tuple) else left[0]
        states = [[*entering, last][layer][0] for layer in self.head.captures]
        if self._has("fc_norm"):
            states = [self._norm(f"fc_norm.{i}", state) for i, state in enumerate(states)]
        joined = torch.cat(states, dim=-1)
        if self._has("norm_before_fc"):
            joined = self._norm("input_norm", joined)
        return joined @ self._weight("fc").T

    def _layer(self, tokens: list[int], features: torch.Tensor) -> torch.Tensor:
        own = self.head.tensors.get("embed_tokens.weight")
        rows = self.model.model.embed_tokens.weight if own is None else own
        normed = self._norm("hidden_norm", features)
        both = torch.cat((self._norm("input_layernorm", rows[torch.tensor(tokens)]), normed), -1)
        residual = normed if self._has("norm_before_residual") else features
        x = residual + self._attended(both)
        fed = self._norm("post_attention_layernorm", x)
        gate, up = (fed @ self._weight(f"mlp.{part}_proj").T for part in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self._weight("mlp.down_proj").T

    def _attended(self, x: torch.Tensor) -> torch.Tensor:
        head, count = self.head, len(x)
        q, k, v = (x @ self._weight(f"self_attn.{part}_proj").T for part in "qkv")
        q = _rotated(q.view(count, head.heads, -1).transpose(0, 1))
        k = _rotated(k.view(count, head.kv_heads, -1).transpose(0, 1))
        v = v.view(count, head.kv_heads, -1).transpose(0, 1)
        k, v = (each.repeat_interleave(head.heads // head.kv_heads, 0) for each in (k, v))
        scores = q @ k.transpose(1, 2) / head.head_dim**0.5
        later = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1) @ self._weight("self_attn.o_proj").T

    def _head(self, states: torch.Tensor) -> torch.Tensor:
        own = self.head.tensors.get("lm_head.weight")
        weight = self.model.lm_head.weight if own is None else own
        logits = self._norm("norm", states) @ weight.T
        if "d2t" not in self.head.tensors:
            return logits
        every = torch.full((len(states), self.head.vocab), -torch.inf)
        offsets = self.head.tensors["d2t"]
        for number, offset in enumerate(offsets.tolist()):
            every[:, number + offset] = logits[:, number]
        return every

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
        return x * scale * self._weight(name)

    def _weight(self, name: str) -> torch.Tensor:
        return self.head.tensors[f"{name}.weight"]

    def _has(self, option: str) -> bool:
        return bool(self.head.options.get(option))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """`[heads, tokens, head_dim]`, of tokens from position 0 on."""
    half = x.shape[-1] // 2
    rates = THETA ** -(torch.arange(half) / half)
    angles = torch.arange(x.shape[1])[:, None] * rates
    one, two = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def agreeing_head(vocab: int = VOCAB, layers: int = 2) -> HeadedModel:
    """A model whose layers add little to its embedding, and a head that passes on the embedding of
    the next token alone, so that the two draw alike most of the time."""
    head = random_head("speculators", tokens=vocab, vocab=vocab)
    head.captures = (0, 1, layers)
    head.options[LAYERS] = [*head.captures]
    model = HeadedModel(head, layers)
    head.heads, head.kv_heads, head.head_dim = 4, 4, HIDDEN // 4
    body, eye = model.model.model, torch.eye(HIDDEN, 2 * HIDDEN)
    with torch.no_grad():
        for name, parameter in body.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.1)
        rows = body.embed_tokens.weight
        rows.div_(rows.square().mean(-1, keepdim=True).sqrt())
    tensors = head.tensors
    # Keys that equal the query: it attends to its own token.
    tensors["self_attn.q_proj.weight"] = tensors["self_attn.k_proj.weight"] = 6 * eye
    tensors["self_attn.v_proj.weight"], tensors["self_attn.o_proj.weight"] = eye, eye[:, :HIDDEN]
    tensors["hidden_norm.weight"] = torch.zeros(HIDDEN)
    tensors["input_layernorm.weight"] = torch.ones(HIDDEN)
    tensors["mlp.down_proj.weight"] = torch.zeros(HIDDEN, head.inner)
    tensors["embed_tokens.weight"] = rows.detach().clone()
    tensors["lm_head.weight"] = model.model.lm_head.weight.detach().clone()
    tensors["norm.weight"] = body.norm.weight.detach().clone()
    return model
