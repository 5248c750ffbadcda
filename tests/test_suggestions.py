"""What is said of options that nothing here has."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from asyncinfer import Engine, EngineConfig, InvalidRequest, SamplingParams, SyncEngine
from asyncinfer.suggestions import ELSEWHERE, suggestion
from asyncinfer.testing import FakeModel


def names(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


ANSWER = names(SamplingParams) | {*inspect.signature(Engine.stream).parameters}
BEAMS = {*inspect.signature(Engine.beam_search).parameters}


def test_what_is_suggested_can_be_given() -> None:
    known = ANSWER | BEAMS | names(EngineConfig)
    # These two are fields of the server's requests.
    assert {ours for each in ELSEWHERE.values() for ours in each} <= known | {
        "model",
        "response_format",
    }
    # What has a name here needs no other.
    assert not ELSEWHERE.keys() & known


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("n_predict", ["prediction", "max_tokens"], "; did you mean max_tokens?"),
        ("guided_json", ["response_format"], "; did you mean response_format?"),
        ("max_token", ["max_tokens"], "; did you mean max_tokens?"),
        # Nothing is better than a name that is only spelt like it.
        ("sampling_params", ["sampler_args"], ""),
        ("nothing like it", ["max_tokens"], ""),
        ("x" * 100_000, ["max_tokens"], ""),
    ],
)
def test_the_end_of_a_message(name: str, known: list[str], said: str) -> None:
    assert suggestion(name, known) == said


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({"max_new_tokens": 5}, "max_tokens"),
        ({"do_sample": False}, "temperature"),
        ({"timeout": 3}, "deadline"),
        ({"lora_request": "x"}, "adapter"),
        ({"response_format": {}}, "json_schema"),
        ({"sampling_params": 1}, "params"),
    ],
)
def test_options_of_an_answer(options: dict[str, Any], ours: str) -> None:
    with SyncEngine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match=rf"no option of a request; did you mean {ours}\?"):
            engine.generate([1, 2], **options)


@pytest.mark.parametrize(
    ("option", "ours"),
    [("n_ctx", "max_context"), ("gpu_memory_utilization", "kv_fraction")],
)
def test_options_of_an_engine(option: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"no option of an engine; did you mean {ours}\?"):
        Engine(FakeModel(), **{option: 1})


@pytest.mark.parametrize(
    ("options", "name", "told"),
    [
        (
            SamplingParams,
            "max_new_tokens",
            "=5: is no option of a request; did you mean max_tokens?",
        ),
        (EngineConfig, "max_num_seqs", "=5: is no option of an engine; did you mean max_running?"),
        (
            EngineConfig().replace,
            "kv_byte",
            "=5: is no option of an engine; did you mean kv_bytes?",
        ),
        (SamplingParams, "quite_another", "=5: is no option of a request"),
    ],
)
def test_an_unknown_option_of_a_dataclass(options: Any, name: str, told: str) -> None:
    with pytest.raises(TypeError) as caught:
        options(**{name: 5})
    assert str(caught.value) == name + told


def test_the_dataclasses_keep_their_signatures() -> None:
    for options in (SamplingParams, EngineConfig):
        assert {*inspect.signature(options).parameters} == names(options)
