"""A trace of agents: conversations that wait for tools, branch and end, beside single requests."""

from __future__ import annotations

from itertools import count, islice
from random import Random
from typing import Final

from asyncinfer.bench.cache_trace import TraceRow
from asyncinfer.protocols import ConversationState

__all__ = ["agents_trace"]

#: Seconds between two beginnings, on average, and the share of those that are single requests.
_PAUSE: Final = 2.0
_SINGLE: Final = 0.3
#: Of the answers that are not the last: how many a user replies to, and after how many an agent has
#: others work for it.
_USER: Final = 0.1
_BRANCHES: Final = 0.06


def agents_trace(seed: int = 0, beginnings: int = 200) -> list[TraceRow]:
    """So many agents and single requests, in the order of time. A block is 512 tokens.

    An agent has one of eight programs: a beginning of 2 to 12 blocks, its instructions and tools,
    the first of which are the most popular (Zipf). It adds a task of 1 to 8 blocks, and takes 2 to
    25 turns: each prompt is all that was before, a block of answer, and 1 to 12 blocks of what has
    come in, mostly few (log-normal). A tool takes 4 s in the median (log-normal); in a tenth of all
    turns it is a user, who takes 90 s on average. Where an agent branches, 2 or 3 others begin
    as it is, take 2 to 8 turns each, and it goes on when the last one is done. Single requests have
    2 to 30 blocks that never come again.
    """
    rng, agents = Random(seed), _Agents(Random(~seed))
    programs = [agents.new_blocks(rng.randint(2, 12)) for _ in range(8)]
    popular = [1 / rank for rank in range(1, len(programs) + 1)]
    now = 0.0
    for _ in range(beginnings):
        now += rng.expovariate(1 / _PAUSE)
        if rng.random() < _SINGLE:
            agents.rows.append(TraceRow(now, agents.new_blocks(rng.randint(2, 30))))
            continue
        (program,) = rng.choices(programs, popular)
        task = agents.new_blocks(rng.randint(1, 8))
        agents.run(program + task, now, rng.randint(2, 25), branches=True)
    return sorted(agents.rows, key=lambda row: row.time)


class _Agents:
    """Adds what agents ask for to `rows`."""

    def __init__(self, rng: Random) -> None:
        self.rows: list[TraceRow] = []
        self._rng = rng
        self._blocks, self._names = count(), count()

    def new_blocks(self, number: int) -> tuple[int, ...]:
        return tuple(islice(self._blocks, number))

    def run(self, context: tuple[int, ...], now: float, turns: int, *, branches: bool) -> float:
        """An agent that begins with this context; when its last answer is there."""
        rng, name = self._rng, next(self._names)
        for turn in range(turns):
            last = turn == turns - 1
            state: ConversationState = "waiting"
            wait = rng.lognormvariate(1.4, 1.2)
            if last:
                state = "over"
            elif rng.random() < _USER:
                state, wait = "live", rng.expovariate(1 / 90)
            self.rows.append(TraceRow(now, context, name, state))
            if last:
                break
            context += self.new_blocks(1)
            if branches and state == "waiting" and rng.random() < _BRANCHES:
                ends = [
                    self.run(
                        context + self.new_blocks(rng.randint(1, 3)),
                        now + 0.1 * number,
                        rng.randint(2, 8),
                        branches=False,
                    )
                    for number in range(1, rng.randint(3, 4))
                ]
                wait = max(ends) - now
            now += 1.0 + wait
            context += self.new_blocks(min(12, 1 + int(rng.lognormvariate(0.5, 1.0))))
        return now
