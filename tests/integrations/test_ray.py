"""Replicas as actors of a Ray on this machine. It takes half a minute, and needs `asyncinfer[ray]`,
which the other tests do not install."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import httpx2
import openai
import pytest
from cli.test_serve import served
from support import Until

from asyncinfer import InvalidConfig, InvalidRequest, ModelLoadError
from asyncinfer.remote import ReplicaLost
from asyncinfer.testing import Said, ScriptedModel

HAS_RAY = find_spec("ray") is not None
if HAS_RAY:
    import ray

    from asyncinfer.integrations import RayEngine

pytestmark = [
    pytest.mark.skipif(not HAS_RAY, reason='needs pip install "asyncinfer[ray]"'),
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]

OPTIONS = {"num_cpus": 0}
#: The shipped model: an actor loads it in a second.
PROMPT = "def add(a, b):\n    return a + b\n\n\n" * 3


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # GPUs that nobody has: an actor asks for one, and computes without.
    ray.init(
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=1 << 27,
    )
    yield
    ray.shutdown()


async def pids(engine: Any) -> dict[str, int]:
    """The processes of the replicas."""
    asked = {
        name: link.actor.__ray_call__.remote(lambda _: os.getpid())
        for name, link in engine.links.items()
    }
    return {name: await reference for name, reference in asked.items()}


async def test_a_cluster(until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    async with RayEngine(replicas=2, actor_options=OPTIONS) as engine:
        # Answers, their parts and what is bad cross the cluster as they are.
        whole = await engine.generate(PROMPT, max_tokens=12, temperature=0.0, logprobs=1)
        async with engine.stream(PROMPT, max_tokens=12, temperature=0.0, logprobs=1) as stream:
            chunks = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        read = sum((chunk.logprobs for chunk in chunks), ())
        assert [each.token_id for each in read] == [each.token_id for each in whole.logprobs]
        # The first was computed whole, the second from a cached prefix.
        assert [each.logprob for each in read] == pytest.approx(
            [each.logprob for each in whole.logprobs], abs=1e-4
        )
        with pytest.raises(InvalidRequest, match=r"^prompt\[0\]=9999999"):
            await engine.generate([9_999_999])
        # The second request found what the first one left.
        assert stream.usage is not None
        assert stream.usage.cached_tokens > 0
        # Whoever leaves is gone there, too.
        async with engine.stream(PROMPT, ignore_eos=True) as left:
            await anext(left)
        await until(lambda: engine.stats().aborted == 1)

        # One is killed in the middle: its streams fail with the cause, the others go on.
        streams = [engine.stream(f"x{i} = ", ignore_eos=True, max_tokens=1000) for i in range(6)]
        for stream in streams:
            await anext(stream)
        processes = await pids(engine)
        os.kill(processes["replica-0"], signal.SIGKILL)

        async def rest(stream: Any) -> int:
            return sum([len(chunk.token_ids) async for chunk in stream])

        ends = await asyncio.gather(*map(rest, streams), return_exceptions=True)
        lost = [end for end in ends if isinstance(end, BaseException)]
        assert 0 < len(lost) < 6
        assert all(isinstance(end, ReplicaLost) and end.__cause__ is not None for end in lost)
        assert [end for end in ends if isinstance(end, int)] == [999] * (6 - len(lost))
        # It comes back.
        await until(lambda: engine.health().state == "open" and len(engine.health().reasons) == 0)
        assert (await pids(engine))["replica-0"] != processes["replica-0"]

        # Down and up under load.
        work = [
            asyncio.ensure_future(engine.generate(f"y{i} = ", max_tokens=40, ignore_eos=True))
            for i in range(12)
        ]
        await engine.scale(1)
        await engine.scale(2)
        done = await asyncio.gather(*work)
        assert [answer.usage.completion_tokens for answer in done] == [40] * 12
        assert len(await pids(engine)) == 2

        # An actor that cannot be taken in is not kept.
        made = []

        async def refused(name: str, link: Any) -> None:
            made.append(link)
            raise LookupError(name)

        with monkeypatch.context() as patched:
            patched.setattr(engine, "add", refused)
            with pytest.raises(LookupError, match="replica-3"):
                await engine.scale(3)
        assert list(engine.links) == ["replica-0", "replica-2"]
        with pytest.raises(ReplicaLost):
            await made[0].call("news")


async def test_a_lost_replica_goes_first(until: Until) -> None:
    async with RayEngine(replicas=2, actor_options=OPTIONS) as engine:
        os.kill((await pids(engine))["replica-0"], signal.SIGKILL)
        await until(lambda: list(engine.lost) == ["replica-0"])
        await engine.scale(1)
        assert list(engine.links) == ["replica-1"]
        assert (await engine.generate(PROMPT, max_tokens=4, ignore_eos=True)).text


async def test_sessions_and_pins(until: Until) -> None:
    script = [Said(tool_calls=[("look", {})]), "I saw it.", "Once more.", "The end of it."]
    model = ScriptedModel(script)
    async with RayEngine(model, replicas=2, actor_options=OPTIONS) as engine:
        async with engine.pin(PROMPT):
            await until(lambda: engine.stats().blocks_pinned > 0)
        await until(lambda: engine.stats().blocks_pinned == 0)
        # A session is one replica's, and computes each of its tokens once.
        known = 0
        look = {"name": "look", "parameters": {"type": "object", "properties": {}}}
        async with engine.session(system="Be brief.", tools=[look]) as chat:
            for turn in ("Look.", {"role": "tool", "content": "a cat"}, "And then?", "And then?"):
                usage = (await chat.send(turn)).usage
                # All full blocks of what was there; its last token was never computed.
                assert usage.cached_tokens >= (known - 1) // 16 * 16
                known = usage.prompt_tokens + usage.completion_tokens - 1
            await until(lambda: engine.stats().blocks_pinned > 0)
        await until(lambda: engine.stats().blocks_pinned == 0 and engine.stats().running == 0)
        # What is left is a cache that anybody may have.
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


async def test_what_cannot_be_opened() -> None:
    with pytest.raises(InvalidConfig, match="replicas=0"):
        RayEngine(replicas=0)
    with pytest.raises(InvalidConfig, match="routing='best'"):
        RayEngine(routing="best")  # type: ignore[arg-type]
    with pytest.raises(ModelLoadError, match="nowhere"):
        async with RayEngine("/nowhere", replicas=1, actor_options=OPTIONS):
            raise AssertionError("it opened")


def test_replicas_are_served() -> None:
    with served("--ray", "2") as (url, program):
        with openai.OpenAI(base_url=url, api_key="none") as client:
            (model,) = client.models.list()
            asked = {"model": model.id, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            whole = client.completions.create(**asked).choices[0].text
            parts = client.completions.create(**asked, stream=True)
            assert "".join(part.choices[0].text for part in parts if part.choices) == whole
            with pytest.raises(openai.BadRequestError, match="top_p"):
                client.completions.create(**asked, top_p=7.0)
        health = httpx2.get(url.replace("/v1", "/health"), timeout=120).json()
        assert health["engines"][model.id]["state"] == "open"
        program.send_signal(signal.SIGTERM)
        _, told = program.communicate(timeout=240)
        assert program.returncode == 0, told
