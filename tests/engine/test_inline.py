"""A whole engine in a seeded simulation: intake, core, scheduler, cache, output; no thread.

Every chunk a consumer sees is checked against the fake model's pure function.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from asyncinfer import EngineClosed, InvalidRequest, Overloaded, RequestFailed, SamplingParams
from asyncinfer.engine.inbox import Command
from asyncinfer.testing import FakeModel, InlineEngine, InlineStream, Said, ScriptedModel
from asyncinfer.text import Detokenizer
from asyncinfer.tools import ChatOptions

SEEDS = range(60)


@dataclass
class Client:
    """A consumer and what it asked for."""

    stream: InlineStream
    prompt: list[int]
    params: SamplingParams
    seeds: list[int]
    pace: float
    stopped: bool = False
    aborted: bool = False


class World:
    """Random clients against one engine."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = FakeModel(
            blocks=self.random.choice([24, 60, 200]),
            max_context=256,
            eos_every=self.random.choice([None, 40]),
        )
        self.engine = InlineEngine(
            self.model,
            max_running=self.random.choice([3, 8]),
            max_step_tokens=self.random.choice([16, 64]),
            max_requests=24,
            block_size=self.random.choice([4, 16]),
            scheduler=self.random.choice(["fcfs", "priority", "deadline"]),
            overlap=self.random.choice([1, 2]),
            stall_timeout=3.0,
        )
        self.prefixes = [[self.random.randrange(1, 200) for _ in range(60)] for _ in range(3)]
        self.clients: list[Client] = []
        self.seen: Counter[str] = Counter()

    def submit(self) -> None:
        draw = self.random
        prompt = draw.choice(self.prefixes)[: draw.randrange(1, 60)]
        prompt = prompt + [draw.randrange(1, 200) for _ in range(draw.randrange(20))]
        sampling: dict[str, Any] = {
            "max_tokens": draw.randrange(1, 40),
            "temperature": draw.choice([0.0, 1.0]),
            "seed": draw.randrange(1000),
            "n": draw.choice([1, 1, 1, 3]),
            "logprobs": draw.choice([None, None, 1]),
            "prompt_logprobs": draw.choice([None, None, None, 0]),
        }
        if draw.random() < 0.2:
            sampling["stop"] = [chr(draw.randrange(33, 127)) for _ in range(2)]
        try:
            stream = self.engine.submit(
                prompt,
                priority=draw.randrange(3),
                deadline=draw.choice([None, None, 0.5, 30.0]),
                cache_scope=draw.choice(["", "a"]),
                buffer=draw.choice([2, 8, 256]),
                on_full=draw.choice(["pause", "pause", "coalesce", "cancel"]),
                **sampling,
            )
        except Overloaded:
            self.seen["overloaded"] += 1
            return
        except InvalidRequest:
            self.seen["refused"] += 1
            return
        params = SamplingParams(**sampling)
        # A request that has ended keeps no outputs.
        seeds = [output.sequence.seed for output in stream.request.outputs]
        assert len(seeds) == params.n
        self.clients.append(
            Client(stream, prompt, params, seeds, draw.choice([0.0, 0.1, 0.9, 1.0]))
        )

    def turn(self) -> None:
        draw = self.random
        if draw.random() < 0.3:
            self.submit()
        for client in self.clients:
            if draw.random() < client.pace:
                client.stream.read(draw.choice([None, 1, 3]))
            if draw.random() < 0.01 and not client.aborted:
                client.stream.abort()
                client.aborted = True
            elif draw.random() < 0.01:
                client.stream.stop()
                client.stopped = True
        self.engine.now += draw.choice([0.0, 0.01, 0.1])
        self.engine.pump()

    def finish(self) -> None:
        for _ in range(20_000):
            for client in self.clients:
                client.stream.read()
            if all(client.stream.ended for client in self.clients):
                break
            self.engine.pump()
        self.engine.pump()
        for client in self.clients:
            self.check(client)
        stats = self.engine.stats()
        assert stats.running == stats.waiting == stats.paused == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert self.engine.admission.held == 0
        assert stats.finished + stats.aborted + stats.failed == len(self.clients)
        self.seen["preempted"] += stats.preemptions
        self.seen["cached"] += stats.cached_tokens

    def check(self, client: Client) -> None:
        stream, params = client.stream, client.params
        assert stream.ended
        if stream.error is not None:
            assert isinstance(stream.error, RequestFailed), stream.error
            self.seen[type(stream.error).__name__] += 1
        for index, seed in enumerate(client.seeds):
            chunks = [chunk for chunk in stream.chunks if chunk.index == index]
            tokens = [token for chunk in chunks for token in chunk.token_ids]
            want = self.model.runner.oracle(  # type: ignore[union-attr]
                client.prompt, params, seed, len(tokens)
            )
            assert tokens == want, f"{stream.request.id} answer {index}"
            ends = [chunk.finish_reason for chunk in chunks]
            assert ends[:-1] == [None] * (len(ends) - 1), "an end before the end"
            reason = ends[-1] if ends else None
            assert reason is not None or client.aborted or stream.error is not None
            self.seen[str(reason)] += 1
            self.check_text(client, index, tokens, reason)
            if params.logprobs is not None:
                logprobs = [entry for chunk in chunks for entry in chunk.logprobs]
                assert [entry.token_id for entry in logprobs] == tokens

    def check_text(self, client: Client, index: int, tokens: list[int], reason: str | None) -> None:
        text = client.stream.text(index)
        eos = self.engine.core.loaded.tokenizer.eos_ids
        shown = tokens[:-1] if reason == "stop" and tokens[-1] in eos else tokens
        whole = Detokenizer(self.engine.core.loaded.tokenizer).decode(shown)
        if reason is None:
            assert whole.startswith(text.rstrip("\ufffd"))
        elif reason == "stop" and client.params.stop:
            cut = min([whole.find(s) for s in client.params.stop if s in whole] or [len(whole)])
            assert text == whole[:cut]
        else:
            assert text == whole
        for stop in client.params.stop:
            assert stop not in text


@pytest.mark.parametrize("seed", SEEDS)
def test_simulated_clients(seed: int) -> None:
    world = World(seed)
    for _ in range(250):
        world.turn()
    world.finish()


def test_the_simulation_meets_what_it_is_for() -> None:
    seen: Counter[str] = Counter()
    for seed in SEEDS[:20]:
        world = World(seed)
        for _ in range(250):
            world.turn()
        world.finish()
        seen += world.seen
    for what in (
        "preempted",
        "cached",
        "overloaded",
        "stop",
        "stopped",
        "length",
        "DeadlineExceeded",
        "StreamStalled",
        "RequestFailed",
    ):
        assert seen[what] > 0, (what, seen)


# fault 11
def test_submitted_after_the_close_was_posted() -> None:
    engine = InlineEngine(FakeModel())
    running = engine.submit([1, 2, 3], max_tokens=5)
    engine.pump()
    engine.core.post(Command.CLOSE, 10.0)
    late = engine.submit([1, 2, 3], max_tokens=5)
    engine.run()
    running.read()
    assert isinstance(late.error, EngineClosed)
    assert running.error is None
    assert len(running.token_ids()) == 5
    assert engine.core.done
    assert engine.admission.held == 0


def test_a_chat_is_read_as_a_stream_reads_it() -> None:
    said = Said("Yes.", reasoning="Well.", tool_calls=[("look", {})])
    look = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    engine = InlineEngine(ScriptedModel([said]))
    chat = ChatOptions.of([look], "auto", True, None, False)
    stream = engine.submit([{"role": "user", "content": "hi"}], chat=chat, max_tokens=200)
    engine.run()
    stream.read()
    assert stream.ended
    assert stream.text() == said.text
    assert "".join(chunk.reasoning for chunk in stream.chunks) == said.reasoning
    (called,) = [call for chunk in stream.chunks for call in chunk.tool_calls if call.name]
    assert called.name == "look"
