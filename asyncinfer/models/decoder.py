"""`Decoder`: the transformer that all models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from asyncinfer.attention import (
    Attend,
    AttentionBatch,
    DeviceBatch,
    IndexedAttention,
    KVCache,
    LayerStates,
    WholeAttention,
    begin_attention,
    in_chunks,
)
from asyncinfer.kernels.threads import one_thread
from asyncinfer.layers import (
    Angles,
    ForwardPass,
    LoraRows,
    PerLayerInputs,
    RMSNorm,
    RotaryEmbedding,
    make_norm,
)
from asyncinfer.models.arrangement import arranged
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.eagle3 import Eagle3Head, HeadWeights
from asyncinfer.models.embedding import Embedding
from asyncinfer.models.layer import LayerBuilder, build_norm
from asyncinfer.models.layer_weights import LayerWeights
from asyncinfer.models.predictor import Predictor
from asyncinfer.quantization import CudaLinear, has_fused_kernels
from asyncinfer.weights import WeightCopy, WeightSource

__all__ = ["Decoder"]


class Decoder:
    """A decoder-only transformer over a paged KV cache. Call it under `torch.inference_mode()`."""

    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        max_context: int | None = None,
        storage: str = "plain",
        drafting_head: HeadWeights | None = None,
        copy: WeightCopy | None = None,
    ) -> None:
        """
        Args:
            source: gives each tensor of `tensor_table(config)` by name, in the table's order.
            max_context: length of the longest sequence; None: `config.max_context`.
            storage: format of the layers' matrices; embedding and head stay as they are.
            drafting_head: weights for which `config` has a place; None: there is none.
            copy: has the tensors as a CPU's layers hold them, or is given them; None: there is
                none.
        """
        self.config = config
        weights = LayerWeights(arranged(config, source), storage, copy)
        embedding = weights.rows("embedding")
        learned = weights.tensor("positions") if config.learned_positions is not None else None
        self.embedding = Embedding(embedding, config.embedding_scale, learned)
        self._per_layer = self._build_per_layer(weights)
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        layers = [config.layer(index) for index in range(config.num_layers)]
        ropes = list(dict.fromkeys(layer.rope for layer in layers if layer.rope is not None))
        self._rope_configs = ropes
        self._temperatures = config.temperatures
        self._scale = config.query_scale
        fused = isinstance(embedding, torch.Tensor) and has_fused_kernels(embedding)
        builder = LayerBuilder(config, ropes, weights, self.device, self.dtype, fused)
        count = config.num_layers - config.predicts
        self.layers = [builder.layer(index) for index in range(count)]
        #: Predicts the token after the next one; None: the model was loaded without a predictor.
        self.predictor: Predictor | Eagle3Head | None = None
        if config.predicts:
            self.predictor = Predictor(config, weights, builder)
        self._norm = build_norm(config, "norm", weights)
        self.head = weights.head(embedding if config.tied_head else None, config.head_bias)
        #: The layers whose inputs a drafting head gets.
        self.captures: tuple[int, ...] = ()
        #: Called after each layer of a pass.
        self.between_layers: Callable[[], None] | None = None
        if drafting_head is not None:
            self.predictor = Eagle3Head(
                drafting_head,
                layer=config.num_layers,
                embedding=embedding,
                head=self.head,
                vocab_size=config.vocab_size,
                storage=storage,
                dtype=self.dtype,
                device=self.device,
            )
            self.captures = self.predictor.captures
        self.keep_within(max_context or config.max_context)

    def keep_within(self, max_context: int) -> None:
        """Make the rotations for sequences of at most `max_context` tokens."""
        self.max_context = max_context
        # If no sequence is longer than a chunk, no row has to be cut.
        cut = (self.config.chunk or max_context) < max_context
        self._chunked = frozenset(self.config.chunked_layers if cut else ())
        apart = self._chunked or self.config.indexed or isinstance(self.predictor, Eagle3Head)
        self._alike = not apart
        with torch.inference_mode(), one_thread():
            self._ropes = [
                RotaryEmbedding(rope, self.config.head_dim, self.device, max_context)
                for rope in self._rope_configs
            ]
            if isinstance(self.predictor, Eagle3Head):
                self.predictor.keep_within(max_context)

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks about how the model was loaded."""
        return (*self.config.notes, *(rope.note for rope in self._ropes if rope.note is not None))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[KVCache],
        batches: Sequence[DeviceBatch],
        adapters: LoraRows | None = None,
        states: LayerStates | None = None,
    ) -> torch.Tensor:
        """Hidden states `[tokens, hidden]` in the model's dtype, before the final norm.

        `token_ids` and `positions` are int64 `[tokens]`, row after row as in each of `batches`: one
        for each cache in `kv`, that of its KV group, with the same rows. Each layer writes the KV
        of all tokens at its group's `slot_mapping` before it attends. `adapters`: the tokens' LoRA
        adapters, if any token has one. `states`: the rows' states, in layers that keep one in place
        of KV; the caller commits them.
        """
        one = self.begin(positions, kv, batches, adapters, states)
        return self.run(token_ids, positions, one)

    def begin(
        self,
        positions: torch.Tensor,
        kv: Sequence[KVCache],
        batches: Sequence[DeviceBatch],
        adapters: LoraRows | None = None,
        states: LayerStates | None = None,
    ) -> ForwardPass:
        """What each layer is given in `run`, and in `predict` after it; arguments of `forward`.
        It clears every page whose first token is in this pass, so call it once for a pass."""
        angles = self.angles(positions)
        temperatures = [each.factors(positions) for each in self._temperatures]
        return ForwardPass(angles, self._attends(kv, batches), adapters, temperatures, states)

    def angles(self, positions: torch.Tensor) -> list[Angles]:
        """The angles of tokens at `positions`, int64 `[tokens]`, by each of the rotations."""
        return [rope(positions) for rope in self._ropes]

    @property
    def angle_tables(self) -> list[torch.Tensor | None]:
        """`RotaryEmbedding.table` of each of the rotations."""
        return [rope.table for rope in self._ropes]

    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, one: ForwardPass
    ) -> torch.Tensor:
        """`forward`, of a pass that has begun."""
        x = self.embedding(token_ids, positions)
        if self._per_layer is not None:
            one = replace(one, per_layer=self._per_layer(token_ids, x))
        for index, layer in enumerate(self.layers):
            if index in self.captures:
                one.captured.append(x)
            x = layer(x, one)
            if self.between_layers is not None:
                self.between_layers()
        if len(self.layers) in self.captures:
            one.captured.append(x)
        return x

    def predict(
        self,
        following: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        one: ForwardPass,
    ) -> torch.Tensor:
        """States `[tokens, hidden]` of the predictor, for `predicted_logits`; its KV of all tokens
        is written. `hidden` is what `run` gave of the tokens at `positions` in the same pass, and
        `following` are the tokens that come after them, int64 `[tokens]`."""
        head, taken = self.predictor, one.captured
        features = head.features(taken) if isinstance(head, Eagle3Head) else self._norm(hidden)
        return self._predicted(following, positions, features, one)

    def predict_further(
        self,
        following: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor,
        one: ForwardPass,
    ) -> torch.Tensor:
        """`predict` for tokens that the model has not computed, in a pass of their own that has
        begun: `states` are the predictor's for the token before each."""
        assert self.predictor is not None
        return self._predicted(following, positions, self.predictor.carried(states), one)

    def predicted_logits(self, states: torch.Tensor) -> torch.Tensor:
        """float32 `[n, vocab_size]` of the token after the next one, for states of `predict`."""
        if isinstance(self.predictor, Eagle3Head):
            return self.predictor.logits(states)
        assert self.predictor is not None
        return self._capped(self.head(self.predictor.norm(states)).float())

    def _predicted(
        self,
        following: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        one: ForwardPass,
    ) -> torch.Tensor:
        if isinstance(self.predictor, Eagle3Head):
            return self.predictor(following, positions, features, one)
        assert self.predictor is not None
        embedded = self.embedding(following, positions)
        # The predictor has no adapters.
        return self.predictor(embedded, features, replace(one, adapters=None))

    def _build_per_layer(self, weights: LayerWeights) -> PerLayerInputs | None:
        config, size = self.config, self.config.per_layer_inputs
        if not size:
            return None
        embedding = Embedding(weights.rows("per_layer.embedding"), size**0.5)
        return PerLayerInputs(
            embedding,
            weights.linear("per_layer.projection", False, "plain"),
            make_norm(config.norm, weights.tensor("per_layer.norm"), None, config.norm_eps),
            config.num_layers,
            config.hidden_size,
        )

    def _attends(self, kv: Sequence[KVCache], batches: Sequence[DeviceBatch]) -> dict[int, Attend]:
        """The attention of each layer; the layers of a KV group share one."""
        if self.config.bidirectional:
            (batch,) = batches
            assert isinstance(batch, AttentionBatch)
            return dict.fromkeys(range(len(self.layers)), WholeAttention(batch, self._scale))
        attends: dict[int, Attend] = {}
        for cache, batch in zip(kv, batches, strict=True):
            if cache.layers and self._alike:
                attends |= dict.fromkeys(cache.layers, begin_attention(cache, batch, self._scale))
            elif cache.layers:
                attends.update(self._attends_by_variant(cache, batch))
        return attends

    def _attends_by_variant(self, kv: KVCache, batch: DeviceBatch) -> dict[int, Attend]:
        """`_attends` for one cache of a model that is not `_alike`."""
        head, most = self.predictor, self.config.indexed
        if isinstance(head, Eagle3Head) and head.layer in kv.layers:
            return dict.fromkeys(kv.layers, begin_attention(kv, batch, head.scale))
        if most is not None:
            assert isinstance(batch, AttentionBatch), "its steps are not recorded"
            return dict.fromkeys(kv.layers, IndexedAttention(kv, batch, self._scale, most))
        attends: dict[int, Attend] = {}
        # Created before any layer writes, since creating clears pages.
        for layers in filter(None, (kv.layers - self._chunked, kv.layers & self._chunked)):
            rows, chunk = batch, self.config.chunk
            if chunk is not None and layers <= self._chunked:
                rows = in_chunks(batch, chunk, alone=layers == kv.layers)
            attends |= dict.fromkeys(layers, begin_attention(kv, rows, self._scale))
        return attends

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[n, hidden]` after the final norm, as the head has it."""
        return self._norm(hidden)

    def logits(self, hidden: torch.Tensor, *, as_stored: bool = False) -> torch.Tensor:
        """float32 `[n, vocab_size]` for the hidden states `[n, hidden]` of rows to sample. With
        `as_stored` logits that are the head's product itself stay in the model's dtype: the same
        numbers without the conversion."""
        if isinstance(self.head, CudaLinear) and isinstance(self._norm, RMSNorm):
            norm = self._norm
            logits = self.head.fused(hidden, norm=norm.weight, eps=norm.eps, plus_one=norm.plus_one)
        else:
            logits = self.head(self._norm(hidden))
        plain = self.config.logit_softcap is None and self.config.logit_scale == 1.0
        return logits if as_stored and plain else self._capped(logits.float())

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 logits, scaled and capped in place."""
        cap, scale = self.config.logit_softcap, self.config.logit_scale
        if scale != 1.0:
            logits = logits.mul_(scale)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
