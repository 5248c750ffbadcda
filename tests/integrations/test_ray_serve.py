"""Replicas behind Ray Serve on this machine. It takes a minute, and needs `asyncinfer[ray]`, which
the other tests do not install."""

from __future__ import annotations

import asyncio
import os
import signal
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import httpx2
import openai
import pytest

HAS_SERVE = find_spec("ray") is not None and find_spec("fastapi") is not None
if HAS_SERVE:
    with warnings.catch_warnings():
        # Ray Serve's own modules use what pydantic is about to remove.
        warnings.simplefilter("ignore")
        import ray
        from pydantic import ValidationError
        from ray import serve

        from asyncinfer.integrations.ray_serve import ServeConfig, build_app

pytestmark = [
    pytest.mark.skipif(not HAS_SERVE, reason='needs pip install "asyncinfer[ray]"'),
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]

PORT = 18_297
HEALTH = f"http://127.0.0.1:{PORT}/llm/health"
OPEN = {"status": "ok", "engines": {"coder": {"state": "open", "reasons": []}}}
#: Seconds that a wait may take before the test fails.
LONG = 120


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=1 << 27,
    )
    serve.start(http_options={"port": PORT})
    config = ServeConfig(
        replicas=2,
        actor_options={"num_cpus": 0},
        name="coder",
        keys={"secret": {"cache_scope": "mine", "max_requests": 8}},
        engine={"max_context": 2048},
        deployment={"ray_actor_options": {"num_cpus": 0}},
    )
    serve.run(build_app(config), route_prefix="/llm")
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{PORT}/llm/v1"
    async with openai.AsyncOpenAI(
        base_url=url, api_key="secret", timeout=LONG, max_retries=0
    ) as made:
        yield made


async def metric(name: str) -> float:
    """A sum over the replicas of what `/metrics` tells."""
    async with httpx2.AsyncClient(timeout=LONG) as http:
        url = f"http://127.0.0.1:{PORT}/llm/metrics"
        lines = (await http.get(url, headers={"x-api-key": "secret"})).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


async def seen(name: str, wanted: Callable[[float], bool]) -> None:
    """Wait until a figure is as wanted: replicas tell theirs now and then."""
    with anyio.fail_after(LONG):
        while not wanted(await metric(name)):  # each asks anew over a socket
            await anyio.sleep(0.05)


def replica_processes() -> list[int]:
    """Processes of replicas, which Ray names after their class."""
    lines = {
        int(file.parent.name): file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline")
    }
    return [pid for pid, line in lines.items() if line.startswith(b"ray::Replica")]


async def length(stream: Any) -> int:
    return sum([1 async for event in stream if event.choices and event.choices[0].text])


async def test_an_application_of_serve(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "coder", "temperature": 0}
    prompt = "def add(a, b):\n    return a + b\n\n\n" * 3
    told = await client.completions.with_raw_response.create(**asked, prompt=prompt, max_tokens=8)
    whole = told.parse()
    # One id, and none of Serve's beside it.
    assert "," not in told.headers["x-request-id"]
    # What is streamed comes token by token, from the replica that has the prefix.
    usage = {"stream_options": {"include_usage": True}}
    stream = await client.completions.create(
        **asked, prompt=prompt, max_tokens=8, stream=True, extra_body=usage
    )
    events = [event async for event in stream]
    assert len(events) > 8
    assert "".join(event.choices[0].text for event in events if event.choices) == (
        whole.choices[0].text
    )
    assert events[-1].usage.prompt_tokens_details.cached_tokens > 0
    # Errors are those of the application.
    with pytest.raises(openai.BadRequestError, match="top_p"):
        await client.completions.create(**asked, prompt=prompt, top_p=7.0)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    endless = {**asked, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    late = {**endless, "extra_body": {"ignore_eos": True, "deadline": 0.3}}
    with pytest.raises(openai.InternalServerError) as failed:
        await client.completions.create(**late, prompt=prompt)
    assert failed.value.status_code == 504

    # Eight at once are what the key may have, and the next is refused at once.
    streams = [
        await client.completions.create(**endless, prompt=f"x{i} = ", stream=True) for i in range(8)
    ]
    with pytest.raises(openai.RateLimitError) as refused:
        await client.completions.create(**endless, prompt="y")
    assert "retry-after-ms" in refused.value.response.headers
    # Clients that leave are gone at the replicas, too, streamed or not.
    for stream in streams:
        await stream.close()
    await seen("asyncinfer_running", lambda count: count == 0)
    alone = asyncio.ensure_future(client.completions.create(**endless, prompt="z"))
    await seen("asyncinfer_running", lambda count: count == 1)
    alone.cancel()
    await seen("asyncinfer_running", lambda count: count == 0)


async def test_replicas_that_die_come_and_go(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "coder", "max_tokens": 400, "stream": True}
    asked["extra_body"] = {"ignore_eos": True}
    streams = [await client.completions.create(**asked, prompt=f"x{i} = ") for i in range(6)]
    found = replica_processes()
    assert len(found) == 2
    os.kill(found[0], signal.SIGKILL)
    ends = await asyncio.gather(*map(length, streams), return_exceptions=True)
    lost = [end for end in ends if isinstance(end, openai.APIError)]
    assert 0 < len(lost) < 6
    assert all("replica" in str(end) or "failed" in str(end) for end in lost)
    assert len(lost) + len([end for end in ends if isinstance(end, int)]) == 6
    # It comes back.
    async with httpx2.AsyncClient(timeout=LONG) as http:
        with anyio.fail_after(LONG):
            while (await http.get(HEALTH)).json() != OPEN:
                await anyio.sleep(0.05)
    # Down and up under load.
    handle = serve.get_app_handle("default")
    load = [
        asyncio.ensure_future(client.completions.create(**{**asked, "prompt": f"y{i} = "}))
        for i in range(6)
    ]
    await handle.scale.remote(1)
    await handle.scale.remote(2)
    done = await asyncio.gather(*[length(await each) for each in load])
    assert all(count > 0 for count in done)
    async with httpx2.AsyncClient(timeout=LONG) as http:
        assert (await http.get(HEALTH)).json() == OPEN


def test_bad_configs() -> None:
    with pytest.raises(ValidationError, match="replicas"):
        ServeConfig(replicas=0)
    with pytest.raises(ValidationError, match="modle"):
        ServeConfig(modle="smollm2")  # type: ignore[call-arg]
    # Texts, as `serve run` passes them.
    assert ServeConfig.model_validate({"replicas": "3"}).replicas == 3
