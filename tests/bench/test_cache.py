"""Replays of traces, and the bound beside them."""

from __future__ import annotations

import json
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from asyncinfer.bench import (
    BenchError,
    CacheOptions,
    Record,
    agents_trace,
    measure_cache,
    read_trace,
)
from asyncinfer.bench.cache_optimum import optimal_hits
from asyncinfer.bench.cache_trace import TraceRow
from asyncinfer.cli.app import asyncinfer
from asyncinfer.errors import InvalidRequest, PluginError
from asyncinfer.models import parse_config
from asyncinfer.planner import replay_hybrid

HERE = Path(__file__).resolve().parent
SLICE = HERE / "data" / "conversation_slice.jsonl"
#: The whole trace, which is not part of this repository.
TRACE = HERE.parents[2] / "shared" / "data" / "conversation_trace.jsonl"
whole = pytest.mark.skipif(not TRACE.exists(), reason="needs the whole trace")


def rates(path: Path, policy: str, *blocks: int) -> list[float]:
    options = CacheOptions(policies=[policy], blocks=blocks, block_size=1)
    result = measure_cache(read_trace(path), options)
    return [result.rate(replay.hits) for replay in result.replays]


@whole
@pytest.mark.slow
def test_lru_gives_the_published_figures() -> None:
    found = rates(TRACE, "lru", 100_000, 50_000, 30_000, 10_000, 1_000)
    assert found == pytest.approx([0.364, 0.355, 0.326, 0.211, 0.044], abs=0.002)


@whole
@pytest.mark.slow
def test_prefix_lhd_beats_arc_and_s3_fifo() -> None:
    large, small = rates(TRACE, "prefix-lhd", 10_000, 1_000)
    assert large >= 0.225
    assert small >= 0.056


@whole
@pytest.mark.slow
def test_the_optimum_of_the_whole_trace() -> None:
    rows = read_trace(TRACE)
    total = sum(len(row.ids) for row in rows)
    found = [optimal_hits(rows, blocks) / total for blocks in (10_000, 1_000)]
    assert found == pytest.approx([0.366, 0.191], abs=0.001)


def test_lru_is_what_a_list_would_do() -> None:
    rows = read_trace(SLICE)
    blocks, hits = 600, 0
    recent: list[int] = []
    for row in rows:
        found = 0
        while found < len(row.ids) and row.ids[found] in recent:
            found += 1
        hits += found
        used = set(row.ids)
        recent = ([block for block in recent if block not in used] + [*reversed(row.ids)])[-blocks:]
    options = CacheOptions(policies=["lru"], blocks=[blocks], block_size=2)
    result = measure_cache(rows, options)
    assert result.replays[0].hits == hits > 100
    assert result.requests == 400


def test_no_policy_beats_the_optimum() -> None:
    result = measure_cache(read_trace(SLICE), CacheOptions(blocks=[300, 1_000], block_size=1))
    assert len({replay.policy for replay in result.replays}) >= 8
    for replay in result.replays:
        assert 0 < replay.hits <= result.optimum[replay.blocks]
        assert replay.microseconds > 0


@pytest.mark.parametrize("seed", range(25))
def test_the_optimum_is_the_best_of_all_choices(seed: int) -> None:
    rng = Random(seed)
    rows = [_chain(rng) for _ in range(7)]
    assert optimal_hits(rows, 2) == _best(rows, 2)


def _chain(rng: Random) -> TraceRow:
    """A prompt of up to three blocks; an id names a block with everything before it."""
    prefix, ids = 0, []
    for _ in range(rng.randint(1, 3)):
        prefix = 3 * prefix + rng.randint(1, 2)
        ids.append(prefix)
    return TraceRow(0.0, tuple(ids))


def _best(rows: list[TraceRow], blocks: int) -> int:
    """Try everything that could be kept after each request."""

    @cache
    def best(index: int, kept: frozenset[int]) -> int:
        if index == len(rows):
            return 0
        ids, hits = rows[index].ids, 0
        while hits < len(ids) and ids[hits] in kept:
            hits += 1
        at_hand = sorted(kept | set(ids))
        choices = combinations(at_hand, min(blocks, len(at_hand)))
        return hits + max(best(index + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())


def test_the_command(tmp_path: Path) -> None:
    record, plot = tmp_path / "out.json", tmp_path / "out.svg"
    words = f"bench cache {SLICE} --policy lru --policy arc --blocks 400 --blocks 300"
    done = CliRunner().invoke(
        asyncinfer, [*words.split(), "--json", str(record), "--plot", str(plot)]
    )
    assert done.exit_code == 0, done.output
    assert "optimum" in done.output
    loaded = Record.load(record)
    assert loaded.benchmark == "cache"
    assert loaded.options["blocks"] == [300, 400]
    names = {figure.name for figure in loaded.figures}
    assert "hit rate, arc, 300 blocks" in names
    assert "<svg" in plot.read_text("utf-8")


def test_growth_is_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncinfer.bench.cache.GROWTH", (100, 1_000))
    options = CacheOptions(policies=["lru"], blocks=[300], block_size=1, growth=True)
    result = measure_cache(read_trace(SLICE), options)
    (figure,) = [each for each in result.figures() if each.unit == "x"]
    assert figure.name == "cost of 1,000 blocks in those of 100, lru"
    assert figure.value > 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nonsense", "is not JSON"),
        ("[1]", "must be an object"),
        ('{"hash_ids": [1]}', "timestamp is None"),
        ('{"timestamp": -1, "hash_ids": [1]}', "timestamp is -1"),
        ('{"timestamp": 0}', "hash_ids must be"),
        ('{"timestamp": 0, "hash_ids": []}', "hash_ids must be"),
        ('{"timestamp": 0, "hash_ids": [true]}', "hash_ids must be"),
        ('{"timestamp": 0, "hash_ids": [2147483648]}', "hash_ids must be"),
    ],
)
def test_a_bad_trace_is_named_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"timestamp": 0, "hash_ids": [1]}) + "\n" + line + "\n")
    with pytest.raises(BenchError, match=f"trace.jsonl:2: .*{says}"):
        read_trace(path)


def test_what_cannot_be_measured() -> None:
    rows = read_trace(SLICE)
    with pytest.raises(BenchError, match="more than 5"):
        measure_cache(rows, CacheOptions(policies=["lru"], blocks=[5]))
    with pytest.raises(PluginError, match="nobodys"):
        measure_cache(rows, CacheOptions(policies=["nobodys"], blocks=[300]))
    with pytest.raises(BenchError, match="cannot be read"):
        read_trace(Path("nowhere.jsonl"))


def test_an_empty_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(BenchError, match="no requests"):
        read_trace(path)


def test_who_knows_of_conversations_finds_more_of_agents() -> None:
    rows = agents_trace(seed=1, beginnings=60)
    assert rows == agents_trace(seed=1, beginnings=60) != agents_trace(seed=2, beginnings=60)
    assert {row.then for row in rows} == {"live", "waiting", "over"}
    found = {}
    for share in (0.0, 0.5):
        options = CacheOptions(
            policies=["lru", "conversations"], blocks=[600], block_size=1, pinned_share=share
        )
        result = measure_cache(rows, options)
        found.update({(each.policy, share): each.hits for each in result.replays})
        assert max(found.values()) <= result.optimum[600]
    assert found["conversations", 0.0] > 1.02 * found["lru", 0.0]
    assert found["lru", 0.5] > found["lru", 0.0]


def test_a_trace_may_tell_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 5, "hash_ids": [1], "conversation": 3, "then": "over"}
    path.write_text(json.dumps(line))
    assert read_trace(path) == [TraceRow(0.005, (1,), 3, "over")]
    for wrong in ({"conversation": "a"}, {"then": "gone"}):
        path.write_text(json.dumps(line | wrong))
        with pytest.raises(BenchError, match=f":1: {next(iter(wrong))} "):
            read_trace(path)


def test_the_command_makes_a_trace_of_agents() -> None:
    told = CliRunner().invoke(asyncinfer, ["bench", "cache"])
    assert told.exit_code == 2
    assert "give either TRACE or --agents" in told.output


#: Three layers with Mamba-2 and one with attention.
HYBRID = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "intermediate_size": 512,
    "num_local_experts": 0,
    "mamba_n_heads": 64,
    "mamba_d_head": 8,
    "mamba_d_state": 1024,
}


def test_a_hybrid_beside_a_model_that_attends_everywhere() -> None:
    config = parse_config(HYBRID)
    # Conversations of which each turn begins with all that came before; then all come again.
    rows = [
        (float(turn), range(100 * talk, 100 * talk + 8 * (turn + 1)))
        for turn in range(3)
        for talk in range(5)
    ]
    plain, each, fourth = replay_hybrid(rows, config, [200], [1, 4])
    assert plain.total == each.total == fourth.total == 5 * (8 + 16 + 24)
    # All that came before, where there is room.
    assert plain.hits == 5 * (8 + 16)
    assert (plain.blocks, plain.state_pages) == (200, 0)
    # A state is larger than a block, so that they are fewer; with intervals more of them last.
    assert each.blocks > 200 > each.state_pages > 0
    assert each.hits <= fourth.hits <= plain.hits
    assert fourth.hits > 0
    assert fourth.blocks >= each.blocks


def test_a_hybrid_by_the_command(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(HYBRID))
    asked = ["bench", "cache", str(SLICE), "--hybrid", str(config)]
    done = CliRunner().invoke(asyncinfer, [*asked, "--blocks", "300", "--state-interval", "2"])
    assert done.exit_code == 0, done.output
    assert "every 2" in done.output
    assert "none: all attend" in done.output
    for wrong in (["--growth"], ["--policy", "lru"]):
        assert CliRunner().invoke(asyncinfer, [*asked, *wrong]).exit_code == 2


def test_a_model_without_states_is_no_hybrid() -> None:
    config = parse_config({**HYBRID, "layer_types": ["attention"] * 4})
    with pytest.raises(InvalidRequest, match="no layer of it keeps a state"):
        replay_hybrid([], config, [100], [1])
