"""Faults that have tests without a loop in rooms of their own: here through a whole engine."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import OpenEngine, Until, core_of, fake_runner, oracle, places

from asyncinfer import Engine, InvalidRequest, ModelLoadError
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.protocols import CachedBlock
from asyncinfer.testing import FakeModel
from asyncinfer.text import ChatTemplate, Detokenizer

pytestmark = pytest.mark.anyio


class Spoilt:
    """An eviction policy that goes wrong when it is asked for its tenth victim."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.idle: dict[int, None] = {}
        self.known: dict[int, None] = {}
        self.asked = 0

    def published(self, block: CachedBlock) -> None:
        self.known[block.block] = None

    def released(self, block: CachedBlock) -> None:
        self.idle[block.block] = None
        if self.how == "raises in released" and self.asked >= 10:
            raise ZeroDivisionError

    def reused(self, block: CachedBlock) -> None:
        self.idle.pop(block.block, None)

    def removed(self, block: CachedBlock) -> None:
        self.idle.pop(block.block, None)
        self.known.pop(block.block, None)

    def victims(self, count: int) -> list[int]:
        self.asked += 1
        first = next(iter(self.idle))
        if self.asked < 10 or self.how == "raises in released":
            return [first]
        match self.how:
            case "raises":
                raise ZeroDivisionError
            case "one in use":
                return [next(block for block in self.known if block not in self.idle)]
            case "twice":
                return [first, first]
        return [10**6]


# faults 21, 22
@pytest.mark.parametrize(
    "how", ["raises", "raises in released", "one in use", "twice", "not its own"]
)
async def test_a_bad_cache_policy_costs_hits_alone(
    open_engine: OpenEngine, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    caplog.set_level(logging.WARNING, "asyncinfer")
    model = FakeModel(blocks=20)
    async with open_engine(model, cache_policy=Spoilt(how), block_size=4) as engine:
        # One goes on all the while, so that there is a block in use.
        async with engine.stream("x" * 20, max_tokens=4, temperature=0.0, buffer=2) as held:
            await anext(held)
            for turn in range(12):
                prompt = f"prompt {turn} " * 2
                done = await engine.generate(prompt, max_tokens=8, temperature=0.0)
                assert list(done.token_ids) == oracle(engine, prompt, 8)
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached <= stats.blocks_total
    told = [record for record in caplog.records if "plugin_failed" in record.getMessage()]
    assert len(told) == 1
    assert "Spoilt" in told[0].getMessage()


# fault 32
async def test_chunks_never_hold_half_a_character(open_engine: OpenEngine) -> None:
    """The fake model draws bytes by chance: most of them are no text."""
    async with open_engine() as engine:
        for prompt in ("a", "b", "c"):
            stream = engine.stream(prompt, max_tokens=400, temperature=0.0)
            shown, ids = "", []
            async for chunk in stream:
                shown += chunk.text
                ids += chunk.token_ids
                whole = bytes(token for token in ids if token < 256).decode("utf-8", "replace")
                # What is shown never changes later; the end alone may still be a half.
                assert whole.startswith(shown)
                assert len(whole) - len(shown) <= 3
            tokenizer = core_of(engine).loaded.tokenizer
            assert shown == Detokenizer(tokenizer).decode(ids)


# fault 33
@pytest.mark.parametrize("buffer", [1, 256])
@pytest.mark.parametrize("on_full", ["pause", "coalesce"])
async def test_nothing_past_a_stop_string_is_shown(
    open_engine: OpenEngine, buffer: int, on_full: Any
) -> None:
    async with open_engine() as engine:
        options = {"max_tokens": 60, "temperature": 0.0, "buffer": buffer, "on_full": on_full}
        free = await engine.generate("hello", **options)
        text = free.text
        for stop in (
            (text,),
            (text + "more",),
            (text[0],),
            (text[30:36], text[32:34], text[30:33]),
            (text[-1:], text[20:22]),
        ):
            shown = ""
            async for chunk in engine.stream("hello", stop=stop, **options):
                shown += chunk.text
                assert text.startswith(shown)
                assert not any(each in shown for each in stop)
            if any(each in text for each in stop):
                assert any(text.startswith(each, len(shown)) for each in stop)
            else:
                assert shown == text


# fault 33
async def test_a_stop_string_that_begins_before_min_tokens(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        options = {"max_tokens": 120, "temperature": 0.0}
        chunks = [chunk async for chunk in engine.stream("hello", **options)]
        ends = [sum(len(chunk.text) for chunk in chunks[: n + 1]) for n in range(len(chunks))]
        text = "".join(chunk.text for chunk in chunks)
        # Two characters of two tokens, each token a character.
        first = next(
            n
            for n in range(20, 100)
            if chunks[n].text
            and chunks[n + 1].text
            and text.index(chunks[n].text + chunks[n + 1].text) == ends[n] - len(chunks[n].text)
        )
        stop = chunks[first].text + chunks[first + 1].text
        before = text[: text.index(stop)]
        for least, ended in ((0, True), (first + 1, True), (first + 2, True), (first + 3, False)):
            done = await engine.generate("hello", stop=stop, min_tokens=least, **options)
            assert (done.text == before, done.finish_reason == "stop") == (ended, ended), least


# fault 36
async def test_a_tiny_temperature_is_greedy(open_engine: OpenEngine) -> None:
    async with open_engine() as engine:
        for temperature in (0.0, 5e-324, 1e-7):
            done = await engine.generate("x", max_tokens=20, temperature=temperature)
            assert list(done.token_ids) == oracle(engine, "x", 20)


# faults 34, 35, 37, 38, 39
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("min_p", -1),
        ("n", 10**9),
        ("n", 100),
        ("logit_bias", dict.fromkeys(range(5000), 0.0)),
        ("bad_words", ["x"] * 2000),
        ("stop", ["x"] * 100),
    ],
)
async def test_refused_before_any_state_exists(
    open_engine: OpenEngine, field: str, value: Any
) -> None:
    async with open_engine(max_requests=50) as engine:
        # Not when it is awaited: when it is made.
        with pytest.raises(InvalidRequest) as caught:
            engine.stream("x", **{field: value})
        assert caught.value.field == field
        assert places(engine) == engine.stats().steps == 0


# fault 43
async def test_a_chat_template_reaches_for_the_interpreter(until: Until) -> None:
    class Chatty(FakeModel):
        def load(self, config: Any, progress: Any = None) -> Any:
            source = "{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}"
            return dataclasses.replace(
                super().load(config, progress), template=ChatTemplate(source)
            )

    async with Engine(Chatty()) as engine:
        with pytest.raises(InvalidRequest, match="unsafe"):
            await engine.generate([{"role": "user", "content": "x"}], max_tokens=1)
        assert places(engine) == 0
        assert (await engine.generate("x", max_tokens=1)).token_ids
        assert not fake_runner(engine).closed


def _truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def _more_tokens(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["vocab"]["odd"] = 9999
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")


def _index_outside(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")


def _link_outside(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/etc/passwd")


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


# faults 45, 46, 47, 48, 49
@pytest.mark.parametrize(
    "spoil", [_truncated, _more_tokens, _index_outside, _link_outside, _pickle]
)
async def test_a_bad_checkpoint_opens_no_engine(
    tmp_path: Path, until: Until, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL_PATH, folder)
    spoil(folder)
    before = threading.active_count()
    with pytest.raises(ModelLoadError) as caught:
        await Engine.open(folder)
    assert caught.value.file is not None or "tokenizer" in str(caught.value)
    await until(lambda: threading.active_count() <= before)
