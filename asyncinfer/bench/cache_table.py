"""The tables of `asyncinfer bench cache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from asyncinfer.bench.cache import CacheResult

if TYPE_CHECKING:
    from asyncinfer.planner import HybridReplay

__all__ = ["cache_tables", "hybrid_table"]


def cache_tables(result: CacheResult) -> list[Table]:
    """Hit rates, costs, and growth if it was measured; a column for each capacity."""
    capacities = list(result.optimum)
    cells = {(replay.policy, replay.blocks): replay for replay in result.replays}
    names = list(dict.fromkeys(replay.policy for replay in result.replays))
    rates = _table("hit rate", capacities)
    for name in names:
        hits = [cells[name, blocks].hits for blocks in capacities]
        rates.add_row(name, *(f"{result.rate(each):.4f}" for each in hits))
    rates.add_section()
    best = [f"{result.rate(result.optimum[blocks]):.4f}" for blocks in capacities]
    rates.add_row("optimum (offline)", *best)
    costs = _table("us of CPU per block", capacities)
    for name in names:
        times = [cells[name, blocks].microseconds for blocks in capacities]
        costs.add_row(name, *(f"{each:.1f}" for each in times))
    tables = [rates, costs]
    if result.growth:
        counts = list(next(iter(result.growth.values())))
        growth = _table("us of CPU per block in the policy alone", counts)
        for name, by_blocks in result.growth.items():
            growth.add_row(name, *(f"{each:.2f}" for each in by_blocks.values()))
        tables.append(growth)
    return tables


def hybrid_table(replays: Sequence[HybridReplay]) -> Table:
    """A row for each division of each memory."""
    table = Table(title="hit rate in the memory of so many blocks", title_justify="left")
    for column in ("memory", "states", "blocks", "state pages", "hit rate"):
        table.add_column(column, justify="right")
    for each in replays:
        kept = "none: all attend" if each.interval is None else f"every {each.interval}"
        counts = f"{each.blocks:,}", f"{each.state_pages:,}"
        table.add_row(f"{each.memory:,}", kept, *counts, f"{each.rate:.4f}")
    return table


def _table(title: str, capacities: list[int]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("blocks", no_wrap=True)
    for blocks in capacities:
        table.add_column(f"{blocks:,}", justify="right")
    return table
