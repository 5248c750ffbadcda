"""`serve_all`: a small scheduler that runs by a policy until every request has ended."""

from __future__ import annotations

from random import Random
from typing import Final

from asyncinfer.cache import KVGroupSpec, PrefixCache
from asyncinfer.params import SamplingParams
from asyncinfer.protocols import SchedulingPolicy
from asyncinfer.scheduler import RunnerSpec
from asyncinfer.testing.rule_error import RuleError
from asyncinfer.testing.simulation import Simulation

__all__ = ["serve_all"]

REQUESTS: Final = 40
#: Steps in which they must all have ended; a few hundred are needed.
MOST_STEPS: Final = 20_000
BLOCK_SIZE: Final = 4


def serve_all(policy: SchedulingPolicy, seed: int) -> None:
    """Requests of all kinds arrive at a pool too small for those that run.

    Raises:
        RuleError: the policy broke a rule, or a request did not come to its end.
    """
    rng = Random(seed)
    spec = RunnerSpec(
        groups=(KVGroupSpec(rng.choice((12, 20, 40))),),
        block_size=BLOCK_SIZE,
        max_slots=rng.choice((1, 3, 6)),
        max_context=40,
        vocab_size=50,
        max_step_tokens=rng.choice((4, 16, 32)),
    )
    simulation = Simulation(
        spec, policy=policy, cache=PrefixCache(BLOCK_SIZE, secret=b"scheduler"), on_fault=_raise
    )
    tracks = []
    for _ in range(REQUESTS):
        params = SamplingParams(
            temperature=0.0, max_tokens=rng.randint(1, 16), n=rng.choice((1, 2))
        )
        prompt = [rng.randrange(1, 50) for _ in range(rng.randint(1, 20))]
        tracks += simulation.submit(
            prompt,
            params,
            priority=rng.randint(-2, 2),
            deadline=rng.choice((None, simulation.now + rng.random())),
        )
        for _ in range(rng.randint(0, 3)):
            simulation.step(dt=rng.choice((0.01, 0.3)))
    for _ in range(MOST_STEPS):
        waiting = [track for track in tracks if track.ended is None]
        if not waiting:
            return
        simulation.step(dt=0.1)
    raise RuleError(
        "serves", f"{len(waiting)} of {len(tracks)} requests did not end in {MOST_STEPS:,} steps"
    )


def _raise(error: Exception) -> None:
    raise error.__cause__ if isinstance(error.__cause__, RuleError) else error
