"""`RayEngine` ends the actors that it should end, and no others. Its cluster is a stand-in, which
needs no Ray."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from importlib.util import find_spec, module_from_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from remote.wire import Wire

from asyncinfer import InvalidConfig
from asyncinfer.testing import FakeModel

pytestmark = pytest.mark.anyio
OPTIONS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "buffer": 8}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Actor:
    """An actor in this process."""

    def __init__(self, replica: Any) -> None:
        self.wire = Wire(lambda: replica)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self.wire.call, method))


class Cluster:
    """What `RayEngine` asks of Ray."""

    def __init__(self) -> None:
        self.killed: list[Actor] = []

    def module(self) -> ModuleType:
        made = ModuleType("ray")
        for name in ("is_initialized", "cluster_resources", "remote", "kill"):
            setattr(made, name, getattr(self, name))
        return made

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {}

    def remote(self, cls: Any) -> Any:
        def make(*args: Any, **options: Any) -> Actor:
            return Actor(cls(*args, **options))

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)
        actor.wire.dead.set()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    errors = ModuleType("ray.exceptions")
    for name in ("RayActorError", "RayTaskError"):
        setattr(errors, name, type(name, (Exception,), {}))
    monkeypatch.setitem(sys.modules, "ray", made.module())
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    return made


@pytest.fixture
def engine(cluster: Cluster) -> Any:
    """One of two replicas, of a module that nobody else imports."""
    spec = find_spec("asyncinfer.integrations.ray")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    return module.RayEngine(FakeModel(), replicas=2, block_size=4)


async def tokens(stream: Any) -> int:
    return sum([len(chunk.token_ids) async for chunk in stream])


async def test_two_calls_that_scale_down_end_one_actor(engine: Any, cluster: Cluster) -> None:
    async with engine:
        newest = engine.links["replica-1"].actor
        streams = [engine.stream("hello", **OPTIONS) for _ in range(4)]
        for stream in streams:
            await stream.__aenter__()
        scaling = [asyncio.ensure_future(engine.scale(1, drain_timeout=60.0)) for _ in range(2)]
        assert await asyncio.gather(*map(tokens, streams)) == [400] * 4
        await asyncio.gather(*scaling)
        assert cluster.killed == [newest]
        assert list(engine.links) == ["replica-0"]
    assert len(cluster.killed) == 2


async def test_calls_that_scale_take_effect_in_turns(engine: Any, cluster: Cluster) -> None:
    async with engine:
        await asyncio.gather(engine.scale(3), engine.scale(1), engine.scale(2))
        assert list(engine.links) == ["replica-0", "replica-3"]
        assert len(cluster.killed) == 2
        assert (await engine.generate("hello", max_tokens=3)).usage.completion_tokens == 3


async def test_a_removal_ends_the_actor_once_it_is_done(engine: Any, cluster: Cluster) -> None:
    async with engine:
        newest = engine.links["replica-1"].actor
        streams = [engine.stream("hello", **OPTIONS) for _ in range(2)]
        for stream in streams:
            await stream.__aenter__()
        removing = asyncio.ensure_future(engine.remove("replica-1", drain_timeout=60.0))
        await asyncio.sleep(0)
        # Another call does not end it.
        with pytest.raises(InvalidConfig, match="leaving already"):
            await engine.scale(1)
        assert not cluster.killed
        assert await asyncio.gather(*map(tokens, streams)) == [400] * 2
        await removing
        assert cluster.killed == [newest]
        await engine.scale(1)
        assert cluster.killed == [newest]


async def test_a_removal_that_is_cancelled_ends_the_actor(engine: Any, cluster: Cluster) -> None:
    async with engine:
        streams = [engine.stream("hello", **OPTIONS) for _ in range(2)]
        for stream in streams:
            await stream.__aenter__()
        scaling = asyncio.ensure_future(engine.scale(1, drain_timeout=60.0))
        await asyncio.sleep(0)
        scaling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scaling
        assert len(cluster.killed) == 1
        assert list(engine.links) == ["replica-0"]
        for stream in streams:
            await stream.aclose()
