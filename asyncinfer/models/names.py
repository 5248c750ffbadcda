"""Under which names a checkpoint keeps the decoder's tensors."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TensorNames"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Llama's names, and what of them another architecture calls otherwise. Each stands without
    `.weight` and `.bias`; those of a layer without the layer's own beginning."""

    #: Before all of them but the head's. A checkpoint of the model without its head leaves it out.
    prefix: str = "model."
    embedding: str = "embed_tokens"
    #: Learned positions.
    positions: str = "embed_positions"
    #: What the layers' numbers follow.
    layers: str = "layers"
    attention_norm: str = "input_layernorm"
    attention_out_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    #: Query, key and value projection; or one tensor with all three.
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    #: The one tensor holds query, key and value of the first head, then of the second, and so on.
    qkv_by_head: bool = False
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    #: Gate and up projection of a gated feed-forward layer, or one tensor with both; else the one.
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    shared_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    #: As `up` and `down`, `{}` standing for the expert's number. A name without it is one tensor of
    #: all experts, `[experts, in, out]`, without `.weight` behind it.
    expert_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    #: The one tensor holds gate and up in turns.
    expert_up_alternates: bool = False
    norm: str = "norm"
    head: str = "lm_head"
    #: The layers' linear weights are stored `[in, out]`.
    transposed: bool = False
    #: Regular expressions of tensors that a checkpoint may hold though the model has no place for
    #: them: what old checkpoints saved of constants.
    ignored: tuple[str, ...] = (r".*\brotary_emb\.inv_freq",)
