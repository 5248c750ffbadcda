"""`SamplingParams`: fault rows 30 and 34-39, boundary by boundary."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from asyncinfer import InvalidRequest, SamplingParams

NAN, INF = float("nan"), float("inf")

REFUSED: list[Any] = [
    # fault 34
    *[("max_tokens", value) for value in (-1, True, 1.5, "8", 2**31)],
    *[("min_tokens", value) for value in (-1, True, 2**31)],
    # fault 35
    *[("temperature", value) for value in (NAN, INF, -INF, -0.1, -1e-9, True, "hot", None, 1e7)],
    pytest.param("temperature", 10**309, id="temperature-huge"),
    pytest.param("temperature", -(10**309), id="temperature-hugely negative"),
    # Too many digits for Python to write.
    pytest.param("max_tokens", 10**5000, id="max_tokens-unprintable"),
    # fault 37
    *[("top_p", value) for value in (0, -0.1, 1.0001, NAN, INF, True)],
    *[("top_k", value) for value in (-1, 1.0, True, 2**31)],
    *[("min_p", value) for value in (-0.1, 1.1, NAN)],
    *[("typical_p", value) for value in (0.0, 1.1, NAN)],
    *[("repetition_penalty", value) for value in (0.0, 9e-4, -1.0, NAN, INF, 1001)],
    *[("presence_penalty", value) for value in (NAN, 101, -101)],
    *[("frequency_penalty", value) for value in (NAN, 101, -101)],
    *[("seed", value) for value in (1.0, True, 2**64, -(2**63) - 1, "x")],
    *[("logprobs", value) for value in (-1, 129, True, 1.0)],
    *[("prompt_logprobs", value) for value in (-1, 129)],
    *[("ignore_eos", value) for value in (1, None)],
    # fault 38
    *[("n", value) for value in (0, -1, 129, 10**9, True)],
    # fault 39
    ("logit_bias", dict.fromkeys(range(4097), 0.0)),
    ("logit_bias", {1: NAN}),
    ("logit_bias", {1: 1e5}),
    ("logit_bias", [1]),
    ("bad_words", ["x"] * 1025),
    ("bad_words", ["x" * 257]),
    ("bad_words", [""]),
    ("stop", ["x"] * 65),
    ("stop", ["x" * 4097]),
    ("stop", [""]),
    ("stop", ["\ud800"]),
    ("bad_words", ["\ud800"]),
    ("stop", ""),
    ("stop", [1]),
    ("stop", 3),
    ("stop_token_ids", range(65_537)),
    # fault 30
    *[("stop_token_ids", [value]) for value in (-1, True, 1.0, 2**31)],
    *[("allowed_token_ids", value) for value in ([], [-1], [True])],
    ("logit_bias", {-1: 0.0}),
    ("logit_bias", {True: 0.0}),
    ("sampler_args", {"tau": 1}),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_out_of_bounds(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field in (name, f"{name}[0]")
    assert str(caught.value).startswith(f"{caught.value.field}=")
    assert len(str(caught.value)) < 300
    assert isinstance(caught.value, ValueError)


def test_the_entry_that_is_wrong_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^stop\[1\]='': must be a string that is not empty"):
        SamplingParams(stop=["a", ""])


ACCEPTED: list[tuple[str, Any]] = [
    *[("max_tokens", value) for value in (None, 0, 1, 2**31 - 1)],
    *[("temperature", value) for value in (0, 0.0, 1e-7, 1, 100.0, 1e6)],
    *[("top_p", value) for value in (1e-9, 0.5, 1)],
    *[("top_k", value) for value in (0, 1, 10**6)],
    *[("min_p", value) for value in (0, 1)],
    *[("seed", value) for value in (None, 0, -1, 2**64 - 1, -(2**63))],
    *[("n", value) for value in (1, 128)],
    *[("logprobs", value) for value in (None, 0, 128)],
    ("stop", "END"),
    ("stop", ["a", "b"]),
    ("stop_token_ids", {1, 2}),
    ("stop_token_ids", range(65_536)),
    ("logit_bias", {0: -1e4, 1: 1e4}),
    ("allowed_token_ids", (3,)),
]


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_within_bounds(name: str, value: Any) -> None:
    SamplingParams(**{name: value})


def test_contradictions() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens=5: must be <= max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_frozen_and_copied() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias, stop="x")
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("x",)
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[1] = 1.0  # type: ignore[index]


def test_can_be_hashed_copied_and_pickled() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, stop="x", seed=3)
    assert pickle.loads(pickle.dumps(params)) == params
    assert copy.deepcopy(params) == params
    assert hash(params) == hash(copy.copy(params))


# fault 36
@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-7, True), (0.01, False)])
def test_tiny_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).greedy is greedy


def test_vocabulary() -> None:
    SamplingParams(stop_token_ids=[9], logit_bias={9: 1.0}).check_vocabulary(10)
    for name, value in (
        ("stop_token_ids", [10]),
        ("logit_bias", {10: 1.0}),
        ("allowed_token_ids", [3, 10]),
    ):
        with pytest.raises(InvalidRequest, match=f"{name}=10: token ids must be < 10"):
            SamplingParams(**{name: value}).check_vocabulary(10)  # type: ignore[arg-type]
