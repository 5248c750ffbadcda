"""`check_cache_policy`: whether a cache policy keeps the rules of its protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, zip_longest
from math import inf
from typing import Final, NoReturn

from asyncinfer.errors import PluginError
from asyncinfer.plugins import cache_policies
from asyncinfer.protocols import EvictionPolicy
from asyncinfer.testing.patience import with_patience
from asyncinfer.testing.policy_cost import policy_cost
from asyncinfer.testing.policy_fuzz import Move, random_moves, run_moves
from asyncinfer.testing.rule_error import RuleError
from asyncinfer.testing.traced_memory import traced_memory
from asyncinfer.testing.watched_policy import WatchedPolicy

__all__ = ["check_cache_policy"]

#: A pool so small that everything happens in a short life, and one of thousands of blocks.
SMALL: Final = 8
LARGE: Final = 2_000
#: Blocks of the growth rule, and how much dearer a block may be with ten times as many.
FEW: Final = 2_000
MANY: Final = 20_000
DEARER: Final = 4.0
#: Bytes that a policy may keep for each block that is gone, after it has filled its memory.
KEEPS: Final = 16

Factory = Callable[[], EvictionPolicy]


def check_cache_policy(
    factory: Factory, *, examples: int = 200, growth: bool = True, patience: float = 30.0
) -> None:
    """Run policies that `factory` makes through the engine's own block manager. For pytest::

        def test_my_policy():
            check_cache_policy(MyPolicy)

    The rules: every method is there and takes what it must (*methods*); no call that keeps the
    order of a block's life raises (*never raises*); calls return (*returns*), as quickly as the
    engine wants it (*time*); blocks are not written to (*read only*);
    `victims(count)` gives a sequence of integers (*shape*), no more than asked for (*count*), no
    block twice (*different*), only evictable ones (*evictable*), and one or more if there are
    any (*at least one*), also if an earlier answer was not made use of; equal lives give equal
    answers, whatever other objects of the class live through (*deterministic*); a policy does
    not remember every block that ever was (*memory*); and what a block costs hardly grows with
    the number of blocks (*growth*).

    Args:
        factory: makes a new policy, such as its class.
        examples: lives to try; the smallest one in which a rule is broken is shown.
        growth: also measure CPU time, which takes a second or two.
        patience: seconds; a call that takes longer is taken for one that never returns.

    Raises:
        RuleError: the rule that is broken, how, and the smallest case.
        ImportError: hypothesis is not installed.
    """
    with_patience(lambda: _check(factory, examples, growth), patience)


def _check(factory: Factory, examples: int, growth: bool) -> None:
    from hypothesis import HealthCheck, Phase, settings, strategies
    from hypothesis import find as smallest
    from hypothesis.errors import Flaky, NoSuchExample

    try:
        cache_policies.resolve(factory())
    except PluginError as error:
        raise RuleError("methods", str(error)) from error
    tokens = strategies.lists(strategies.integers(0, 2), min_size=1, max_size=4).map(tuple)
    scopes = strategies.sampled_from(("", "b"))
    moves = strategies.one_of(
        strategies.builds(
            Move,
            strategies.sampled_from(("serve", "open")),
            tokens=tokens,
            scope=scopes,
            conversation=strategies.sampled_from((None, None, 0, 1)),
        ),
        strategies.builds(
            Move,
            strategies.sampled_from(("compute", "close", "wait", "tool", "over")),
            strategies.integers(0, 3),
        ),
        strategies.builds(Move, strategies.just("ask"), strategies.integers(1, 3)),
    )
    # Hypothesis draws longer lives as lists of lists than as one list.
    lives = strategies.lists(strategies.lists(moves, max_size=8), max_size=6).map(_joined)
    seen: list[tuple[Sequence[Move], RuleError]] = []

    def is_broken(moves: Sequence[Move]) -> bool:
        broken = _broken(factory, moves, SMALL)
        if broken is not None:
            seen.append((moves, broken))
        return broken is not None

    # A slow policy is told so before it is tried many times.
    slow = _broken(factory, random_moves(seed=2, count=100, longest=6), SMALL)
    if slow is not None and slow.rule == "time":
        raise slow
    with suppress(NoSuchExample, Flaky):
        # `smallest` runs its result once more, which a policy that is not deterministic may pass.
        smallest(
            lives,
            is_broken,
            settings=settings(
                max_examples=examples,
                database=None,
                deadline=None,
                derandomize=True,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
    if seen:
        # Of the shortest lives, the one that was found last has been simplified the furthest.
        case, broken = min(reversed(seen), key=lambda found: len(found[0]))
        _fail(broken, case, SMALL)
    case = random_moves(seed=1, count=600, longest=60)
    large = _broken(factory, case, LARGE)
    if large is not None:
        _fail(large, _shorter(factory, case, large.rule), LARGE)
    _check_memory(factory)
    if growth:
        _check_growth(factory)


def _broken(factory: Factory, moves: Sequence[Move], blocks: int) -> RuleError | None:
    """The rule that is broken in this life."""
    first, second = WatchedPolicy(factory()), WatchedPolicy(factory())
    try:
        run_moves(first, moves, blocks)
        run_moves(second, moves, blocks, other=WatchedPolicy(factory()))
    except RuleError as broken:
        return broken
    for one, two in zip_longest(first.answers, second.answers):
        if one != two:
            return RuleError("deterministic", f"victims are {one}, and in the same life {two}")
    return None


def _shorter(factory: Factory, moves: Sequence[Move], rule: str) -> Sequence[Move]:
    """The shortest beginning of a long life in which the rule is broken, by halving."""
    low, high = 0, len(moves)
    while low + 1 < high:
        middle = (low + high) // 2
        broken = _broken(factory, moves[:middle], LARGE)
        if broken is not None and broken.rule == rule:
            high = middle
        else:
            low = middle
    return moves[:high]


def _check_memory(factory: Factory) -> None:
    policy = factory()
    with traced_memory() as held:
        # Run before counting, so that memory bounded by the number of blocks is full.
        policy_cost(policy, 256, 4_000)
        before = held()
        policy_cost(policy, 256, 16_000)
        kept = held() - before
    if kept > KEEPS * 16_000:
        raise RuleError(
            "memory", f"{kept:,} bytes more after 16,000 blocks passed through a cache of 256"
        )


def _check_growth(factory: Factory) -> None:
    few = min(policy_cost(factory(), FEW, 5_000) for _ in range(3))
    many = inf
    # Another program may have slowed one of them: the best of three counts.
    for _ in range(3):
        many = min(many, policy_cost(factory(), MANY, 5_000))
        if many <= DEARER * few:
            return
    raise RuleError(
        "growth",
        f"a block costs {few * 1e6:.1f} us among {FEW:,} blocks and {many * 1e6:.1f} us among "
        f"{MANY:,}; at most {DEARER:g} times as much is allowed",
    )


def _joined(parts: list[list[Move]]) -> list[Move]:
    return [*chain.from_iterable(parts)]


def _fail(broken: RuleError, case: Sequence[Move], blocks: int) -> NoReturn:
    shown = [f"  {number}. {move}" for number, move in enumerate(case, 1)]
    if len(shown) > 40:
        shown[:-40] = [f"  ... {len(shown) - 40} moves"]
    lines = [
        broken.what,
        f"the smallest case, in a pool of {blocks} blocks of one token:",
        *shown,
        "  then every request ends, and the cache is emptied",
    ]
    raise RuleError(broken.rule, "\n".join(lines)) from broken
