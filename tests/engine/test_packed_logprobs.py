"""Logprobs are packed until somebody is handed them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from asyncinfer import Engine, InvalidRequest, TokenLogprob
from asyncinfer.engine.request import Request
from asyncinfer.engine.transcript import UNPACKED, unpack
from asyncinfer.scheduler import RowLogprobs
from asyncinfer.testing import FakeModel, InlineEngine

PROMPT = [1 + i % 200 for i in range(500)]
SCORED: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "logprobs": 5}


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions were unpacked, row by row."""
    counts: list[int] = []
    real = RowLogprobs.__iter__

    def counted(self: RowLogprobs) -> Iterator[TokenLogprob]:
        counts.append(len(self))
        return real(self)

    monkeypatch.setattr(RowLogprobs, "__iter__", counted)
    return counts


def test_what_is_packed_comes_back() -> None:
    entries = [
        TokenLogprob(5, -0.5, 2, ((7, -0.25), (1, -0.5), (5, -0.5))),
        TokenLogprob(2**31 - 1, -1e30, 2**31 - 1, ((0, 0.0), (3, -2.0), (2, -float("inf")))),
    ]
    rows = RowLogprobs.of(entries)
    exact = [entry._replace(logprob=_single(entry.logprob)) for entry in entries]
    assert list(rows) == exact
    assert len(rows) == 2
    assert len(rows.data) == 2 * 4 * (3 + 2 * 3)
    assert list(rows[1:]) == exact[1:]
    assert list(RowLogprobs.join([rows[:1], rows[1:], rows])) == exact * 2
    assert list(RowLogprobs.of([])) == []


def _single(value: float) -> float:
    return next(iter(RowLogprobs.of([TokenLogprob(0, value, 1)]))).logprob


def test_a_prompts_logprobs_are_held_packed(unpacked: list[int]) -> None:
    engine = InlineEngine(FakeModel(), max_step_tokens=64)
    stream = engine.submit(PROMPT, prompt_logprobs=128, max_tokens=3, temperature=0.0)
    engine.run()
    stream.read()
    outcome = stream.request.buffer.outcome
    assert outcome is not None
    assert outcome.prompt_logprobs is not None
    assert sum(len(rows.data) for rows in outcome.prompt_logprobs) == 499 * 4 * (3 + 2 * 128)
    assert not unpacked, "nobody was handed any"


def test_waiting_chunks_hold_packed_logprobs(unpacked: list[int]) -> None:
    for on_full in ("pause", "coalesce"):
        engine = InlineEngine(FakeModel(), on_full=on_full, buffer=8)
        stream = engine.submit("hello", **SCORED)
        engine.pump(30)
        assert not unpacked
        runner: Any = engine.core.runner
        while not stream.ended:
            stream.read()
            engine.pump()
        found = [entry for chunk in stream.chunks for entry in chunk.logprobs]
        tokens = stream.token_ids()
        assert found == [runner.logprob(token, 5 + i, 5) for i, token in enumerate(tokens)]
        assert len(found) == 40
        unpacked.clear()


@pytest.mark.anyio
async def test_iterating_and_then_awaiting_gives_all_of_them(unpacked: list[int]) -> None:
    async with Engine(FakeModel(), drain_timeout=0.0) as engine:
        stream = engine.stream(PROMPT, n=2, prompt_logprobs=2, seed=1, **SCORED)
        seen: list[list[TokenLogprob]] = [[], []]
        for _ in range(15):
            chunk = await anext(stream)
            seen[chunk.index] += chunk.logprobs
        assert sum(unpacked) == 15
        done = await stream
        assert [
            choice.logprobs[: len(entries)]
            for choice, entries in zip(done.choices, seen, strict=True)
        ] == [tuple(entries) for entries in seen]
        assert [len(choice.logprobs) for choice in done.choices] == [40, 40]
        assert [[e.token_id for e in choice.logprobs] for choice in done.choices] == [
            list(choice.token_ids) for choice in done.choices
        ]
        assert done.prompt_logprobs is not None
        assert done.prompt_logprobs[0] is None
        assert [e.token_id for e in done.prompt_logprobs[1:] if e] == PROMPT[1:]
        assert isinstance(done.prompt_logprobs, tuple)
        again = await stream
        assert again.prompt_logprobs == done.prompt_logprobs
        assert again.choices == done.choices


@pytest.mark.anyio
async def test_others_have_a_turn_while_they_areunpack() -> None:
    turns = 0

    class LoopBridge:
        async def checkpoint(self) -> None:
            nonlocal turns
            turns += 1

    entry = TokenLogprob(1, -1.0, 1, ((1, -1.0),) * 128)
    rows = RowLogprobs.of([entry] * 1000)
    bridge: Any = LoopBridge()
    assert await unpack([rows, rows], bridge) == (entry,) * 2000
    assert turns == 2000 // (UNPACKED // 129 + 1)


def test_prompt_logprobs_that_come_twice_are_kept_once() -> None:
    """As after a preemption."""
    engine = InlineEngine(FakeModel())
    request: Request = engine.submit([1, 2, 3, 4, 5, 6], prompt_logprobs=0).request
    entries = [TokenLogprob(token, -1.0, 1) for token in (2, 3, 4, 5, 6)]
    for position, chunk in ((1, entries[:2]), (1, entries[:3]), (3, entries[2:]), (3, entries[2:])):
        request.add_prompt_logprobs(position, RowLogprobs.of(chunk))
    assert request.prompt_logprobs is not None
    assert [e.token_id for part in request.prompt_logprobs for e in part] == [2, 3, 4, 5, 6]


@pytest.mark.anyio
async def test_a_prompt_with_too_many_logprobs_is_refused() -> None:
    async with Engine(FakeModel(max_context=20_000, blocks=2000, strict=False)) as engine:
        with pytest.raises(InvalidRequest, match="1048576") as caught:
            await engine.generate([1] * 8129, prompt_logprobs=128, max_tokens=1)
        assert caught.value.field == "prompt_logprobs"
