"""What became of the drafts of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncinfer.speculation.drafter import MOST_DRAFTED
from asyncinfer.stats import DraftStats

__all__ = ["DraftCounters", "MethodCounts", "draft_stats"]


def _zeros() -> list[int]:
    return [0] * MOST_DRAFTED


@dataclass(slots=True)
class MethodCounts:
    """Totals of one method: drafted tokens by their position in the draft."""

    accepted: list[int] = field(default_factory=_zeros)
    rejected: list[int] = field(default_factory=_zeros)


@dataclass(slots=True)
class DraftCounters:
    """The counts of an engine, by method. Written by the decode thread."""

    methods: dict[str, MethodCounts] = field(default_factory=dict)
    #: Drafted tokens of all methods that were right, and those that were wrong.
    accepted: int = 0
    rejected: int = 0

    def count(self, method: str, drafted: int, accepted: int) -> None:
        """Count a draft of `drafted` tokens, of which the first `accepted` were right."""
        self.accepted += accepted
        self.rejected += drafted - accepted
        counts = self.methods.get(method)
        if counts is None:
            counts = MethodCounts()
            # Replaced as a whole, since another thread may be iterating over it.
            self.methods = {**self.methods, method: counts}
        for position in range(accepted):
            counts.accepted[position] += 1
        for position in range(accepted, drafted):
            counts.rejected[position] += 1


def draft_stats(counters: DraftCounters) -> tuple[DraftStats, ...]:
    """The counts as `EngineStats` reports them. Any thread."""
    stats = []
    for method, counts in counters.methods.items():
        accepted, rejected = tuple(counts.accepted), tuple(counts.rejected)
        # Each drafted token is counted in one of the two.
        longest = max((i + 1 for i in range(MOST_DRAFTED) if accepted[i] or rejected[i]), default=0)
        stats.append(DraftStats(method, accepted[:longest], rejected[:longest]))
    return tuple(stats)
