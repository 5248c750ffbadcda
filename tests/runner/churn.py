"""Tenants that come and go by lot."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["churn"]


def churn(hand: Any, in_flight: int, seed: int, turns: int = 40) -> list[int]:
    """About a dozen requests over six slots, so many steps ahead; every token, in order."""
    lot = random.Random(seed)
    lengths: dict[int, int] = {}
    flights: list[Any] = []
    tokens: list[int] = []
    for turn in range(turns):
        if len(flights) == in_flight:
            tokens += hand.runner.collect(flights.pop(0)).tokens
        for slot in [slot for slot in lengths if lot.random() < 0.06]:
            hand.leave(slot)
            del lengths[slot]
        newcomer = None
        if len(lengths) < 6 and lot.random() < 0.4:
            newcomer = lot.choice([slot for slot in range(6) if slot not in lengths])
            prompt = [lot.randrange(55) for _ in range(lot.randrange(1, 12))]
            options = lot.choice([{}, {"temperature": 0.8}])
            hand.join(newcomer, prompt, seed=turn, **options)
            hand.row(newcomer, 0, len(prompt))
        for slot, length in lengths.items():
            hand.row(slot, length, 1)
            lengths[slot] = length + 1
        if newcomer is not None:
            lengths[newcomer] = len(prompt)
        flights.append(hand.launch())
    for flight in flights:
        tokens += hand.runner.collect(flight).tokens
    return tokens
