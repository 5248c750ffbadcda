"""`asyncinfer chat` with a model that thinks before it answers."""

from __future__ import annotations

import pytest

from asyncinfer import Engine
from asyncinfer.cli.chat import show_answer
from asyncinfer.testing import Said, ScriptedModel


@pytest.mark.asyncio
async def test_reasoning_is_seen_and_no_part_of_the_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with Engine(ScriptedModel([Said("Yes.", reasoning="Well, why not?")])) as engine:
        chat = [{"role": "user", "content": "Is it?"}]
        assert await show_answer(engine.stream(chat)) == "Yes."
    assert capsys.readouterr().out == "Well, why not?\n\nYes.\n"
