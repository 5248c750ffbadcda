"""`asyncinfer bench cache`: what cache policies make of a trace, in the engine's block manager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Any, Final

from asyncinfer.bench.cache_optimum import optimal_hits
from asyncinfer.bench.cache_trace import TraceRow
from asyncinfer.bench.plugin_title import plugin_title
from asyncinfer.bench.record import BenchError, Figure
from asyncinfer.plugins import cache_policies
from asyncinfer.protocols import EvictionPolicy
from asyncinfer.testing import CacheHarness, policy_cost

__all__ = ["BLOCKS", "CacheOptions", "CacheResult", "Replay", "measure_cache"]

BLOCKS: Final = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
#: Where growth is measured, and how much dearer ten times the blocks may be.
GROWTH: Final = (1_000, 10_000, 100_000, 1_000_000)
GROWTH_TARGET: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of the benchmark."""

    #: Names of policies, or names with arguments; every name that is known, if empty.
    policies: Sequence[str | tuple[str, Mapping[str, Any]]] = ()
    blocks: Sequence[int] = BLOCKS
    #: Tokens of an engine block; one stands for each block of the trace, whatever its size there.
    block_size: int = 16
    #: The share of all blocks that open conversations may pin.
    pinned_share: float = 0.0
    #: Measure also what each policy costs by the number of blocks.
    growth: bool = False


@dataclass(frozen=True, slots=True)
class Replay:
    """One policy at one capacity."""

    policy: str
    blocks: int
    #: Blocks found in the cache, with the whole prefix before them.
    hits: int
    #: CPU of looking up, taking, evicting, publishing and giving back, per block of the trace.
    microseconds: float


@dataclass(frozen=True, slots=True)
class CacheResult:
    requests: int
    total: int
    replays: tuple[Replay, ...]
    #: Capacity -> hits of the best there can be.
    optimum: Mapping[int, int]
    #: Policy -> microseconds of CPU per block, by the number of blocks.
    growth: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def rate(self, hits: int) -> float:
        return hits / self.total

    def figures(self) -> tuple[Figure, ...]:
        found = []
        for replay in self.replays:
            where = f"{replay.policy}, {replay.blocks:,} blocks"
            found.append(Figure(f"hit rate, {where}", self.rate(replay.hits), "", "higher"))
            found.append(Figure(f"CPU per block, {where}", replay.microseconds, "us", "lower"))
        for blocks, hits in self.optimum.items():
            name = f"hit rate, optimum, {blocks:,} blocks"
            found.append(Figure(name, self.rate(hits), "", "higher"))
        for policy, costs in self.growth.items():
            for (less, small), (more, large) in zip(
                list(costs.items()), list(costs.items())[1:], strict=False
            ):
                name = f"cost of {more:,} blocks in those of {less:,}, {policy}"
                found.append(Figure(name, large / small, "x", "lower", GROWTH_TARGET))
        return tuple(found)


def measure_cache(
    rows: Sequence[TraceRow],
    options: CacheOptions,
    report: Callable[[str, float], None] = lambda what, part: None,
) -> CacheResult:
    """Replay the trace with every policy at every capacity, one request at a time. `report` is
    told what is going on and what part of everything is done.

    Raises:
        BenchError: a request is larger than a capacity, or a policy misbehaved.
        PluginError: a policy is unknown or cannot be loaded.
    """
    policies = {plugin_title(each): each for each in options.policies or cache_policies.names()}
    for chosen in policies.values():
        cache_policies.resolve(chosen)
    longest = max(len(row.ids) for row in rows)
    if longest > min(options.blocks):
        raise BenchError(f"a request has {longest} blocks, more than {min(options.blocks)}")
    runs = [(name, blocks) for name in policies for blocks in options.blocks]
    replays = []
    for index, (name, blocks) in enumerate(runs):

        def say(part: float, index: int = index) -> None:
            report(f"{runs[index][0]}, {runs[index][1]:,} blocks", (index + part) / len(runs))

        policy = cache_policies.resolve(policies[name])
        replays.append(_replay(rows, name, policy, blocks, options, say))
    report("optimum", 1.0)
    optimum = {blocks: optimal_hits(rows, blocks) for blocks in options.blocks}
    growth = {}
    for name, chosen in policies.items() if options.growth else ():
        report(f"growth of {name}", 1.0)
        growth[name] = {
            blocks: 1e6 * min(policy_cost(cache_policies.resolve(chosen), blocks) for _ in range(2))
            for blocks in GROWTH
        }
    total = sum(len(row.ids) for row in rows)
    return CacheResult(len(rows), total, tuple(replays), optimum, growth)


def _replay(
    rows: Sequence[TraceRow],
    name: str,
    policy: EvictionPolicy,
    blocks: int,
    options: CacheOptions,
    say: Callable[[float], None],
) -> Replay:
    faults: list[Exception] = []
    size = options.block_size
    harness = CacheHarness(
        blocks,
        policy,
        block_size=size,
        on_fault=faults.append,
        pinned_share=options.pinned_share,
    )
    hits, spent, total = 0, 0.0, 0
    for number, row in enumerate(rows):
        if number % 500 == 0:
            say(number / len(rows))
        # Keys are computed off the engine's thread, and so not counted here.
        tokens = [block for block in row.ids for _ in range(size)]
        request = harness.request(tokens, conversation=row.conversation)
        before = thread_time()
        hits += harness.serve(request, row.time)
        if row.conversation is not None and row.then != "live":
            harness.converse(row.conversation, row.then)
        spent += thread_time() - before
        total += len(row.ids)
    if faults:
        raise BenchError(f"{name}: {faults[0]}")
    return Replay(name, blocks, hits, spent / total * 1e6)
