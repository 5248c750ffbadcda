"""What a request is sampled by where it does not say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from asyncinfer import Engine, EngineClosed, InvalidRequest, ModelLoadError, SamplingParams
from asyncinfer.engine.defaults import generation_defaults


def written(folder: Path, **options: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(options))
    return folder


def test_without_a_file_it_is_greedy(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path).params({}) == SamplingParams(temperature=0.0)


def test_without_do_sample_it_is_greedy_whatever_else_the_file_says(tmp_path: Path) -> None:
    defaults = generation_defaults(
        written(tmp_path, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    )
    assert defaults.params({}) == SamplingParams(temperature=0.0, repetition_penalty=1.1)
    kept = {"max_tokens": 4, "repetition_penalty": 1.2, "n": 1, "seed": None}
    assert defaults.params(kept) == SamplingParams(temperature=0.0, **kept)


@pytest.mark.parametrize(
    "named",
    [
        {"temperature": 0.7},
        {"top_p": 0.8},
        {"top_k": 40},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"seed": 4},
        {"n": 3},
        {"sampler": "xtc"},
    ],
)
def test_naming_a_sampling_option_turns_sampling_on(tmp_path: Path, named: dict[str, Any]) -> None:
    defaults = generation_defaults(written(tmp_path, temperature=0.6, top_p=0.9))
    found = defaults.params(named)
    assert found == SamplingParams(**{"temperature": 0.6, "top_p": 0.9, **named})
    assert not found.greedy


def test_a_temperature_that_is_greedy_is_nobodys_default_for_sampling(tmp_path: Path) -> None:
    defaults = generation_defaults(written(tmp_path, do_sample=False, temperature=0.0, top_k=-1))
    assert defaults.params({"seed": 1}) == SamplingParams(seed=1)
    assert defaults.params({"temperature": 0.0, "n": 2}).greedy


def test_with_do_sample_the_file_holds_where_the_request_is_silent(tmp_path: Path) -> None:
    defaults = generation_defaults(written(tmp_path, do_sample=True, temperature=0.6, top_k=20))
    assert defaults.params({}) == SamplingParams(temperature=0.6, top_k=20)
    assert defaults.params({"top_k": 0, "n": 2}) == SamplingParams(temperature=0.6, n=2)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": "yes"},
        {"do_sample": True, "top_p": 2.0},
        {"do_sample": True, "temperature": "hot"},
        {"repetition_penalty": -1.0},
    ],
)
def test_a_file_that_cannot_hold_is_named(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="generation_config") as caught:
        generation_defaults(written(tmp_path, **options))
    assert [*options][-1] in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000])
def test_a_file_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match="generation_config"):
        generation_defaults(tmp_path)


def test_a_file_that_is_none(tmp_path: Path) -> None:  # fault 48
    path = tmp_path / "generation_config.json"
    os.mkfifo(path)
    with pytest.raises(ModelLoadError, match="is not a regular file"):
        generation_defaults(tmp_path)
    path.unlink()
    (tmp_path.parent / "elsewhere.json").write_text("{}")
    path.symlink_to(tmp_path.parent / "elsewhere.json")
    with pytest.raises(ModelLoadError, match="is a link out of the checkpoint's folder"):
        generation_defaults(tmp_path)
    path.unlink()
    path.write_text('{"top_p": 1.0, "top_p": 0.5}')
    with pytest.raises(ModelLoadError, match="'top_p' occurs twice"):
        generation_defaults(tmp_path)


@pytest.mark.anyio
async def test_three_answers_differ_and_the_default_can_be_seen() -> None:
    engine = Engine(device="cpu", drain_timeout=0.0, kv_bytes=1 << 24)
    with pytest.raises(EngineClosed):
        _ = engine.default_params
    async with engine:
        assert engine.default_params == SamplingParams(temperature=0.0)
        plain = [await engine.generate("def add(", max_tokens=8) for _ in range(2)]
        assert plain[0].token_ids == plain[1].token_ids
        for named in ({"n": 3}, {"n": 3, "top_p": 0.95, "seed": 4}):
            done = await engine.generate("import ", max_tokens=12, **named)
            assert len({choice.token_ids for choice in done.choices}) > 1, named
        with pytest.raises(InvalidRequest, match="temprature"):
            engine.stream("x", temprature=1.0)
