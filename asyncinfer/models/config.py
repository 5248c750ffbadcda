"""`ModelConfig`: the shape of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from asyncinfer.layers import NormKind, RopeConfig
from asyncinfer.models.names import TensorNames

__all__ = ["Block", "ExpertsConfig", "LatentConfig", "LayerConfig", "ModelConfig"]

#: Where a layer's norms stand. "pre": before attention and before the feed-forward layer; "post":
#: after each, before it is added; "sandwich": both. "parallel": attention and feed-forward side by
#: side, each after a norm of its own; "parallel-shared": after one norm.
Block = Literal["pre", "post", "sandwich", "parallel", "parallel-shared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer."""

    #: None: queries and keys are not rotated.
    rope: RopeConfig | None
    #: A token sees this many tokens, itself the last of them; None: all before it.
    window: int | None = None
    #: Whether its feed-forward layer is a mixture of experts, if the model has any.
    experts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts in place of the feed-forward layer."""

    #: How many there are, and how many each token takes.
    count: int
    active: int
    #: As `intermediate_size`, of each.
    intermediate_size: int
    #: Whether a token's weights are scaled to sum to one.
    normalise: bool = True
    router_bias: bool = False
    bias: bool = False
    #: What makes the router's scores of its logits.
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    #: Experts come in this many groups, and a token's are from the best few of them.
    groups: int = 1
    active_groups: int = 1
    #: Whether a bias is added to the scores when experts are chosen, and only then.
    correction: bool = False
    #: Multiplies the weights.
    scale: float = 1.0
    #: As `intermediate_size`, of the part that every token takes; 0: there is none.
    shared_size: int = 0
    #: None: the model's activation. Else the clamped SwiGLU's (alpha, limit).
    clamped_swiglu: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are made from
    one small vector per token, which is what the cache holds. `ModelConfig.head_dim` is that of the
    cache, `kv_rank + rotated`, with one KV head."""

    #: Size of the vector that queries are made from; None: they are made from the hidden state.
    query_rank: int | None
    kv_rank: int
    #: Dimensions of a query or key head that are not rotated, and that are.
    plain: int
    rotated: int
    #: Dimensions of a value head.
    value: int
    #: The checkpoint keeps what is rotated together side by side.
    interleaved: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder. What has a default is as in Llama."""

    #: The name `config.json` gives under `architectures`, such as `LlamaForCausalLM`.
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Longest sequence the model was made for: `max_position_embeddings`, times the factor of a
    #: rope scaling that stretches it.
    max_context: int
    block: Block = "pre"
    norm: NormKind = "rms"
    #: Whether norms of the kind "layer" have a bias.
    norm_bias: bool = True
    norm_eps: float = 1e-6
    #: RMS norm of queries and keys: of each head, or over the whole projection.
    qk_norm: Literal["head", "projection"] | None = None
    #: None: as the layers say, or not at all.
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    #: One for each layer; none where they are all alike and attend to all that is before them.
    layers: tuple[LayerConfig, ...] = ()
    #: Positions that the model learned an embedding of.
    learned_positions: int | None = None
    #: The feed-forward layer's activation, under `config.json`'s name.
    activation: str = "silu"
    gated_mlp: bool = True
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    #: Whether the head is the embedding's own weight.
    tied_head: bool = False
    qkv_bias: bool = False
    #: Of attention's output projection.
    out_bias: bool = False
    #: On the projections of the feed-forward layer.
    mlp_bias: bool = False
    head_bias: bool = False
    #: Multiplies attention's scores; None: `head_dim ** -0.5`.
    attention_scale: float | None = None
    #: Scores become `cap * tanh(scores / cap)`.
    attention_softcap: float | None = None
    #: Whether each head's softmax has one key more, with a learned logit and no value.
    sinks: bool = False
    embedding_scale: float = 1.0
    #: Multiplies what attention and feed-forward add.
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    #: Logits become `cap * tanh(logits / cap)`.
    logit_softcap: float | None = None
    names: TensorNames = field(default_factory=TensorNames)
    #: The checkpoint's own dtype as torch names it ("bfloat16"), or None where it does not say.
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    #: What whoever loads the model should know of how its `config.json` was taken.
    notes: tuple[str, ...] = ()

    def layer(self, index: int) -> LayerConfig:
        """What is particular about one layer."""
        return self.layers[index] if self.layers else LayerConfig(rope=self.rope)

    def layer_experts(self, index: int) -> ExpertsConfig | None:
        """The experts of one layer; None where its feed-forward layer is a plain one."""
        return self.experts if self.layer(index).experts else None

    @property
    def windowed_layers(self) -> tuple[int, ...]:
        """The layers that see a window only."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.window is not None)

    @property
    def window(self) -> int | None:
        """The widest window of a layer; None without windows."""
        return max((layer.window for layer in self.layers if layer.window), default=None)

    @property
    def kv_parts(self) -> int:
        """Parts of the KV cache; see `KVShape`."""
        return 2 if self.latent is None else 1

    @property
    def mlp_width(self) -> int:
        """Elements per token at the widest moment of a feed-forward layer."""
        experts = self.experts
        if experts is None:
            return 3 * self.intermediate_size
        each = 3 * experts.intermediate_size + 2 * self.hidden_size
        width = experts.active * each + 3 * experts.shared_size
        return max(3 * self.intermediate_size, width)
