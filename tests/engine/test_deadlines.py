"""Deadlines of many requests: none is missed, and one costs the same among many."""

from __future__ import annotations

import contextvars
import random
from typing import cast

from support import lines_run

from asyncinfer import SamplingParams
from asyncinfer.engine import deadlines as deadlines_module
from asyncinfer.engine.deadlines import Deadlines
from asyncinfer.engine.loop_bridge import LoopBridge
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.request import Request

MANY = 2000
#: Nobody is told of these.
NOWHERE = cast(LoopBridge, object())


def request(deadline: float) -> Request:
    options = RequestOptions(
        priority=0, deadline=deadline, cache_scope="", buffer=8, on_full="pause"
    )
    context = contextvars.copy_context()
    return Request("req-1", NOWHERE, SamplingParams(), options, 0.0, context)


def test_those_that_are_due_are_found_in_their_order() -> None:
    seed = 7
    requests = [request(1.0 + i // 3) for i in range(300)]
    random.Random(seed).shuffle(requests)
    deadlines = Deadlines()
    for each in requests:
        deadlines.add(each)
    for each in requests[::4]:
        deadlines.discard(each)
    left = [each for i, each in enumerate(requests) if i % 4]
    for now in (0.5, 1.0, 42.0, 1000.0):
        due = deadlines.due(now)
        assert sorted(map(id, due)) == sorted(id(each) for each in left if each.deadline <= now), (
            f"seed {seed}"
        )
        assert [each.deadline for each in due] == sorted(each.deadline for each in due)


def test_one_that_is_due_costs_the_same_among_many() -> None:
    """There may be one at every step, and the watchdog looks as well."""

    def work(count: int) -> int:
        deadlines = Deadlines()
        for i in range(count):
            deadlines.add(request(1.0 + i))
        found: list[Request] = []
        lines = lines_run(lambda: found.extend(deadlines.due(1.5)), deadlines_module.__file__)
        assert len(found) == 1
        return lines

    assert work(MANY) <= work(3) + 5
