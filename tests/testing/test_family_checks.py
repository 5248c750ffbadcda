"""`check_family` passes families that are right, and names the rule that a wrong one breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from models.families import SMALL
from models.outside_families import GLM, Cohere, OLMo
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from asyncinfer.models import Family, JsonReader, ModelConfig, RopeConfig
from asyncinfer.models.mistral import Mistral
from asyncinfer.models.nemotron import Nemotron
from asyncinfer.testing import RuleError, check_family


def config(kind: str, **changes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(kind, **{**SMALL, **changes})


def changing(base: type[Family], change: Callable[[ModelConfig], ModelConfig]) -> type[Family]:
    """A family with a mistake in what it makes of the right shape."""

    class Wrong(base):  # type: ignore[misc, valid-type]
        def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
            return change(super().configure(config, llama))

    return Wrong


def rope_of(shape: ModelConfig, **changes: Any) -> RopeConfig:
    assert shape.rope is not None
    return replace(shape.rope, **changes)


def test_a_family_that_is_right() -> None:
    report = check_family(Cohere, config("cohere", logit_scale=0.7))
    for name in ("vocab_size=200", "num_key_value_heads=1", "hidden_act='gelu'", "rope_theta"):
        assert name in report.compared
    for name in ("tie_word_embeddings=False", "layer_norm_eps=0.01", "logit_scale=0.35"):
        assert name in report.compared
    (refused,) = report.refused
    assert refused.startswith("use_qk_norm=True: ")
    assert "layer norms of queries and keys are not supported" in refused


def test_a_model_will_do_as_well() -> None:
    model = AutoModelForCausalLM.from_config(config("nemotron", num_hidden_layers=1))
    assert "head_dim=24" in check_family(Nemotron, model).compared


def another_width(shape: ModelConfig) -> ModelConfig:
    return replace(shape, intermediate_size=shape.intermediate_size + 1)


def another_window(shape: ModelConfig) -> ModelConfig:
    layers = (replace(layer, window=(layer.window or 24) + 1) for layer in shape.layers)
    return replace(shape, layers=tuple(layers))


WINDOWED = {"sliding_window": 24, "head_dim": 16}
#: A right family, the config, the mistake, the rule that it breaks and what is said.
MISTAKES: dict[str, tuple[type[Family], dict[str, Any], Callable[[Any], Any], str, str]] = {
    "epsilon": (GLM, {"head_dim": 16}, lambda s: replace(s, norm_eps=1e-2), "logits", "token 0"),
    "norm": (Nemotron, {}, lambda s: replace(s, norm="layer"), "logits", "whole prompts"),
    "activation": (OLMo, {}, lambda s: replace(s, activation="gelu"), "logits", "token 0"),
    "pairs of the rotation": (
        Cohere,
        {"logit_scale": 0.7},
        lambda s: replace(s, rope=rope_of(s, interleaved=False)),
        "logits",
        "token 1",
    ),
    "size of the rotation": (
        Nemotron,
        {},
        lambda s: replace(s, rope=rope_of(s, size=4)),
        "logits",
        "token 1",
    ),
    "window": (Mistral, WINDOWED, another_window, "logits", "token 24"),
    "names": (
        OLMo,
        {},
        lambda s: replace(s, names=replace(s.names, down="mlp.down")),
        "tensors",
        "",
    ),
    "width": (OLMo, {}, another_width, "tensors", "mlp.gate_proj"),
    "bias": (OLMo, {"attention_bias": True}, lambda s: replace(s, out_bias=False), "tensors", ""),
    "ignored": (
        OLMo,
        {},
        lambda s: replace(s, names=replace(s.names, ignored=(r".*\.more",))),
        "tensors",
        "would ignore a tensor",
    ),
    "scale": (Cohere, {"logit_scale": 0.7}, lambda s: replace(s, logit_scale=0.5), "logits", ""),
    "no shape": (OLMo, {}, lambda s: {}, "read", "not a ModelConfig"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    right, changes, change, rule, says = MISTAKES[mistake]
    kind = right.model_type
    assert kind is not None
    with pytest.raises(RuleError) as caught:
        check_family(changing(right, change), config(kind, **changes))
    assert caught.value.rule == rule, caught.value
    assert says in str(caught.value)


class Defaultless(OLMo):
    """Leaves out what transformers takes where keys are left out."""

    defaults: ClassVar = {"tie_word_embeddings": True}


class Careless(Cohere):
    """Takes what is no number as it comes."""

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        value = config.values["logit_scale"]
        if isinstance(value, int | float):
            return super().configure(config, llama)
        shape = super().configure(JsonReader({}, config.file), llama)
        return replace(shape, logit_scale=self.number(value))

    def number(self, value: Any) -> float:
        return value["scale"]


class Credulous(Careless):
    """Takes what is no number for one."""

    def number(self, value: Any) -> float:
        return float(value)


class Ignoring(OLMo):
    """Ignores a key that counts."""

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        return replace(super().configure(config, llama), activation="silu")


class Raising(OLMo):
    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        raise KeyError("n_embd")


class Counting(OLMo):
    """Reads each time another."""

    count = 0

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        Counting.count += 1
        return replace(super().configure(config, llama), notes=(str(self.count),))


class Unmade(OLMo):
    def __init__(self) -> None:
        raise OSError("no licence")


@pytest.mark.parametrize(
    ("family", "rule", "says"),
    [
        (
            Defaultless,
            "defaults",
            "without tie_word_embeddings, for which transformers takes False",
        ),
        (Careless, "lies", "with logit_scale='8': family Careless: read() raised TypeError"),
        (Credulous, "lies", "with logit_scale='8' it reads another decoder: logit_scale=8.0"),
        (Ignoring, "nearby", "with hidden_act='gelu'"),
        (Raising, "read", r"read() raised KeyError('n_embd')"),
        (Counting, "read", "in two ways"),
        (Unmade, "made", "no licence"),
    ],
)
def test_a_family_that_breaks_a_rule(family: type[Family], rule: str, says: str) -> None:
    with pytest.raises(RuleError) as caught:
        check_family(family, config(family.model_type or "", num_hidden_layers=1))
    assert caught.value.rule == rule, caught.value
    assert says in str(caught.value)


def test_a_family_that_hangs() -> None:
    go_on = threading.Event()

    class Hanging(OLMo):
        def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
            go_on.wait()
            return super().configure(config, llama)

    try:
        with pytest.raises(RuleError, match="returns") as caught:
            check_family(Hanging, config("olmo"), patience=0.2)
        assert "has not returned after 0.2 s" in str(caught.value)
    finally:
        go_on.set()
        for thread in threading.enumerate():
            if thread.name == "asyncinfer-call":
                thread.join(120)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (OLMo, "must be a config or a model of transformers"),
        (LlamaConfig(), "parameters at most"),
        (LlamaConfig(**{**SMALL, "max_position_embeddings": 64}), "positions"),
    ],
)
def test_what_cannot_be_tried(model: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_family(OLMo, model)


def test_it_leaves_nothing_behind() -> None:
    """Neither threads nor another number of them for torch, nor other random numbers."""
    with pytest.raises(RuleError):
        # The first progress bar of a process starts a thread that watches them all.
        check_family(Raising, config("olmo"))
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    before = {*threading.enumerate()}
    with pytest.raises(RuleError):
        check_family(Raising, config("olmo"))
    assert {*threading.enumerate()} <= before
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)
