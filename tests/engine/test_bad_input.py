"""What no engine can use is named by its error, soon, and the engine goes on."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncinfer import Engine, InvalidConfig, InvalidRequest
from asyncinfer.builtin import DRAFT_PATH, MODEL_PATH
from asyncinfer.errors import PluginError
from asyncinfer.testing import FakeModel
from asyncinfer.text import Tokenizer

pytestmark = pytest.mark.asyncio

#: Of processor time, however busy the machine is. The slowest takes a seventh of it.
MOST_SECONDS = 1.0


def circular() -> dict[str, Any]:
    circle: dict[str, Any] = {}
    circle["properties"] = circle
    return circle


def every_combination(parts: int) -> dict[str, Any]:
    """As a union without `allOf` it has 6 ** parts members."""
    names = [[f"p{i}_{j}" for j in range(6)] for i in range(parts)]
    return {"allOf": [{"anyOf": [{"required": [name]} for name in part]} for part in names]}


TWICE = {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}]}
NESTED = '{"items":' * 200 + "{}" + "}" * 200
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "10 MB": ({"json_schema": {"const": "x" * 10_000_000}}, "json_schema"),
    "10 MB of text": (
        {"json_schema": '{"const": "' + "x" * 10_000_000 + '"}'},
        "json_schema",
    ),
    "a million values": ({"json_schema": {"enum": [*range(1_000_000)]}}, "json_schema/enum"),
    "a circle": ({"json_schema": circular()}, "json_schema/properties/"),
    "depth": ({"json_schema": NESTED}, "json_schema/items/"),
    "brackets": ({"json_schema": "[" * 60_000}, "json_schema"),
    "itself": (
        {"json_schema": {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}},
        "json_schema/$defs/x",
    ),
    "itself twice": (
        {"json_schema": {"$ref": "#/$defs/x", "$defs": {"x": TWICE}}},
        "json_schema/$defs/x/allOf/0",
    ),
    "all combinations": ({"json_schema": every_combination(12)}, "json_schema"),
    "a regex of a million": ({"regex": "a{1000000}"}, "regex"),
    "a nested regex": ({"regex": "(" * 5000 + "a" + ")" * 5000}, "regex"),
    "an unknown rule": ({"grammar": 'start: "a" b'}, "grammar"),
    "an open bracket": ({"grammar": 'root ::= "a" | ('}, "grammar"),
    "a nested grammar": ({"grammar": "start: " + "(" * 4000}, "grammar"),
}


@contextmanager
def soon() -> Iterator[None]:
    """What takes at most a second of this process's time. Nothing else is under way in it."""
    began = time.process_time()
    yield
    assert time.process_time() - began < MOST_SECONDS


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    tokenizer = Tokenizer.from_folder(Path(MODEL_PATH))
    async with Engine(FakeModel(strict=False, tokenizer=tokenizer)) as engine:
        # What all grammars share.
        await engine.generate("x", choice=["x"], max_tokens=2)
        yield engine


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", BAD)
async def test_a_bad_format_is_named_soon(engine: Engine, name: str) -> None:
    options, field = BAD[name]
    finished = engine.stats().finished
    async with engine.stream("once", max_tokens=40, seed=5, buffer=2) as stream:
        seen = [*(await anext(stream)).token_ids]
        with soon(), pytest.raises(InvalidRequest) as caught:
            await engine.generate("x", max_tokens=4, **options)
        assert caught.value.field.startswith(field)
        assert len(str(caught.value)) < 700
        # An answer that was under way goes on, and others begin.
        async for chunk in stream:
            seen += chunk.token_ids
    again = await engine.generate("once", max_tokens=40, seed=5)
    assert seen == list(again.token_ids)
    assert engine.health().state == "open"
    assert engine.stats().finished >= finished + 2


async def test_an_unknown_proposer_is_named_soon() -> None:
    with soon(), pytest.raises(PluginError, match="nobody"):
        await Engine.open(FakeModel(load_error=AssertionError()), proposers=["nobody"])


async def test_a_draft_model_of_another_vocabulary_is_named_soon(tmp_path: Path) -> None:
    for file in DRAFT_PATH.iterdir():
        shutil.copy(file, tmp_path)
    file = tmp_path / "tokenizer.json"
    text = json.loads(file.read_text("utf-8"))
    # The numbers of two of its tokens.
    vocabulary = text["model"]["vocab"]
    vocabulary["Ġthe"], vocabulary["Ġtest"] = vocabulary["Ġtest"], vocabulary["Ġthe"]
    file.write_text(json.dumps(text), "utf-8")
    async with Engine(FakeModel()) as other:
        with soon(), pytest.raises(InvalidConfig, match=r"draft=.*vocabulary: token \d+ is "):
            await Engine.open("embedded", draft=tmp_path)
        assert (await other.generate("x", max_tokens=3)).usage.completion_tokens == 3
