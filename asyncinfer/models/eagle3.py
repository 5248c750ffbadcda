"""`Eagle3Head`: a drafting head beside the model, which predicts further tokens (EAGLE-3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from asyncinfer.layers import ForwardPass, Norm, RotaryEmbedding, make_norm
from asyncinfer.models.attention import AttentionBuilder
from asyncinfer.models.eagle3_config import Eagle3Config
from asyncinfer.models.embedding import Embedding
from asyncinfer.models.feed_forward import FeedForwardBuilder
from asyncinfer.models.layer_weights import LayerWeights
from asyncinfer.quantization import Linear, PackedRows
from asyncinfer.weights import WeightSource

__all__ = ["Eagle3Head", "HeadWeights"]


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The config and weights of a head."""

    config: Eagle3Config
    #: Gives each tensor of `eagle3_table` by name, in the table's order.
    weights: WeightSource
    #: int64 `[draft_vocab_size]`: the token of each logit of the head; None: all tokens, in order.
    tokens: torch.Tensor | None


class Eagle3Head:
    """A decoder layer whose input is a token and the model's hidden states of the token before it:
    `join` makes one vector of the hidden states that enter several layers of the model.

        state = layer(token_norm(embedding(next token)), hidden_norm(join(hidden states)))

    A further token goes on from `state` in place of the model's hidden states (EAGLE-3, Li et al.,
    2025). Its layer attends to what it has computed of the tokens before, and so has KV.
    """

    def __init__(
        self,
        made_of: HeadWeights,
        *,
        layer: int,
        embedding: torch.Tensor | PackedRows,
        head: Linear,
        vocab_size: int,
        storage: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """
        Args:
            layer: the number that its layer's KV has: that of the model's layers.
            embedding: the model's, `[vocab, hidden]`, for a head without one.
            head: the model's, likewise.
            storage: the format of its matrices.
        """
        config, weights = made_of.config, LayerWeights(made_of.weights, storage)
        self.layer = layer
        self.captures = config.captures
        #: The factor of its attention's scores.
        self.scale = config.layer.query_scale
        self.heads = config.layer.num_heads
        self._tokens = made_of.tokens
        self._vocab_size = vocab_size
        self._device = device
        self._head_dim = config.layer.head_dim
        self._before_residual = config.norm_before_residual
        self._norms_output = config.norm_output
        shape = config.layer

        def norm(part: str) -> Norm:
            return make_norm("rms", weights.tensor(part), None, shape.norm_eps)

        # The head does not use the model's own embedding scale.
        rows = weights.tensor("embedding") if config.own_embedding else embedding
        self._embedding = Embedding(rows)
        self._each = [norm(f"each.{i}") for i in range(len(config.captures) * config.norm_each)]
        self._all = norm("all") if config.norm_all else None
        self._join = weights.linear("join", False)
        self._token_norm, self._hidden_norm = norm("token_norm"), norm("hidden_norm")
        assert shape.rope is not None
        self._rope_config = shape.rope
        attention = AttentionBuilder(shape, [shape.rope], weights, device)
        self._attention = attention.build(0, "attention", layer)
        self._mlp_norm = norm("mlp_norm")
        self._mlp = FeedForwardBuilder(shape, weights, device, dtype).build(0, "head")
        self._norm = norm("norm")
        self._head = weights.linear("head", False, "plain") if config.own_head else head
        self._rope = RotaryEmbedding(shape.rope, shape.head_dim, device)

    def keep_within(self, max_context: int) -> None:
        """Make the rotation for sequences of at most `max_context` tokens."""
        self._rope = RotaryEmbedding(self._rope_config, self._head_dim, self._device, max_context)

    def features(self, captured: list[torch.Tensor]) -> torch.Tensor:
        """`[tokens, hidden]`: the head's input for tokens that the model has computed, made from
        the hidden states that enter each of `captures`, all `[tokens, hidden of the model]`."""
        if self._each:
            captured = [norm(x) for norm, x in zip(self._each, captured, strict=True)]
        joined = torch.cat(captured, dim=-1)
        return self._join(joined if self._all is None else self._all(joined))

    def carried(self, states: torch.Tensor) -> torch.Tensor:
        """The head's input in place of `features` for a token that it has predicted."""
        return self._norm(states) if self._norms_output else states

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        one: ForwardPass,
    ) -> torch.Tensor:
        """States `[tokens, hidden]`, before the norm of the logits. `tokens` int64 `[tokens]`
        follow the tokens of `features`, which are at `positions`."""
        one = replace(one, angles=[self._rope(positions)], adapters=None)
        embedded = self._embedding(tokens)
        normed = self._hidden_norm(features)
        residual = normed if self._before_residual else features
        x = self._attention(torch.cat((self._token_norm(embedded), normed), dim=-1), one)
        x = x.add_(residual)
        return self._mlp(self._mlp_norm(x)).add_(x)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 `[n, vocab_size]`: -inf for tokens that the head never predicts."""
        logits = self._head(self._norm(states)).float()
        if self._tokens is None:
            return logits
        every = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return every.index_copy_(1, self._tokens, logits)
