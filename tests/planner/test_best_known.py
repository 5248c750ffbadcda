"""The best-known checkpoint of every family has the parameters that its makers publish."""

from __future__ import annotations

import pytest
from models.published import CONFIGS as PUBLISHED
from planner.best_known import ATTENDING, HYBRIDS, STATED

from asyncinfer.models import EXAMPLES, parse_config
from asyncinfer.planner import ModelSize

SIZES = {**HYBRIDS, **ATTENDING}
#: Architectures whose best-known checkpoint is another one's: the model with a tower, or the same
#: under another spelling of the name.
SAME = {
    "ExaoneMoeForCausalLM": "ExaoneMoEForCausalLM",
    "Gemma4ForCausalLM": "Gemma4ForConditionalGeneration",
    "Llama4ForCausalLM": "Llama4ForConditionalGeneration",
    "Ministral3ForCausalLM": "Mistral3ForConditionalGeneration",
    "Mistral4ForCausalLM": "Mistral3ForConditionalGeneration",
    "PhimoeForCausalLM": "PhiMoEForCausalLM",
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}


def test_no_architecture_is_without_a_size() -> None:
    configs = [*PUBLISHED.values(), *(values for _, values in SIZES.values())]
    sized = {name for config in configs for name in config["architectures"]}
    assert EXAMPLES.keys() - SAME.keys() == sized
    assert set(SAME.values()) <= sized


@pytest.mark.parametrize("name", SIZES)
def test_the_size_of_a_best_known_checkpoint(name: str) -> None:
    parameters, values = SIZES[name]
    assert ModelSize.of(parse_config(values)).parameters == parameters
    assert parameters == pytest.approx(1e9 * STATED.get(name, parameters / 1e9), rel=0.01)
