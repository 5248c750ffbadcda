"""Whatever a request says of samplers is refused as such, or samples without a fault."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import numpy as np
from fuzzing import fuzz
from hypothesis import event, given
from hypothesis import strategies as st

from asyncinfer import InvalidRequest, SamplingParams, plugins
from asyncinfer.cli.plugin_choice import parse_plugin
from asyncinfer.engine.samplers import resolve_samplers, samplers_at_hand
from asyncinfer.testing.sampler_bench import SamplerBench

VOCAB = 7
ROWS = np.random.default_rng(20_261_122).normal(size=(4, VOCAB)).astype(np.float32) * 3

numbers = st.one_of(
    st.integers(-2, 60),
    st.floats(-0.5, 3.0),
    st.sampled_from([1e-300, 1e300, 2**31 - 1, 2**63, 10**40, math.nan, math.inf]),
)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def _pairs(name: str) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    """A shipped sampler with arguments of its own, most of them in bounds."""
    args = {}
    for parameter in inspect.signature(plugins.samplers.factory(name)[0]).parameters.values():
        match parameter.default:
            case float(least):
                args[parameter.name] = st.one_of(st.floats(least, 2 * least), numbers)
            case int():
                args[parameter.name] = st.integers(1, 9)
            case _:
                args[parameter.name] = st.lists(st.integers(0, 9), max_size=3)
    return st.tuples(st.just(name), st.fixed_dictionaries({}, optional=args))


names = [name for name in plugins.samplers.names() if plugins.samplers.is_built_in(name)]
pairs = st.one_of(*map(_pairs, names))
several = st.lists(pairs, min_size=1, max_size=3)
whatever = st.one_of(st.lists(st.one_of(pairs, st.sampled_from(names), anything)), anything)


@fuzz(100)
@given(sampler=st.one_of(pairs, several), temperature=st.floats(0.0, 3.0))
def test_fuzz_of_shipped_samplers(sampler: Any, temperature: float) -> None:
    refused_or_samples({"sampler": sampler, "temperature": temperature})


@fuzz(100)
@given(sampler=whatever, args=anything)
def test_fuzz_of_what_a_request_says(sampler: Any, args: Any) -> None:
    refused_or_samples({"sampler": sampler, "sampler_args": args})


def refused_or_samples(options: dict[str, Any]) -> None:
    refused = None
    try:
        params = SamplingParams(**options)
        samplers_at_hand(params)
        found = resolve_samplers(params)
    except InvalidRequest as error:
        refused = error
    event("refused" if refused else "taken")
    if refused is not None:
        assert refused.field.startswith(("sampler", "temperature"))
        assert len(str(refused)) < 2000
        return
    assert dataclasses.replace(params) == params
    bench = SamplerBench(VOCAB, 2)
    for slot in range(2):
        several = [plugin for plugin, _ in found]
        bench.join(slot, several, tokens=[1, 2, 1, 2], temperature=params.temperature)
    for row in ROWS:
        # A fault of a sampler is raised here.
        drawn = bench.draw([row, row[::-1]], [0, 1])
        assert all(0 <= token < VOCAB for token in drawn)


@fuzz(200)
@given(
    st.one_of(st.text(max_size=30), st.from_regex(r"[a-z]{1,3}:([a-z]=[\[{\"0-9a,.=]{0,6},?){1,3}"))
)
def test_fuzz_of_a_plugin_on_the_command_line(text: str) -> None:
    try:
        name, args = parse_plugin(text)
    except ValueError:
        return
    assert text.startswith(name)
    assert name
    assert all(key and "," not in key for key in args)
