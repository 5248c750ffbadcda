"""`Drawn`: a scenario, and actions one after another, by chance."""

from __future__ import annotations

from random import Random
from typing import Final

from asyncinfer.testing.simulator.life import Life
from asyncinfer.testing.simulator.plugins import CACHE_POLICIES, SCHEDULERS
from asyncinfer.testing.simulator.scenario import Action, Ask, Scenario
from asyncinfer.testing.simulator.vocabulary import LETTERS

__all__ = ["Drawn"]

_CACHE_POLICIES: Final = (
    *("arc", "cost-aware", "lfu", "lru", "lru"),
    *("prefix-lhd", "s3-fifo", "tail-first", "ttl"),
    *CACHE_POLICIES,
)
_SCHEDULERS: Final = (*("deadline", "fcfs", "priority") * 3, *SCHEDULERS)
_FAULTS: Final = ("row", "memory")
#: Actions after a life is over, so that those who come too late are seen as well.
_AFTERWARDS: Final = 40


class Drawn:
    """`scenario`, and a source of actions for a `Life` of it. Everything follows from the seed.

    Args:
        steps: least and most steps of the model before the life ends.
    """

    def __init__(self, seed: int, steps: tuple[int, int]) -> None:
        self._rng = rng = Random(seed)
        self.scenario = _scenario(rng)
        self._steps = rng.randint(*steps)
        self._ids = self._after = 0
        self._prefixes = [_letters(rng, 30) for _ in range(3)]
        # What kind of life it is: busy or quiet, smooth or not.
        self._arrivals = rng.choice((0.04, 0.12, 0.25))
        self._most = rng.choice((4, 12, 24))
        self._interrupted = rng.choice((0.0, 0.2, 0.4))
        self._faulty = rng.random() < 0.5
        self._closes = rng.random() < 0.3
        self._closes_early = rng.random() < 0.1
        #: Whether the decode thread, now that it is interrupted, stays so for long.
        self._stuck: bool | None = None
        self._stops = rng.random() < 0.5
        if rng.random() < 0.05:
            self._steps = 3

    def __call__(self, life: Life) -> Action | None:
        rng = self._rng
        if life.seen["steps"] >= self._steps or len(life.trace) > 40 * self._steps:
            return None
        if life.state.over < float("inf"):
            self._after += 1
            if self._after > _AFTERWARDS:
                return None
            if life.state.closing and rng.random() < 0.25:
                return ["cancel_owner"]
        elif self._closes_early and not life.state.opened:
            if rng.random() < 0.25:
                return self._close()
        elif self._closes and rng.random() < 0.01:
            return self._close()
        live = [*life.consumers]
        if not life.state.hangs:
            self._stuck = None
        elif self._stuck is None:
            self._stuck = rng.random() < 0.2
        if life.state.hangs and rng.random() < (0.8 if self._stuck else 0.2):
            return self._while_it_hangs()
        if rng.random() < self._arrivals and len(live) < self._most:
            ask = self._ask()
            if ask.form == "worker" and self._faulty and rng.random() < 0.15:
                # A thread may be about to be started for the first of these.
                return ["refuse_threads", rng.choice((1, 2))]
            return ["submit", ask.to_json()]
        if live and rng.random() < 0.015:
            return [rng.choice(("cancel", "cancel", "stop", "aclose")), rng.choice(live)]
        if rng.random() < (0.05 if self._faulty else 0.02):
            return self._event()
        roll = rng.random()
        if roll < 0.55:
            if rng.random() < 0.9 and _rests(life):
                # It would find nothing to do.
                return ["time", rng.choice((0.01, 0.05, 0.5, 1.5))]
            return self._turn("decode")
        if roll < 0.75:
            return ["loop", rng.randrange(self.scenario.loops), rng.choice((1, 3, 100))]
        if roll < 0.81:
            return self._turn("intake")
        if roll < 0.84:
            return self._turn("watchdog")
        return ["time", rng.choice((0.001, 0.01, 0.01, 0.05, 0.5))]

    def _turn(self, name: str) -> Action:
        rng = self._rng
        points = rng.randrange(6) if rng.random() < self._interrupted else None
        return ["turn", name, rng.randrange(2), points]

    def _event(self) -> Action:
        """Something that happens seldom."""
        rng = self._rng
        roll = rng.random()
        if roll < 0.4 and self._faulty:
            if rng.random() < 0.03:
                return ["fault", rng.choice(("launch", "collect")), 0]
            return ["fault", rng.choice(_FAULTS), rng.randrange(8)]
        if roll < 0.5 and self._stops:
            return ["jump", rng.choice((0.1, 2.0, 50.0))]
        if roll < 0.55 and self._closes:
            return self._close()
        if roll < 0.63 and self._faulty:
            return ["refuse_threads", rng.choice((1, 2))]
        return ["time", rng.choice((0.3, 1.0, 2.0, 6.0))]

    def _while_it_hangs(self) -> Action:
        """The decode thread is in the middle of a turn."""
        rng = self._rng
        roll = rng.random()
        if roll < 0.15 and self._stops:
            return ["jump", rng.choice((2.0, 50.0))]
        if roll < 0.35 and self._closes:
            return self._close()
        if roll < 0.5:
            return ["submit", self._ask().to_json()]
        return ["time", rng.choice((0.05, 0.3, 1.0, 6.0))]

    def _close(self) -> Action:
        rng = self._rng
        drain = rng.choice((None, 0.0, 0.5))
        return rng.choice((["close", drain], ["leave", rng.random() < 0.5], ["cancel_owner"]))

    def _ask(self) -> Ask:
        rng = self._rng
        self._ids += 1
        prefix = rng.choice(self._prefixes)[: rng.randrange(30)]
        return Ask(
            id=self._ids,
            loop=rng.randrange(self.scenario.loops),
            prompt=prefix + _letters(rng, rng.randrange(0 if prefix else 1, 8)),
            form=rng.choice(("ids", "ids", "ids", "text", "worker", "worker", "chat")),
            n=rng.choice((1, 1, 1, 2, 3)),
            max_tokens=rng.choice((None, None, 1, 2, 8, 30, 60)),
            min_tokens=rng.choice((0, 0, 1)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(2**32),
            stop=rng.choice(([], [], [], ["ab"], ["é", "he"])),
            logprobs=rng.choice((None, None, None, 1)),
            prompt_logprobs=rng.choice((None, None, None, 0)),
            priority=rng.randrange(3),
            deadline=rng.choice((None, None, None, rng.random(), 4.0, 3600.0)),
            scope=rng.choice(("", "", "other")),
            buffer=rng.choice((1, 4, 8, 100)),
            on_full=rng.choice(("pause", "pause", "coalesce", "cancel")),
            how=rng.choice(("iterate", "iterate", "await", "both")),
            pace=rng.choice((0.0, 0.0, 0.0, 0.02, 0.3, 0.5)),
            patience=rng.choice((None, None, None, 0.05)),
            chunks=rng.choice((None, None, None, 1, 3)),
            then=rng.choice(("stop", "leave", "raise", "drop", "sleep")),
        )


def _rests(life: Life) -> bool:
    """Whether the decode thread waits for news."""
    core = life.engine.core
    return core is not None and not core.busy and core.inbox.empty()


def _letters(rng: Random, count: int) -> list[int]:
    """Tokens that are a letter each."""
    return [rng.randrange(1, len(LETTERS) + 1) for _ in range(count)]


def _scenario(rng: Random) -> Scenario:
    block_size = rng.choice((1, 2, 4, 4, 8))
    window, pages = None, 0
    if rng.random() < 0.3:
        window = rng.choice((1, 2, 3, 5, 8, 9, 16))
        least = -(-(window - 1) // block_size) + 2
        pages = least + rng.choice((0, 1, 4, 12)) * least // 2
    return Scenario(
        blocks=rng.randint(24, 160) // block_size,
        block_size=block_size,
        max_context=rng.choice((24, 40, 64, 96)),
        max_running=rng.randint(1, 6),
        max_requests=rng.choice((4, 12, 64)),
        max_step_tokens=rng.choice((1, 3, 8, 16, 32)),
        overlap=rng.choice((1, 1, 2, 3, 4)),
        window=window,
        window_pages=pages,
        eos_every=rng.choice((None, None, 9, 25)),
        prefix_cache=rng.random() < 0.9,
        cache_policy=rng.choice(_CACHE_POLICIES),
        scheduler=rng.choice(_SCHEDULERS),
        stall_timeout=rng.choice((1.5, 5.0)),
        step_seconds=rng.choice((0.001, 0.01, 0.1)),
        loops=rng.choice((1, 1, 2)),
        load_points=rng.choice((0, 2)),
    )
