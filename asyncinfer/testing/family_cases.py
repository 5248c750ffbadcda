"""Configs near one of transformers': each with one thing changed that a family has to read."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = [
    "ANSWER",
    "LENGTHS",
    "LIES",
    "SHARED",
    "UNLIKELY",
    "FamilyReport",
    "left_out",
    "nearby",
    "numeric_keys",
]

#: Tokens of the sequences; the last two begin with the same `SHARED`.
LENGTHS: Final = (70, 37, 50, 45)
SHARED: Final = 32
ANSWER: Final = 12
#: Keys that every config has and that change no number of a decoder.
_ANYBODYS: Final = frozenset(
    (
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
#: Values that few numbers of a config may have, and values that none may have.
UNLIKELY: Final[tuple[Any, ...]] = (0, -1, 1.5, True, 10**12)
LIES: Final[tuple[Any, ...]] = ("8", [8], {}, float("nan"), 10**400)
_ACTIVATIONS: Final = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
#: Keys of a rotation that stay when its scaling is changed.
_KEPT: Final = ("rope_theta", "partial_rotary_factor")
_ROPES: Final[tuple[Mapping[str, Any], ...]] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
)


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """What `check_family` did with the configs near the one it was given."""

    #: Configs whose logits equal those of transformers.
    compared: list[str] = field(default_factory=list)
    #: Configs that the family refused, as it may, each with its reason.
    refused: list[str] = field(default_factory=list)
    #: Configs that transformers itself does not take.
    not_taken: list[str] = field(default_factory=list)


def own_keys(config: Any) -> list[str]:
    """The keys of a transformers config that its own class takes."""
    given = {*inspect.signature(type(config).__init__).parameters} | {*vars(type(config))}
    values = config.to_dict()
    return [key for key in values if key in given and key not in _ANYBODYS]


def nearby(config: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of one key each, named; not all of them make a config that transformers takes."""
    values = config.to_dict()
    for key in own_keys(config):
        for value in _others(key, values):
            # A list of layer types has one entry per layer.
            listed = key == "num_hidden_layers" and "layer_types" in values
            yield f"{key}={value!r}", {key: value, **({"layer_types": None} if listed else {})}
    rope = values.get("rope_parameters")
    if isinstance(rope, Mapping) and not any(isinstance(part, Mapping) for part in rope.values()):
        for scaling in _ROPES:
            kept = {key: rope[key] for key in _KEPT if key in rope}
            yield (
                f"rope_parameters={scaling['rope_type']}",
                {"rope_parameters": {**kept, **scaling}},
            )
        theta = 4.0 * rope.get("rope_theta", 10_000.0)
        yield "rope_theta", {"rope_parameters": {**rope, "rope_theta": theta}}
    if "tie_word_embeddings" in values and "tie_word_embeddings" not in own_keys(config):
        yield "tie_word_embeddings", {"tie_word_embeddings": not values["tie_word_embeddings"]}


def _others(key: str, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Other values of a key, by what kind of thing it is."""
    value = values[key]
    heads = values.get("num_attention_heads")
    if isinstance(value, bool):
        return (not value,)
    if key == "num_key_value_heads" and isinstance(heads, int):
        return tuple(count for count in (1, heads) if count != value)
    if key == "head_dim" and isinstance(value, int):
        return (value + 8,)
    if "window" in key and (value is None or isinstance(value, int)):
        return (20, None)
    if key == "hidden_act" or key.endswith(("activation", "activation_function")):
        return tuple(name for name in _ACTIVATIONS if name != value)
    if isinstance(value, float):
        # So small a number is a norm's epsilon.
        return (1.5 * value, 0.5 * value) if value > 1e-3 else (1e-2,)
    if value is None and not key.startswith("rope"):
        return (0.5, 2)
    if isinstance(value, int) and key in ("num_hidden_layers", "intermediate_size", "vocab_size"):
        return (value + 1,)
    return ()


def left_out(config: Any) -> Iterator[str]:
    """Keys whose value is what transformers takes where they are left out."""
    values = config.to_dict()
    for key in own_keys(config):
        try:
            without = type(config)(**{name: v for name, v in values.items() if name != key})
        except Exception:
            # transformers needs the key, so every checkpoint has it.
            continue
        if without.to_dict().get(key) == values[key]:
            yield key


def numeric_keys(config: Any) -> list[str]:
    """Keys that hold a number, true or false."""
    values = config.to_dict()
    return [key for key in own_keys(config) if isinstance(values[key], int | float)]
