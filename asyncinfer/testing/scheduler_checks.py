"""`check_scheduler`: whether a scheduling policy keeps the rules of its protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Final

from asyncinfer.errors import PluginError
from asyncinfer.plugins import schedulers
from asyncinfer.protocols import RequestView, SchedulingPolicy
from asyncinfer.testing.patience import with_patience
from asyncinfer.testing.rule_error import RuleError
from asyncinfer.testing.scheduler_fuzz import serve_all
from asyncinfer.testing.traced_memory import traced_memory
from asyncinfer.testing.watched_scheduler import WatchedScheduler, show

__all__ = ["check_scheduler"]

#: Requests that are ranked, and those of the memory rule with the bytes that each may cost.
VIEWS: Final = 300
MANY: Final = 4_000
KEEPS: Final = 16
#: Lives of a scheduler, each with its seed.
LIVES: Final = 4

Factory = Callable[[], SchedulingPolicy]


def check_scheduler(
    factory: Factory, *, overtaken_for: float | None = None, patience: float = 30.0
) -> None:
    """Have scheduling policies that `factory` makes rank requests, and run the engine's own
    scheduler by them. For pytest::

        def test_my_policy():
            check_scheduler(MyPolicy)

    The rules: it can be made, the method is there and takes what it must (*methods*); calls return
    (*returns*), as quickly as the engine wants it (*time*); none raises, whatever request there may
    be (*never raises*), or writes to one (*read only*); a rank is a tuple of up to 16 numbers, none
    of them NaN (*shape*); equal arguments give an equal rank, whatever was ranked before, and by
    another object too (*pure*); ranks do not change with time if it says so (*constant*); it does
    not remember every request that ever was (*memory*); every request is served, with preemptions
    and without (*serves*); and nobody waits for ever, if that is asked for (*fair*).

    Args:
        factory: makes a new policy, such as its class.
        overtaken_for: seconds after which a request that waits must go before every newcomer, of
            whatever priority from -2 to 2, length and deadline. None does not ask for it: a policy
            may prefer some for ever.
        patience: seconds; a call that takes longer is taken for one that never returns.

    Raises:
        RuleError: the rule that is broken, and the request that shows it.
    """
    with_patience(lambda: _check(factory, overtaken_for), patience)


def _check(factory: Factory, overtaken_for: float | None) -> None:
    policy = _made(factory)
    try:
        schedulers.resolve(policy)
    except PluginError as error:
        raise RuleError("methods", str(error)) from error
    _check_pure(factory)
    if getattr(policy, "constant", False) is True:
        _check_constant(factory)
    _check_memory(factory)
    for seed in range(LIVES):
        serve_all(WatchedScheduler(_made(factory)), seed)
    if overtaken_for is not None:
        _check_fair(factory, overtaken_for)


def _made(factory: Factory) -> SchedulingPolicy:
    try:
        return factory()
    except Exception as error:
        raise RuleError("methods", f"it cannot be made: {error!r}") from error


def views(seed: int, count: int, now: float = 1_000.0) -> Iterator[RequestView]:
    """Requests that may exist at `now`, including those at the bounds."""
    rng = Random(seed)
    for id in range(count):
        arrival = rng.choice((now, now - rng.random(), now * rng.random()))
        due = rng.choice((arrival, now + rng.random() * 100, now + 1e9))
        yield RequestView(
            id=id,
            priority=rng.choice((0, 0, 1, -1, 2, 2**31 - 1, -(2**31))),
            arrival=arrival,
            deadline=rng.choice((None, due)),
            prompt_len=rng.choice((1, 2, 17, rng.randint(1, 5_000), 10_000_000)),
            preemptions=rng.choice((0, 0, 1, 40)),
        )


def _check_pure(factory: Factory) -> None:
    first, second = WatchedScheduler(_made(factory)), WatchedScheduler(_made(factory))
    seen, now = list(views(1, VIEWS)), 1_000.0
    ranks = [first.rank(view, now) for view in seen]
    shuffled = list(range(VIEWS))
    Random(2).shuffle(shuffled)
    for at in shuffled:
        for other, whose in ((first, "the same object"), (second, "another object")):
            rank = other.rank(seen[at], now)
            if rank != ranks[at]:
                raise RuleError(
                    "pure",
                    f"{show(seen[at], now)} gave {ranks[at]}, and then {rank} by {whose}, after "
                    "other requests were ranked",
                )


def _check_constant(factory: Factory) -> None:
    policy = WatchedScheduler(_made(factory))
    for view in views(3, VIEWS):
        one, other = policy.rank(view, 1_000.0), policy.rank(view, 1_500.0)
        if one != other:
            raise RuleError(
                "constant",
                f"it declares constant = True; {show(view, 1_000.0)} gave {one}, and at 1500.0 "
                f"{other}",
            )


def _check_memory(factory: Factory) -> None:
    policy = WatchedScheduler(_made(factory))
    with traced_memory() as held:
        for view in views(4, MANY // 10):
            policy.rank(view, 1_000.0)
        before = held()
        for view in views(5, MANY):
            policy.rank(view, 1_000.0)
        kept = held() - before
    if kept > KEEPS * MANY:
        raise RuleError("memory", f"{kept:,} bytes more after {MANY:,} more requests were ranked")


def _check_fair(factory: Factory, overtaken_for: float) -> None:
    policy, rng = WatchedScheduler(_made(factory)), Random(6)
    now = 1_000.0 + overtaken_for
    for _ in range(VIEWS):
        length, priority = rng.choice((1, 100, 1_000_000)), rng.randint(-2, 2)
        old = RequestView(1, priority, 1_000.0, None, length, rng.choice((0, 1)))
        due = rng.choice((None, now + 0.001, now + 60.0))
        new = RequestView(2, rng.randint(-2, 2), now, due, rng.choice((1, 100, 1_000_000)))
        if policy.rank(old, now) > policy.rank(new, now):
            raise RuleError(
                "fair",
                f"{show(new, now)} goes before {old}, which has waited for {overtaken_for:g} s",
            )
