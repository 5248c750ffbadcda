"""The kit of scheduling policies passes the shipped ones and catches wrong ones by their rule."""

from __future__ import annotations

import math
import random
from asyncio import CancelledError
from threading import Event
from typing import Any, ClassVar

import pytest

from asyncinfer.protocols import RequestView
from asyncinfer.scheduler import FCFS, Deadline, Priority
from asyncinfer.testing import RuleError, check_scheduler


@pytest.mark.parametrize(
    ("policy", "overtaken_for"), [(FCFS, 0.001), (Priority, 121.0), (Deadline, 60.1)]
)
def test_the_shipped_ones_pass(policy: Any, overtaken_for: float) -> None:
    check_scheduler(policy, overtaken_for=overtaken_for)


class Good:
    """By length, and by waiting: the wrong ones differ from it in one thing."""

    def rank(self, request: RequestView, now: float) -> Any:
        return (request.prompt_len - 100 * (now - request.arrival), request.priority)


def test_the_base_of_the_wrong_ones_is_right() -> None:
    check_scheduler(Good)


class HasNoMethod:
    pass


class CannotBeMade(Good):
    def __init__(self) -> None:
        raise OSError("no file")


class NeedsADeadline(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        return (request.deadline - now,)  # type: ignore[operator]


class DividesByTheWait(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        return (request.prompt_len / (now - request.arrival),)


class GivesUp(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        raise CancelledError


class GivesANumber(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        return super().rank(request, now)[0]


class GivesAList(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        return [*super().rank(request, now)]


class GivesNone(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        return (request.deadline,)


class GivesText(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        return (str(request.priority),)


class GivesNaN(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        return (math.nan if request.prompt_len == 17 else 0.0,)


class GivesTooMany(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        return (0,) * 17


class Writes(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        request.priority = 7  # type: ignore[misc]
        return (0.0,)


class WritesPastIt(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        object.__setattr__(request, "prompt_len", 0)
        return (0.0,)


class ThrowsDice(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        return (random.random(),)


class Counts(Good):
    def __init__(self) -> None:
        self.calls = 0

    def rank(self, request: RequestView, now: float) -> Any:
        self.calls += 1
        return (self.calls,)


class RemembersTheFirst(Good):
    """What it saw first goes first, whatever was asked."""

    def __init__(self) -> None:
        self.first: int | None = None

    def rank(self, request: RequestView, now: float) -> Any:
        self.first = self.first or request.prompt_len
        return (abs(self.first - request.prompt_len),)


class SharesWithOthers(Good):
    seen: ClassVar[list[int]] = []

    def rank(self, request: RequestView, now: float) -> Any:
        self.seen.append(request.id)
        return (len(self.seen) // 100,)


class ClaimsToBeConstant(Good):
    constant = True


class Hoards(Good):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def rank(self, request: RequestView, now: float) -> Any:
        self.seen.append(f"request {request.id} at {now}")
        return super().rank(request, now)


class Slow(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        Event().wait(0.01)
        return super().rank(request, now)


WRONG: dict[type, str] = {
    HasNoMethod: "methods: .*has no method 'rank'",
    CannotBeMade: "methods: it cannot be made: OSError",
    NeedsADeadline: r"never raises: rank\(RequestView\(.*deadline=None.* raised TypeError",
    DividesByTheWait: r"never raises: rank\(RequestView\(.* raised ZeroDivisionError",
    GivesUp: "never raises: .*CancelledError",
    GivesANumber: "shape: .*is not a tuple of numbers",
    GivesAList: "shape: .*is not a tuple of numbers",
    GivesNone: r"shape: .* gave \(None,\), which is not a tuple of numbers",
    GivesText: "shape: .*is not a tuple of numbers",
    GivesNaN: "shape: .*NaN",
    GivesTooMany: "shape: .*more than 16 numbers",
    Writes: "read only: .*cannot assign to field 'priority'",
    WritesPastIt: "read only: .*made it RequestView",
    ThrowsDice: "pure: .*by the same object",
    Counts: "pure: ",
    RemembersTheFirst: "pure: .*by another object",
    SharesWithOthers: "pure: ",
    ClaimsToBeConstant: "constant: it declares constant = True; .* and at 1500.0",
    Hoards: "memory: .* bytes more after 4,000 more requests",
    Slow: r"time: .* took .* ms, as 20 calls in a row took too long",
}


@pytest.mark.parametrize("policy", WRONG, ids=lambda policy: policy.__name__)
def test_a_wrong_policy_is_caught_by_its_rule(policy: type) -> None:
    with pytest.raises(RuleError, match="^" + WRONG[policy]):
        check_scheduler(policy)


class ShortestFirst(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        return (request.prompt_len,)


def test_one_that_starves_somebody_is_caught_where_that_is_asked_for() -> None:
    check_scheduler(ShortestFirst)
    says = r"^fair: rank\(RequestView\(id=2, .* goes before RequestView\(id=1, .* waited for 60 s"
    with pytest.raises(RuleError, match=says):
        check_scheduler(ShortestFirst, overtaken_for=60.0)


class Hangs(Good):
    def rank(self, request: RequestView, now: float) -> Any:
        stuck_in_here()


def stuck_in_here() -> None:
    Event().wait(120)


def test_one_that_hangs_is_named_and_shown() -> None:
    with pytest.raises(RuleError, match=r"^returns: rank\(\) of scheduling policy Hangs") as caught:
        check_scheduler(Hangs, patience=1.0)
    assert "in stuck_in_here" in str(caught.value)
