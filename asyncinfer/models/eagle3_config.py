"""`Eagle3Config`: the shape of a drafting head, as EAGLE-3 checkpoints publish it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from asyncinfer.attention import LayerKV
from asyncinfer.files import checkpoint_file, read_config_json
from asyncinfer.models.config import ModelConfig
from asyncinfer.models.llama import Llama
from asyncinfer.models.parts import MOST_VOCAB, MOST_WIDTH
from asyncinfer.models.quantised import read_scheme
from asyncinfer.models.reader import JsonReader
from asyncinfer.weights.gguf import is_gguf

__all__ = ["Eagle3Config", "is_eagle3", "read_eagle3", "with_head"]

#: The `architectures` of such heads from SpecForge and SGLang, vLLM and AngelSlim, and speculators.
#: The first heads called themselves Llama.
_ARCHITECTURES: Final = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
#: The most hidden states of the model that a head may get.
_MOST_CAPTURES: Final = 16
_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """The shape of a head (EAGLE-3, Li et al., 2025) for one model."""

    #: The head's own layer, vocabulary and norms, as a Llama of one layer.
    layer: ModelConfig
    #: Hidden size of the model.
    target_size: int
    #: Tokens that the head can predict.
    draft_vocab_size: int
    #: The layers of the model whose inputs the head gets; the number of layers stands for the
    #: output of the last one.
    captures: tuple[int, ...]
    #: Whether the residual stream begins after the norm of the hidden states.
    norm_before_residual: bool
    #: Whether each captured state has a norm of its own, and whether all of them together have one.
    norm_each: bool
    norm_all: bool
    #: Whether the state that the next prediction goes on from is normed.
    norm_output: bool
    #: Whether the checkpoint has an embedding, logits and a choice of tokens of its own; else the
    #: head uses the model's, and predicts any token.
    own_embedding: bool = False
    own_head: bool = False
    chooses: bool = False

    @property
    def kv(self) -> LayerKV:
        """What the head's layer keeps of a token."""
        return LayerKV(self.layer.num_kv_heads, self.layer.head_dim, 2)


def is_eagle3(model: Path) -> bool:
    """Whether a folder holds such a head and no model. Raises `ModelLoadError` for a `config.json`
    that cannot be read."""
    if is_gguf(model) or checkpoint_file(model, "config.json") is None:
        return False
    values, _ = read_config_json(model)
    named = values.get("architectures")
    return (
        values.get("speculators_model_type") == "eagle3"
        or "draft_vocab_size" in values
        or (isinstance(named, list) and any(name in _ARCHITECTURES for name in named))
    )


def read_eagle3(folder: Path, model: ModelConfig) -> Eagle3Config:
    """Read and check the config of the head in `folder` for `model`. Raises `ModelLoadError`,
    naming the key, for a head that was made for another model."""
    values, file = read_config_json(folder)
    outer = JsonReader(values, file)
    inner = outer.object("transformer_layer_config")
    speculators = inner is not None
    shape: Mapping[str, Any] = values if inner is None else inner.values
    # The head's context is the model's, since it sees what the model sees.
    known = {"max_position_embeddings": model.max_context, **shape}
    known = {**known, "num_hidden_layers": shape.get("num_hidden_layers") or 1}
    layer = Llama().read("LlamaForCausalLM", known, file)
    layer = replace(layer, scheme=read_scheme(JsonReader(shape, file)))
    if layer.num_layers != 1:
        raise outer.refuse("num_hidden_layers", "only heads of one layer are supported")
    if layer.vocab_size != model.vocab_size:
        raise JsonReader(shape, file).refuse(
            "vocab_size", f"must be the model's vocabulary, of {model.vocab_size} tokens"
        )
    if model.bidirectional:
        raise outer.refuse("architectures", "a model without answers has no drafts")
    details = outer.object("eagle_config")
    if details is not None and not details.boolean("use_aux_hidden_state", True):
        raise details.refuse("use_aux_hidden_state", "only heads of several states are supported")
    target_size = outer.integer("target_hidden_size", 1, MOST_WIDTH, layer.hidden_size)
    if target_size != model.hidden_size:
        key = "target_hidden_size" if outer.has("target_hidden_size") else "hidden_size"
        raise JsonReader({**shape, **values}, file).refuse(
            key, f"must be the model's hidden size, {model.hidden_size}"
        )
    return Eagle3Config(
        layer=layer,
        target_size=target_size,
        draft_vocab_size=outer.integer("draft_vocab_size", 1, MOST_VOCAB, layer.vocab_size),
        captures=_captures(outer, details, model),
        norm_before_residual=outer.boolean("norm_before_residual", speculators),
        norm_each=outer.boolean("fc_norm", False),
        norm_all=outer.boolean("norm_before_fc", False),
        norm_output=outer.boolean("norm_output", False),
    )


def with_head(config: ModelConfig, head: Eagle3Config) -> ModelConfig:
    """The model's config with a place for the head's KV."""
    return replace(config, head_kv=head.kv)


def _captures(outer: JsonReader, details: JsonReader | None, model: ModelConfig) -> tuple[int, ...]:
    """The layers whose inputs the head gets."""
    last = model.num_layers
    holders = [each for each in (outer, details) if each is not None]
    holder = next((each for each in holders if each.has(_LAYERS)), None)
    if holder is None:
        if last < 7:
            raise outer.refuse(_LAYERS, f"is required for a model of {last} layers")
        # The default of EAGLE's own code.
        return 2, last // 2, last - 3
    found = holder.integers(_LAYERS, None, 0, last)
    if found[:1] == (1,):
        # Of two conventions this is SGLang's, where 1 means the output of layer 1.
        found = tuple(layer + 1 for layer in found)
    ascending = sorted(set(found)) == list(found)
    if not ascending or not 1 <= len(found) <= _MOST_CAPTURES or found[-1] > last:
        bound = f"must be 1 to {_MOST_CAPTURES} of the model's {last} layers, ascending"
        raise holder.refuse(_LAYERS, bound)
    return found
