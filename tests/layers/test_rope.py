"""Rope's angles against transformers' for every scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from asyncinfer.layers import RotaryEmbedding
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.rope_parameters import read_rope, scaled_context

TRAINED = 64
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3-untold-context": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 48,
        "truncate": False,
    },
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.8, "mscale_all_dim": 0.5},
}


def ours(values: dict[str, Any], head_dim: int, positions: torch.Tensor) -> tuple[Any, Any]:
    config = JsonReader(values, "config.json")
    rope = read_rope(config, TRAINED, head_dim)
    return RotaryEmbedding(rope, head_dim, torch.device("cpu"))(positions)


def theirs(
    parameters: dict[str, Any], head_dim: int, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=TRAINED,
        rope_parameters=dict(parameters),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    sin = sin[0].clone()
    sin[:, : head_dim // 2] *= -1  # as our kernel takes them
    return cos[0, :, None], sin[:, None]


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("name", sorted(SCALINGS))
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
def test_same_angles(name: str, head_dim: int, spelling: str) -> None:
    positions = torch.arange(TRAINED if name == "dynamic" else 4 * TRAINED)
    parameters = {"rope_theta": 5e5, **SCALINGS[name]}
    if spelling == "rope_parameters":
        values: dict[str, Any] = {"rope_parameters": parameters}
    else:
        scaling = dict(SCALINGS[name])
        if spelling == "type":
            scaling["type"] = scaling.pop("rope_type")
        values = {"rope_theta": 5e5, "rope_scaling": scaling}
    got, expected = ours(values, head_dim, positions), theirs(parameters, head_dim, positions)
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=3e-5)


def test_dynamic_beyond_the_trained_context_is_transformers_fed_token_by_token() -> None:
    parameters = {"rope_theta": 1e4, **SCALINGS["dynamic"]}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=TRAINED,
        rope_parameters=dict(parameters),
    )
    embedding = LlamaRotaryEmbedding(config)
    positions = torch.arange(3 * TRAINED)
    cos, _ = ours({"rope_parameters": parameters}, 64, positions)
    for position in positions:
        other, _ = embedding(torch.zeros(1), position[None, None])
        torch.testing.assert_close(cos[position, 0], other[0, 0], rtol=1e-4, atol=1e-4)
    # The stretch is real: the plain angles at the end are others.
    plain, _ = ours({"rope_theta": 1e4}, 64, positions)
    assert (plain[-1] - cos[-1]).abs().max() > 0.1


def test_a_token_does_not_depend_on_its_batch() -> None:
    values = {"rope_parameters": {"rope_theta": 1e4, **SCALINGS["dynamic"]}}
    alone, _ = ours(values, 64, torch.tensor([70]))
    among, _ = ours(values, 64, torch.tensor([500, 70, 3]))
    assert torch.equal(alone[0], among[1])


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "default"}, TRAINED),
        ({"rope_type": "linear", "factor": 4.0}, 4 * TRAINED),
        ({"rope_type": "dynamic", "factor": 2.0}, 2 * TRAINED),
        ({"rope_type": "yarn", "factor": 4.0}, 4 * TRAINED),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            TRAINED,
        ),
        (SCALINGS["llama3"], TRAINED),
    ],
)
def test_the_context_it_stretches_to(scaling: dict[str, Any], context: int) -> None:
    rope = read_rope(JsonReader({"rope_scaling": scaling}, "config.json"), TRAINED, 64)
    assert scaled_context(rope, TRAINED) == context


@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_angles_that_are_looked_up(name: str) -> None:
    config = JsonReader({"rope_parameters": {"rope_theta": 5e5, **SCALINGS[name]}}, "config.json")
    rope = read_rope(config, TRAINED, 64)
    looked_up = RotaryEmbedding(rope, 64, torch.device("cpu"), 4 * TRAINED)
    computed = RotaryEmbedding(rope, 64, torch.device("cpu"))
    assert looked_up.table is not None
    assert computed.table is None
    positions = torch.tensor([4 * TRAINED - 1, 0, 7, TRAINED, TRAINED - 1, 7])
    for got, right in zip(looked_up(positions), computed(positions), strict=True):
        assert got.shape == right.shape == (6, 1, 64)
        torch.testing.assert_close(got, right, rtol=0.0, atol=2e-7)


def test_a_table_that_would_be_large_is_not_made() -> None:
    rope = read_rope(JsonReader({}, "config.json"), 1 << 20, 128)
    assert RotaryEmbedding(rope, 128, torch.device("cpu"), 1 << 20).table is None
