"""`World`: what a simulated life consists of, as its parts share it."""

from __future__ import annotations

import asyncio
from collections import Counter

from asyncinfer.engine import Pin
from asyncinfer.testing.simulator.adapters import AdapterHistory
from asyncinfer.testing.simulator.consumer import Consumer
from asyncinfer.testing.simulator.engine import SimulatedEngine
from asyncinfer.testing.simulator.host import VirtualHost
from asyncinfer.testing.simulator.loop import VirtualLoop
from asyncinfer.testing.simulator.model import SimulatedModel
from asyncinfer.testing.simulator.plugins import Plugins, config_of
from asyncinfer.testing.simulator.scenario import Ask, Scenario
from asyncinfer.testing.simulator.state import LifeState
from asyncinfer.testing.simulator.talks import Talk

__all__ = ["World"]


class World:
    """An engine, its event loops, and whoever uses them.

    Args:
        plugins: in place of the scenario's. A fault of theirs is a failure.
    """

    def __init__(
        self,
        scenario: Scenario,
        host: VirtualHost,
        state: LifeState,
        model: SimulatedModel,
        plugins: Plugins | None = None,
    ) -> None:
        self.scenario = scenario
        #: What happened, and how often.
        self.seen = Counter[str]()
        self.host = host
        self.state = state
        self.loops = [VirtualLoop(lambda: host.now) for _ in range(scenario.loops)]
        self.model = model
        #: Their faults are failures; plugins of the scenario are meant to have some.
        self.plugins = dict(plugins or {})
        self.engine = SimulatedEngine(host, model, config_of(scenario, self.plugins, host))
        #: Consumers that have not ended, and ids of those that may have since somebody looked.
        self.consumers: dict[int, Consumer] = {}
        self.leaving: dict[int, None] = {}
        #: Conversations that are open, and that in which a consumer speaks.
        self.talks: dict[int, Talk] = {}
        self.speaking: dict[int, Talk] = {}
        self.pins: dict[int, Pin] = {}
        #: Blocks that all requests so far would take if none gave any back.
        self._blocks = 0
        #: The consumers that asked with a text.
        self.texts: dict[str, list[Consumer]] = {}
        #: Tasks that close something, and when they must be done.
        self.closers: dict[asyncio.Task[None], float] = {}
        #: Tasks that load or unload adapters, or pin a prompt.
        self.loads: set[asyncio.Task[None]] = set()
        self.adapters = AdapterHistory()

    def open_loop(self, index: int) -> VirtualLoop | None:
        """An event loop that is there."""
        if index >= len(self.loops) or self.loops[index].is_closed():
            return None
        return self.loops[index]

    @property
    def nothing_evicted(self) -> bool:
        """Whether all that was computed so far must be in the prefix cache."""
        scenario = self.scenario
        kept = scenario.prefix_cache and scenario.window is None and not scenario.state_pages
        return kept and self._blocks <= scenario.blocks

    def count_blocks(self, ask: Ask) -> None:
        """A request may take blocks for so many tokens."""
        most = self.scenario.max_context
        for prompt in (ask.prompt, ask.guide) if ask.guide else (ask.prompt,):
            total = most if ask.max_tokens is None else min(len(prompt) + ask.max_tokens, most)
            self._blocks += ask.n * (total // self.scenario.block_size + 2)
