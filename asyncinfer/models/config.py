"""`ModelConfig`: the shape of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from asyncinfer.attention import LayerKV
from asyncinfer.layers import (
    ACTIVATIONS,
    Activation,
    LearnedActivation,
    NormKind,
    RopeConfig,
    check_choice,
    check_flags,
    check_integers,
    check_number,
    learned,
    refuse,
)
from asyncinfer.models.feed_forward_checks import check_feed_forward
from asyncinfer.models.layer_checks import check_rope, check_shared_kv
from asyncinfer.models.layerwise import Layerwise
from asyncinfer.models.names import TensorNames
from asyncinfer.models.parts import (
    DTYPES,
    MOST_CONTEXT,
    MOST_HEADS,
    MOST_LAYERS,
    MOST_VOCAB,
    MOST_WIDTH,
    Block,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    QKNorm,
)
from asyncinfer.quantization.schemes import Scheme

__all__ = ["ModelConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Layerwise):
    """The shape of a decoder. Defaults are those of Llama.

    Raises `ValueError` for a shape that cannot be, naming the field, its value and its bounds."""

    #: The name `config.json` gives under `architectures`, such as `LlamaForCausalLM`.
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: The longest sequence the model was trained for: `max_position_embeddings`, times the factor
    #: of a rope scaling that extends it.
    max_context: int
    block: Block = "pre"
    norm: NormKind = "rms"
    #: Whether norms have a weight, including those of queries and keys; without one they have no
    #: bias.
    norm_weight: bool = True
    #: Whether norms of the kinds "layer" and "layer-plus-one" have a bias.
    norm_bias: bool = True
    norm_eps: float = 1e-6
    qk_norm: QKNorm | None = None
    #: Whether the norm of queries and keys has a weight, where norms have one.
    qk_norm_weight: bool = True
    #: Whether each head's values have a norm, too, without a weight.
    value_norm: bool = False
    #: The rotation of all layers; None: there is none, or `layers` says for each.
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    #: One for each layer; empty if all layers are alike and attend to all tokens before theirs.
    layers: tuple[LayerConfig, ...] = ()
    #: Number of positions with a learned embedding, at least `max_context`; None: there are none.
    learned_positions: int | None = None
    #: The feed-forward layer's activation: `config.json`'s name of it, or a function of elements.
    activation: str | Activation | LearnedActivation = "silu"
    gated_mlp: bool = True
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None
    #: Whether the head is the embedding's own weight.
    tied_head: bool = False
    qkv_bias: bool = False
    #: Whether attention's output projection has a bias.
    out_bias: bool = False
    #: Whether the projections of the feed-forward layer have a bias.
    mlp_bias: bool = False
    head_bias: bool = False
    #: Whether a gate for each query head multiplies by its sigmoid what the head attended to. The
    #: query projection gives it behind the head's query, if `names.qkv` has none for it.
    attention_gate: bool = False
    #: The factor of attention's scores; None: 1 / sqrt(dimensions of a query head).
    attention_scale: float | None = None
    #: The factor of attention's output, after the output projection.
    attention_out_scale: float = 1.0
    #: Scores become `cap * tanh(scores / cap)`.
    attention_softcap: float | None = None
    #: Whether tokens attend to later tokens, too. Such a model gives vectors and no answers. A text
    #: is computed in one pass, and no layer keeps KV.
    bidirectional: bool = False
    #: Whether each head's softmax has an additional key, with a learned logit and value zero.
    sinks: bool = False
    embedding_scale: float = 1.0
    #: The factor of the outputs of attention and feed-forward before they are added.
    residual_scale: float = 1.0
    #: Whether each layer's output is multiplied by a learned number.
    layer_scale: bool = False
    #: Size of the vector of each token that each layer gets beside its input; 0: none.
    per_layer_inputs: int = 0
    logit_scale: float = 1.0
    #: Logits become `cap * tanh(logits / cap)`.
    logit_softcap: float | None = None
    #: Whether the last layer predicts a further token: see `asyncinfer.models.predictor`.
    predicts: bool = False
    #: What a drafting head beside the model keeps of a token: see `asyncinfer.models.eagle3`. None:
    #: there is no head.
    head_kv: LayerKV | None = None
    names: TensorNames = field(default_factory=TensorNames)
    #: The checkpoint's own dtype as torch names it ("bfloat16"), or None where it does not say.
    dtype: str | None = None
    #: How the checkpoint's matrices are quantised; None: they are not.
    scheme: Scheme | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    #: The config of the published checkpoint, if the tensors here have other names or another
    #: order, as in a GGUF file: adapters are made for that one.
    published: ModelConfig | None = None
    #: Remarks about how the model's `config.json` was read, for whoever loads the model.
    notes: tuple[str, ...] = ()
    #: Why torch's operators multiply quantised matrices on a CPU, and how these are held. None:
    #: native kernels multiply them, or no matrix is quantised.
    lacking: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.architecture, str):
            raise refuse(self, "architecture", "must be a string")
        parts = {"rope": RopeConfig, "experts": ExpertsConfig, "latent": LatentConfig}
        for name, part in {**parts, "scheme": Scheme}.items():
            if not isinstance(getattr(self, name), part | None):
                raise refuse(self, name, f"must be of {part.__name__}, or None")
        if not isinstance(self.names, TensorNames):
            raise refuse(self, "names", "must be of TensorNames")
        if not isinstance(self.published, ModelConfig | None):
            raise refuse(self, "published", "must be a ModelConfig, or None")
        if not isinstance(self.head_kv, LayerKV | None):
            raise refuse(self, "head_kv", "must be a LayerKV, or None")
        if not isinstance(self.lacking, str | None):
            raise refuse(self, "lacking", "must be a string, or None")
        self._check_values()
        if self.predicts and (self.names.predictor is None or self.num_layers == 1):
            raise refuse(self, "predicts", "must be False with one layer, and without its names")
        self._check_tuples()
        self._check_attention()
        fed = [index for index in range(self.num_layers) if self.layer(index).feed_forward]
        kinds = {self.layer_experts(index) is not None for index in fed}
        check_feed_forward(self, self.names, self.experts, self.gated_mlp, kinds)

    def _check_values(self) -> None:
        """Check each field by itself."""
        check_choice(self, "block", get_args(Block))
        check_choice(self, "norm", get_args(NormKind))
        check_choice(self, "qk_norm", (None, *get_args(QKNorm)))
        check_choice(self, "dtype", (None, *DTYPES))
        check_integers(self, "vocab_size", low=1, high=MOST_VOCAB)
        for name in ("hidden_size", "intermediate_size", "head_dim"):
            check_integers(self, name, low=1, high=MOST_WIDTH)
        check_integers(self, "num_layers", low=1, high=MOST_LAYERS)
        check_integers(self, "num_heads", "num_kv_heads", low=1, high=MOST_HEADS)
        check_integers(self, "max_context", low=1, high=MOST_CONTEXT)
        check_number(self, "norm_eps", high=1.0)
        for name in ("embedding_scale", "residual_scale", "logit_scale", "attention_out_scale"):
            check_number(self, name)
        for name in ("attention_scale", "attention_softcap", "logit_softcap"):
            if getattr(self, name) is not None:
                check_number(self, name)
        check_flags(self, "norm_weight", "norm_bias", "gated_mlp", "tied_head", "sinks", "predicts")
        check_flags(self, "qkv_bias", "out_bias", "mlp_bias", "head_bias", "attention_gate")
        check_flags(self, "bidirectional", "value_norm", "layer_scale", "qk_norm_weight")
        check_integers(self, "per_layer_inputs", low=0, high=MOST_WIDTH)
        if self.norm.endswith("plus-one") and not self.norm_weight:
            raise refuse(self, "norm_weight", f"must be True with norm={self.norm!r}")
        self._check_activation()
        if self.learned_positions is not None:
            check_integers(self, "learned_positions", low=self.max_context, high=MOST_CONTEXT)
        if self.bos_token_id is not None:
            check_integers(self, "bos_token_id", low=0, high=self.vocab_size - 1)

    def _check_activation(self) -> None:
        chosen = self.activation
        if not isinstance(chosen, LearnedActivation) and not callable(chosen):
            check_choice(self, "activation", ACTIVATIONS)
        if learned(chosen) is not None and self.experts is not None:
            raise refuse(self, "activation", "cannot have weights with experts")

    def _check_tuples(self) -> None:
        layers, ids, last = self.layers, self.eos_token_ids, self.vocab_size - 1
        if not isinstance(layers, tuple) or len(layers) not in (0, self.num_layers):
            raise refuse(
                self, "layers", f"must be a tuple, empty or of num_layers={self.num_layers}"
            )
        if not all(isinstance(layer, LayerConfig) for layer in layers):
            raise refuse(self, "layers", "must be of LayerConfig")
        if len({layer.mixer for layer in layers if layer.mixer is not None}) > 1:
            raise refuse(self, "layers", "must have one mixer")
        if not all(layer.feed_forward and (layer.attends or layer.mixer) for layer in layers):
            if {self.layer_block(index) for index in range(len(layers))} != {"pre"}:
                raise refuse(self, "block", "must be 'pre' where a layer lacks a part")
            if self.windowed_layers:
                raise refuse(self, "layers", "must not have windows where a layer lacks a part")
        if len({layer.window for layer in layers if layer.chunked}) > 1:
            raise refuse(self, "layers", "must have chunks of one length")
        if self.state_layers and self.windowed_layers:
            raise refuse(self, "layers", "must not have windows beside a mixer")
        if not isinstance(ids, tuple) or not all(type(i) is int and 0 <= i <= last for i in ids):
            raise refuse(self, "eos_token_ids", f"must be a tuple of integers from 0 to {last}")
        if not isinstance(self.notes, tuple) or not all(isinstance(n, str) for n in self.notes):
            raise refuse(self, "notes", "must be a tuple of strings")

    def _check_attention(self) -> None:
        """Check fields of attention that depend on each other."""
        apart = self.state_layers or self.sinks or self.attention_softcap is not None
        if self.bidirectional and (apart or self.latent is not None or self.chunk is not None):
            bound = "must be False with latent, sinks, attention_softcap, chunks or a mixer"
            raise refuse(self, "bidirectional", bound)
        if self.num_heads % self.num_kv_heads:
            raise refuse(self, "num_kv_heads", f"must divide num_heads={self.num_heads}")
        latent = self.latent
        if latent is not None:
            if self.head_dim != latent.held:
                raise refuse(self, "head_dim", f"must be {latent.held}, as latent holds them")
            if self.num_kv_heads != 1:
                raise refuse(self, "num_kv_heads", "must be 1 with latent")
            if self.qk_norm is not None:
                raise refuse(self, "qk_norm", "must be None with latent")
        for index in range(self.num_layers):
            head_dim = self.layer_kv(index).head_dim
            rope = self.layer(index).rope
            check_rope(self, rope, head_dim, latent, self.attention_gate)
            if latent is not None and latent.indexer is not None and rope is None:
                raise refuse(self, "rope", "must not be None with an indexer")
        check_shared_kv(self, self.num_heads, [self.layer(i) for i in range(self.num_layers)])
        if latent is not None and self.value_norm:
            raise refuse(self, "value_norm", "must be False with latent")
        names = self.names
        if names.qkv_by_head and (len(names.qkv) > 1 or self.num_heads != self.num_kv_heads):
            raise refuse(
                self,
                "names",
                "qkv_by_head needs one name in qkv and num_kv_heads equal to num_heads",
            )
        if names.transposed and latent is None and len(names.qkv) > 1:
            raise refuse(self, "names", "transposed needs one name in qkv")

        if self.attention_gate and (latent is not None or len(names.qkv) == 1):
            bound = "must be False with latent, or where one tensor has queries, keys and values"
            raise refuse(self, "attention_gate", bound)
        if len(names.qkv) == 4 and not self.attention_gate:
            raise refuse(self, "names", "four names in qkv need attention_gate")

    @property
    def norms_have_bias(self) -> bool:
        """Whether the layers' norms and the final norm have a bias."""
        return self.norm_weight and self.norm_bias and self.norm in ("layer", "layer-plus-one")

    @property
    def qk_norm_weighted(self) -> bool:
        """Whether the norms of queries and keys have a weight."""
        return self.norm_weight and self.qk_norm_weight

    @property
    def query_scale(self) -> float:
        """The factor of attention's scores."""
        if self.attention_scale is not None:
            return self.attention_scale
        latent = self.latent
        size = self.head_dim if latent is None else latent.plain + latent.rotated
        return float(size**-0.5)
