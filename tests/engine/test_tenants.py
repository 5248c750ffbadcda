"""What one tenant can learn of another: nothing from the prefix cache."""

from __future__ import annotations

import pytest
from support import OpenEngine

pytestmark = pytest.mark.anyio

PROMPT = "The password is swordfish. " * 20


# fault 51
async def test_a_prompt_of_another_scope_costs_what_a_new_one_does(
    open_engine: OpenEngine,
) -> None:
    async with open_engine(max_step_tokens=64) as engine:

        async def ask(scope: str) -> tuple[int, int]:
            """Cached tokens, and steps until the answer: the time, without a clock."""
            before = engine.stats().steps
            done = await engine.generate(PROMPT, max_tokens=1, cache_scope=scope)
            return done.usage.cached_tokens, engine.stats().steps - before

        cold = await ask("alice")
        assert cold[0] == 0
        assert await ask("bob") == cold
        assert await ask("") == cold
        # Within a scope it is seen, in the usage and in the time.
        cached, steps = await ask("alice")
        assert cached > 0
        assert steps < cold[1]


async def test_without_scopes_everybody_shares(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        await engine.generate(PROMPT, max_tokens=1)
        assert (await engine.generate(PROMPT, max_tokens=1)).usage.cached_tokens > 0
