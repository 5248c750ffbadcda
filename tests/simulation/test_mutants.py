"""A test of the tests: every planted bug must be caught by the invariants or the oracle."""

from __future__ import annotations

import traceback

import pytest
from simulation.cache_bugs import CACHE_BUGS
from simulation.scheduler_bugs import SCHEDULER_BUGS
from simulation.state_bugs import STATE_BUGS
from simulation.window_bugs import WINDOW_BUGS

from asyncinfer.testing.scenarios import simulate_scheduler

SEEDS = 80
MUTANTS = {**CACHE_BUGS, **SCHEDULER_BUGS, **STATE_BUGS, **WINDOW_BUGS}
#: Seeds to try first, since few others catch the bug. The scenarios may change: then all are tried.
FIRST = {
    "shared with one that was preempted meanwhile": 63,
    "a hit that one of two windows cannot serve": 263,
    "a retracted draw is not drawn again": 15,
    "a retracted chunk counts as computed": 15,
    "followers are forgotten": 14,
    "prompt logprobs twice after a preemption": 9,
    "shared with one that sees the prompt no more": 9,
    "a page is given back one token early": 9,
    "some states are not rolled back": 62,
    "forked from a state that went on": 12,
    "a wrong draft stays in the state": 3,
    "a state is rolled back too far": 3,
    "a state is rolled back too little": 3,
    "a needy sequence is starved": 28,
    "the runner is not told of a decoding sequence's block": 63,
    "freed in flight by preemption": 12,
    "published though the row failed": 4,
    "the state before is given back too early": 3,
    **dict.fromkeys(
        (
            "a copied tail lacks its window page",
            "a pin is never released",
            "a pinned page is never released",
            "a shared tail is copied backwards",
            "a shared tail is not copied",
            "a tail is shared, not copied",
            "shared before it is computed",
            "the source of a copied page is not pinned",
            "the source of a copy is not pinned",
        ),
        5,
    ),
}


def fault_of(seed: int) -> Exception | None:
    """What the simulation of a seed finds."""
    try:
        simulate_scheduler(seed)
    except Exception as error:
        return error
    return None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    seeds = dict.fromkeys([FIRST.get(mutant, 0), *range(SEEDS)])
    error = next(filter(None, map(fault_of, seeds)), None)
    assert error is not None, f"survived {SEEDS} seeds"
    # A substitute that does not fit what it replaces would fail by itself, and prove nothing.
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    assert not where.endswith(("planted.py", "_bugs.py")), error


def test_the_seeds_find_nothing_without_a_bug() -> None:
    assert FIRST.keys() <= MUTANTS.keys()
    assert not [seed for seed in {0, 1, *FIRST.values()} if fault_of(seed) is not None]


def test_none_is_lost() -> None:
    assert len(MUTANTS) == 72
