"""`asyncinfer bench plugins`, small: what is compared does the same. Times are not looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from asyncinfer import plugins
from asyncinfer.bench import PluginOptions, measure_plugins
from asyncinfer.bench.plugin_twins import MinP, OwnDraw, Temperature
from asyncinfer.bench.plugins import TRUNCATED, TWINS, sampler_cases
from asyncinfer.protocols import SamplerPlugin
from asyncinfer.testing import SamplerCase, check_sampler, sampler_costs
from asyncinfer.testing.sampler_bench import SamplerBench


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run registers is forgotten."""
    for registry in plugins.registries():
        monkeypatch.setattr(registry, "_registered", {})
        monkeypatch.setattr(registry, "_loaded", {})


@pytest.mark.usefixtures("registries")
def test_the_whole_command_has_its_figures() -> None:
    told: list[str] = []
    own = [("dry", {"base": 2.0}), ("xtc", {})]
    options = PluginOptions(running=4, steps=5, rows=3, vocab_size=64, repeat=1, sampler=own)
    result = measure_plugins(options, told.append)
    assert told
    figures = result.figures()
    names = [figure.name for figure in figures]
    shipped = [info for info in plugins.samplers.describe() if info.origin == "built in"]
    assert len(names) == len(set(names)) == 2 + len(TWINS) + len(shipped) + 3 + 1
    assert [figure.target for figure in figures].count(1.02) == 2
    assert [figure.target for figure in figures].count(1.3) == len(TWINS) + len(shipped)
    assert "3 rows, your dry:base=2.0 xtc / temperature, top-k, top-p" in names
    ratio = result.samplers["min-p by a plugin"] / result.samplers["min-p"]
    assert ratio in [figure.value for figure in figures]
    assert result.observers["none"].tokens == 4 * 5
    idle = {registry.group for registry in plugins.registries() if "bench-idle" in registry.names()}
    assert idle >= {f"asyncinfer.{kind}" for kind in ("cache_policies", "observers", "samplers")}


@pytest.mark.parametrize(
    ("plugin", "options"),
    [
        (Temperature(0.8), {"temperature": 0.8}),
        (MinP(0.05), {"min_p": 0.05}),
        (OwnDraw(), {"temperature": 0.8, "top_k": 9}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_twin_draws_what_the_chain_draws(plugin: SamplerPlugin, options: dict[str, Any]) -> None:
    check_sampler(plugin)
    ours = options if isinstance(plugin, OwnDraw) else {}
    chain, bench = SamplerBench(200, 16), SamplerBench(200, 16)
    for slot in range(16):
        chain.join(slot, None, seed=slot, **{"temperature": 1.0, **options})
        bench.join(slot, plugin, seed=slot, **{"temperature": 1.0, **ours})
    numbers = np.random.default_rng(5)
    for _ in range(20):
        logits = numbers.normal(size=(16, 200)) * 4
        assert chain.draw(logits, range(16)) == bench.draw(logits, range(16))


def test_costs_are_those_of_the_cases() -> None:
    cases = {"alone": SamplerCase(), "beside": SamplerCase(beside=OwnDraw())}
    costs = sampler_costs(cases, rows=2, vocab_size=32, steps=2)
    assert costs.keys() == cases.keys()
    assert min(costs.values()) >= 0
    assert {TRUNCATED, *TWINS, *TWINS.values()} <= sampler_cases().keys()
