"""`EngineConfig` refuses what is not an option, by name, value and bound."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from asyncinfer import Engine, EngineConfig, InvalidConfig, InvalidRequest
from asyncinfer.testing import FakeModel

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("block_size", (0, -1, 1.5, True, "16")),
        ("state_interval", (0, -1, 1.5, True, None)),
        ("kv_bytes", (0, "2G", 1.0)),
        ("cpu_threads", (0, "2", True, 1025)),
        ("kv_fraction", (0, 1.01, NAN, "0.5", True)),
        ("max_context", (0, 1.5)),
        ("max_running", (0, None, 65_537)),
        ("max_requests", (0, True)),
        ("max_step_tokens", (0,)),
        ("step_target", (0, -0.1, NAN, "0.1", True)),
        ("overlap", (0, 1.5, True)),
        ("cuda_graphs", ("on", None, True)),
        ("weights", ("int3", None, "bfloat16")),
        ("kv", ("int3", None, "bfloat16", True)),
        ("buffer", (0, INF, 1_000_001)),
        ("max_prompt_chars", (0,)),
        ("stall_timeout", (-1, NAN, "a", None, True)),
        ("drain_timeout", (-0.1, NAN, 10**309)),
        ("step_timeout", (-1, 0, NAN)),
        ("on_full", ("drop", None)),
        ("device", (3, "", None)),
        ("dtype", (None, "")),
        ("revision", (3,)),
        ("prefix_cache", (1, "no")),
        ("deterministic", (1, None)),
    ],
)
def test_a_bad_value_is_named(name: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidConfig, match=f"^{name}=") as caught:
            EngineConfig(**{name: value})
        assert caught.value.field == name
        assert caught.value.value is value
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "name",
    [
        *("block_size", "state_interval", "kv_bytes", "max_context", "max_requests", "overlap"),
        *("max_held_bytes", "max_step_tokens", "adapter_bytes", "max_prompt_chars"),
    ],
)
def test_counts_have_64_bits(name: str) -> None:
    EngineConfig(**{name: 2**63 - 1})
    with pytest.raises(InvalidConfig, match=f"^{name}={2**63}: must be <= {2**63 - 1}"):
        EngineConfig(**{name: 2**63})


def test_unlimited_timeouts_are_allowed() -> None:
    EngineConfig(stall_timeout=INF, drain_timeout=INF, step_timeout=INF, step_target=INF)


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("block_size", np.int64(16), 16),
        ("max_step_tokens", np.uint16(64), 64),
        ("kv_bytes", np.int64(1 << 20), 1 << 20),
        ("cpu_threads", np.int32(1), 1),
        ("max_adapters", np.int8(0), 0),
        ("step_timeout", np.float32(1.5), 1.5),
        ("step_timeout", 3, 3.0),
        ("step_target", Fraction(1, 4), 0.25),
        ("drain_timeout", np.float16(0), 0.0),
        ("kv_fraction", Fraction(1, 2), 0.5),
        ("pinned_share", np.float32(0.5), 0.5),
    ],
)
def test_a_number_is_kept_as_a_plain_one(name: str, value: object, kept: float) -> None:
    # One of numpy's ended the watchdog, whose waits take none, and native code refused others.
    number = getattr(EngineConfig(**{name: value}), name)
    assert number == kept
    assert type(number) is type(kept)


def test_an_unknown_name_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_runing"):
        EngineConfig(max_runing=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="max_runing"):
        Engine(FakeModel(), max_runing=3)


def test_it_is_frozen_and_replaced_with_checks() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.buffer = 3  # type: ignore[misc]
    assert config.replace(buffer=3).buffer == 3
    with pytest.raises(ValueError, match="buffer=0"):
        config.replace(buffer=0)


def test_progress_is_called() -> None:
    with pytest.raises(TypeError, match="progress=5: must be callable"):
        Engine(FakeModel(), progress=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [{}, {"buffer": 3}, 5])
def test_a_config_is_an_engine_config(config: Any) -> None:
    with pytest.raises(TypeError, match="must be an EngineConfig"):
        Engine(FakeModel(), config=config)


@pytest.mark.parametrize("model", [5, b"path", object(), FakeModel])
def test_a_model_is_a_path_an_id_or_a_source(model: Any) -> None:
    with pytest.raises(TypeError, match="must be a folder, a hub id"):
        Engine(model)
    with pytest.raises(InvalidConfig, match="an object with load"):
        Engine(FakeModel(), draft=model)


@pytest.mark.anyio
async def test_more_answers_than_the_engine_holds_are_no_overload() -> None:
    async with Engine(FakeModel(), max_requests=4) as engine:
        with pytest.raises(InvalidRequest, match="n=5: must be <= max_requests=4"):
            engine.stream("x", n=5)
        assert len((await engine.generate("x", n=4, max_tokens=2)).choices) == 4
