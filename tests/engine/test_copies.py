"""What belongs to an engine is neither copied nor pickled: the finalizer of a copy ended it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from asyncinfer import Engine, SyncEngine
from asyncinfer.testing import FakeModel, ScriptedModel

pytestmark = pytest.mark.anyio

WAYS = [copy.copy, copy.deepcopy, pickle.dumps]


@pytest.mark.parametrize("copied", WAYS)
async def test_a_copy_is_refused_and_harms_nothing(copied: Callable[[Any], object]) -> None:
    model = ScriptedModel(lambda messages: messages[-1]["content"])
    async with Engine(model) as engine:
        async with engine.session() as session, engine.pin("a prompt " * 8) as pin:
            stream = engine.stream("x")
            await anext(stream)
            told = session.stream("y")
            for each in (engine, engine.adapters, engine.hold(), stream, session, told, pin):
                with pytest.raises(TypeError, match=f"^{type(each).__name__} cannot be copied or"):
                    copied(each)
            assert (await stream).text == "x"
            assert (await told).text == "y"


@pytest.mark.parametrize("copied", WAYS)
def test_nor_is_what_blocks(copied: Callable[[Any], object]) -> None:
    with SyncEngine(FakeModel()) as engine, engine.stream("x", max_tokens=3) as stream:
        for each in (engine, engine.adapters, stream):
            with pytest.raises(TypeError, match=f"^{type(each).__name__} cannot be copied or"):
                copied(each)
        assert len(list(stream)) == 3
