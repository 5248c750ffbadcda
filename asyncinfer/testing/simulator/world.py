"""`World`: the shared objects of a simulated life."""

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
    """An engine, its event loops, and its users.

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
        #: What happened, with how often.
        self.seen = Counter[str]()
        self.host = host
        self.state = state
        self.loops = [VirtualLoop(lambda: host.now) for _ in range(scenario.loops)]
        self.model = model
        #: A fault of these is a failure; a scenario's own plugins are expected to have some.
        self.plugins = dict(plugins or {})
        self.engine = SimulatedEngine(host, model, config_of(scenario, self.plugins, host))
        #: Consumers that have not ended, and ids of those that may have ended since the last look.
        self.consumers: dict[int, Consumer] = {}
        self.leaving: dict[int, None] = {}
        #: Open conversations, and the one in which a consumer speaks.
        self.talks: dict[int, Talk] = {}
        self.speaking: dict[int, Talk] = {}
        self.pins: dict[int, Pin] = {}
        #: Blocks that all requests so far would take if none returned any.
        self._blocks = 0
        #: Consumers whose prompts are texts.
        self.texts: dict[str, list[Consumer]] = {}
        #: Tasks that close something, and when they must be done.
        self.closers: dict[asyncio.Task[None], float] = {}
        #: Tasks that load or unload adapters, or pin a prompt.
        self.loads: set[asyncio.Task[None]] = set()
        self.adapters = AdapterHistory()

    def open_loop(self, index: int) -> VirtualLoop | None:
        """Open an event loop, unless it is open already."""
        if index >= len(self.loops) or self.loops[index].is_closed():
            return None
        return self.loops[index]

    @property
    def nothing_evicted(self) -> bool:
        """Whether everything computed so far must still be in the prefix cache."""
        scenario = self.scenario
        kept = scenario.prefix_cache and scenario.window is None and not scenario.state_pages
        return kept and self._blocks <= scenario.blocks

    def count_blocks(self, ask: Ask) -> None:
        """Count the blocks that a request may take."""
        most = self.scenario.max_context
        for prompt in (ask.prompt, ask.guide) if ask.guide else (ask.prompt,):
            total = most if ask.max_tokens is None else min(len(prompt) + ask.max_tokens, most)
            self._blocks += ask.n * (total // self.scenario.block_size + 2)
