"""The names of the decoder's tensors in a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from asyncinfer.layers import check_flags, refuse

__all__ = ["PredictorNames", "TensorNames"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorNames:
    """The names of the layer that predicts a further token (multi-token prediction): see
    `asyncinfer.models.predictor`. All but `prefix` are without it and without `.weight`."""

    #: The prefix of these names, which no tensor of the model without the layer has.
    prefix: str
    #: The prefix of the layer's own tensors, whose names are those of other layers.
    layer: str = ""
    join: str
    token_norm: str
    hidden_norm: str
    norm: str
    #: Second copies of the model's embedding and head, which are not read.
    copies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "copies":
                if not isinstance(value, tuple) or not all(isinstance(n, str) for n in value):
                    raise refuse(self, "copies", "must be a tuple of names")
            elif not isinstance(value, str) or not (value or field.name == "layer"):
                raise refuse(self, field.name, "must be a name")

    def is_copy(self, tensor: str) -> bool:
        """Whether a checkpoint's tensor is one of `copies`."""
        return tensor in [f"{self.prefix}{name}.weight" for name in self.copies]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """The names, by default Llama's. They are without `.weight` and `.bias`, and those of a layer
    are without the layer's prefix."""

    #: Stands before all names except the head's; a model that was saved without its head lacks it.
    prefix: str = "model."
    embedding: str = "embed_tokens"
    #: Learned positions.
    positions: str = "embed_positions"
    #: The name before a layer's number.
    layers: str = "layers"
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    #: Query, key and value projection, behind that of the queries' gates where it is one of its
    #: own; or one tensor with all three.
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    #: The one tensor holds query, key and value of the first head, then of the second, and so on.
    qkv_by_head: bool = False
    #: Pairs of a head's rows are adjacent in layers without a rotation, too.
    qk_paired: bool = False
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    #: Of latent attention. Queries that are made from the hidden state are the first of `qkv`.
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm"
    #: Of an indexer: its queries and keys, the keys' norm, and the weights of its heads.
    index_query: str = "self_attn.indexer.wq_b"
    index_key: str = "self_attn.indexer.wk"
    index_norm: str = "self_attn.indexer.k_norm"
    index_weights: str = "self_attn.indexer.weights_proj"
    #: One tensor with keys and values of each head; or keys `[heads, rank, plain]` and values
    #: `[heads, value, rank]`.
    kv_up: tuple[str, ...] = ("self_attn.kv_b_proj",)
    sinks: str = "self_attn.sinks"
    #: Of a short convolution: its projections and itself.
    conv_in: str = "conv.in_proj"
    conv: str = "conv.conv"
    conv_out: str = "conv.out_proj"
    #: Of a gated delta net: one tensor with queries, keys, values and the outputs' gates of the
    #: first key head, then of the second, and so on; or one with all queries, then all keys and all
    #: values, and one with the gates; or one for each of the four. Beta and step alike, or each in
    #: one tensor.
    delta_in: tuple[str, ...] = ("linear_attn.in_proj_qkvz",)
    delta_gates: tuple[str, ...] = ("linear_attn.in_proj_ba",)
    #: One convolution, or one for each of queries, keys and values.
    delta_conv: tuple[str, ...] = ("linear_attn.conv1d",)
    #: Channels of each of `delta_conv`, where a checkpoint cuts them differently; else None.
    delta_conv_rows: tuple[int, ...] | None = None
    delta_rate: str = "linear_attn.A_log"
    delta_bias: str = "linear_attn.dt_bias"
    delta_norm: str = "linear_attn.norm"
    delta_out: str = "linear_attn.out_proj"
    #: Value heads come in the order of their places beside a key head: the first of each key head,
    #: then the second of each; else those of one key head are adjacent.
    delta_tiled: bool = False
    #: Of Kimi Delta Attention, beside `qkv` and those of a gated delta net: the two projections to
    #: the step of the decay, those to the outputs' gates, and that to beta.
    kimi_forget: tuple[str, ...] = ("self_attn.f_a_proj", "self_attn.f_b_proj")
    kimi_gate: tuple[str, ...] = ("self_attn.g_a_proj", "self_attn.g_b_proj")
    kimi_beta: str = "self_attn.b_proj"
    #: Of a Mamba-2 layer.
    mamba_in: str = "mamba.in_proj"
    mamba_conv: str = "mamba.conv1d"
    mamba_rate: str = "mamba.A_log"
    mamba_bias: str = "mamba.dt_bias"
    mamba_skip: str = "mamba.D"
    mamba_norm: str = "mamba.norm"
    mamba_out: str = "mamba.out_proj"
    #: Whether decay rates are stored as negative numbers, not as logarithms.
    plain_rates: bool = False
    #: Gate and up projection of a gated feed-forward layer, or one tensor with both; else only up.
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    #: Two names of the module that the plain feed-forward layer is in, where a checkpoint may have
    #: the other one. None: it may not.
    mlp_modules: tuple[str, str] | None = None
    router: str = "mlp.gate"
    #: A router's own norm: its weight; and the factors of the experts.
    router_norm: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    #: Of experts beside a plain feed-forward layer: the norms before and after them, and the one
    #: after the plain layer.
    expert_norm: str = "pre_feedforward_layernorm_2"
    expert_out_norm: str = "post_feedforward_layernorm_2"
    expert_dense_norm: str = "post_feedforward_layernorm_1"
    correction: str = "mlp.gate.e_score_correction_bias"
    shared_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    #: As `up` and `down`, with `{}` for the expert's number. A name without `{}` is one tensor of
    #: all experts, `[experts, in, out]`, whose name does not end in `.weight`.
    expert_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    #: The one tensor holds rows of gate and up alternately.
    expert_up_alternates: bool = False
    #: The one tensor is `[experts, out, in]`.
    expert_outputs_first: bool = False
    #: The prefix and the head that checkpoints may have in place of `prefix` and `head`.
    other_prefix: tuple[str, str] | None = None
    #: Where a checkpoint may hold all experts in one tensor in place of a tensor for each: the
    #: names of gate and up and of down, both `[experts, out, in]`. None: it may not.
    fused_experts: tuple[str, str] | None = None
    #: Pairs of a norm's field above and another name that checkpoints have for it.
    spellings: tuple[tuple[str, str], ...] = ()
    #: Of per-layer embeddings: an embedding and a projection for all layers, a norm; and in each
    #: layer the gate, the projection and its norm.
    per_layer_embedding: str = "embed_tokens_per_layer"
    per_layer_projection: str = "per_layer_model_projection"
    per_layer_norm: str = "per_layer_projection_norm"
    per_layer_gate: str = "per_layer_input_gate"
    per_layer_out: str = "per_layer_projection"
    per_layer_out_norm: str = "post_per_layer_input_norm"
    layer_scale: str = "layer_scalar"
    norm: str = "norm"
    head: str = "lm_head"
    #: The layers' linear weights are stored `[in, out]`.
    transposed: bool = False
    #: Regular expressions of tensors that a checkpoint may hold though the model does not use them,
    #: such as constants that old checkpoints saved.
    ignored: tuple[str, ...] = (r".*\brotary_emb\.inv_freq",)
    #: Of the layer that predicts a further token. Its tensors are ignored where the model is
    #: loaded without it. None: the architecture's checkpoints have none.
    predictor: PredictorNames | None = None

    def __post_init__(self) -> None:
        check_flags(self, "qkv_by_head", "qk_paired", "transposed")
        check_flags(self, "expert_up_alternates", "expert_outputs_first")
        check_flags(self, "delta_tiled", "plain_rates")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, str):
                empty = field.name == "prefix" and value == ""
                if not isinstance(value, str) or not (value or empty):
                    raise refuse(self, field.name, "must be a name")
            elif (
                isinstance(field.default, tuple)
                and field.default
                and (
                    not isinstance(value, tuple)
                    or not all(isinstance(name, str) and name for name in value)
                )
            ):
                raise refuse(self, field.name, "must be a tuple of names")
        pairs = ("up", "shared_up", "kv_up", "delta_gates")
        counts = {"qkv": (1, 3, 4), "delta_conv": (1, 3), "delta_in": (1, 2, 4)}
        counts |= {"kimi_forget": (2,), "kimi_gate": (2,)}
        for name, right in (counts | dict.fromkeys(pairs, (1, 2))).items():
            if len(getattr(self, name)) not in right:
                raise refuse(self, name, f"must be {' or '.join(map(str, right))} names")
        self._check_spellings()
        for field_name in ("fused_experts", "mlp_modules", "other_prefix"):
            pair = getattr(self, field_name)
            if pair is not None and not (
                isinstance(pair, tuple)
                and len(pair) == 2
                and all(isinstance(name, str) and name and "{" not in name for name in pair)
            ):
                raise refuse(self, field_name, "must be two names without {}, or None")
        if not isinstance(self.predictor, PredictorNames | None):
            raise refuse(self, "predictor", "must be of PredictorNames, or None")
        self._check_experts()
        self._check_ignored()

    def _check_spellings(self) -> None:
        rows, named = self.delta_conv_rows, [field.name for field in fields(self)]
        if rows is not None and not (
            isinstance(rows, tuple)
            and len(rows) == len(self.delta_conv)
            and all(type(row) is int and row > 0 for row in rows)
        ):
            raise refuse(
                self, "delta_conv_rows", "must be a number for each of delta_conv, or None"
            )
        if not isinstance(self.spellings, tuple) or not all(
            isinstance(pair, tuple)
            and len(pair) == 2
            and pair[0] in named
            and pair[0].endswith("norm")
            and isinstance(pair[1], str)
            and pair[1]
            for pair in self.spellings
        ):
            raise refuse(self, "spellings", "must be a tuple of pairs of a norm's field and a name")

    def _check_experts(self) -> None:
        parts = (*self.expert_up, self.expert_down)
        numbered = [re.findall(r"[{}]+", part) for part in parts]
        if all(found == ["{}"] for found in numbered):
            if len(self.expert_up) not in (1, 2):
                raise refuse(self, "expert_up", "must be 1 name or 2")
        elif any(numbered):
            bound = "must each have one {} for the expert's number, as expert_down has; or none"
            raise refuse(self, "expert_up", bound)
        elif len(self.expert_up) != 1:
            raise refuse(self, "expert_up", "must be 1 name where it has no {}")

    def _check_ignored(self) -> None:
        for pattern in self.ignored:
            try:
                re.compile(pattern)
            except re.error as error:
                bound = f"{pattern!r} is no regular expression: {error}"
                raise refuse(self, "ignored", bound) from error
