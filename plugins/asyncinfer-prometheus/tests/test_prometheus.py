"""What is scraped is what happened."""

from __future__ import annotations

import asyncio
import socket
import urllib.request
from typing import Any

import pytest
from asyncinfer_prometheus import Prometheus
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from asyncinfer import Engine, PluginError, RequestFailed, Stream, Timings, Usage
from asyncinfer.plugins import observers
from asyncinfer.protocols import EventsDropped, RequestEnded, StepTaken
from asyncinfer.testing import FakeModel, check_observer


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"asyncinfer_{name}", {"engine": "", **labels})


def test_it_keeps_the_rules() -> None:
    registry = CollectorRegistry()
    check_observer(lambda: Prometheus(port=0, registry=registry))


def test_events_are_counted() -> None:
    registry = CollectorRegistry()
    exporter = Prometheus(registry=registry)
    usage, timings = Usage(5, 0, 3), Timings(queued=0.02, ttft=0.2, total=2.0)
    exporter.observe(RequestEnded(1.0, "a", "finished", ("stop", "length"), usage, timings))
    exporter.observe(RequestEnded(2.0, "b", "finished", ("stop",), usage, timings))
    exporter.observe(RequestEnded(3.0, "c", "aborted", (None,)))
    exporter.observe(RequestEnded(4.0, "d", "failed", (None,), error="DeadlineExceeded"))
    exporter.observe(StepTaken(5.0, 3, 3, 3, (0.009, 0.01, 0.011)))
    exporter.observe(EventsDropped(6.0, 7))
    for outcome, count in {"finished": 2.0, "aborted": 1.0, "failed": 1.0}.items():
        assert value(registry, "requests_total", outcome=outcome) == count
    assert value(registry, "answers_total", finish_reason="stop") == 2
    assert value(registry, "answers_total", finish_reason="length") == 1
    assert value(registry, "request_errors_total", error="DeadlineExceeded") == 1
    assert value(registry, "dropped_events_total") == 7
    # A bound belongs to its bucket.
    assert value(registry, "inter_token_seconds_bucket", le="0.005") == 0
    assert value(registry, "inter_token_seconds_bucket", le="0.01") == 2
    assert value(registry, "inter_token_seconds_bucket", le="+Inf") == 3
    assert value(registry, "inter_token_seconds_sum") == pytest.approx(0.03)
    # Those without a token have no time to one.
    assert value(registry, "time_to_first_token_seconds_count") == 2
    assert value(registry, "time_to_first_token_seconds_sum") == pytest.approx(0.4)
    assert value(registry, "queue_seconds_count") == 4
    assert value(registry, "request_seconds_sum") == pytest.approx(4.0)


async def read_slowly(stream: Stream) -> None:
    async for _ in stream:
        await asyncio.sleep(0.01)


def test_it_is_valid_and_complete_for_an_engine() -> None:
    registry = CollectorRegistry()

    async def serve() -> tuple[Any, str]:
        async with Engine(FakeModel(), observers=[Prometheus(registry=registry)]) as engine:
            prompt = "x" * 100
            for _ in range(2):
                await engine.generate(prompt, max_tokens=4, ignore_eos=True)
            with pytest.raises(RequestFailed):
                await read_slowly(engine.stream("late", max_tokens=1000, deadline=1.0, buffer=2))
            during = generate_latest(registry).decode()
        return engine.stats(), during

    stats, during = asyncio.run(serve())
    families = {family.name: family for family in text_string_to_metric_families(during)}
    assert len(families) == 18
    assert all(family.documentation for family in families.values())
    (total,) = {
        sample.value
        for sample in families["asyncinfer_prompt_tokens"].samples
        if sample.name.endswith("_total")
    }
    assert total == stats.prompt_tokens
    for name, count in {
        "generated_tokens": stats.generated_tokens,
        "cached_prompt_tokens": stats.cached_tokens,
        "steps": stats.steps,
    }.items():
        assert value(registry, f"{name}_total") == count > 0
    blocks = {
        state: value(registry, "kv_blocks", state=state) for state in ("used", "cached", "free")
    }
    assert sum(map(float, blocks.values())) == stats.blocks_total  # type: ignore[arg-type]
    assert blocks["used"] == 0
    # The shipped model has no windows.
    assert value(registry, "kv_window_pages", state="free") == stats.window_pages_total == 0
    assert value(registry, "kv_state_pages", state="free") == stats.state_pages_total == 0
    assert value(registry, "held_requests", state="running") == 0
    # The engine is closed, and so everything was told.
    assert value(registry, "requests_total", outcome="finished") == 2
    assert value(registry, "answers_total", finish_reason="length") == 2
    assert value(registry, "request_errors_total", error="DeadlineExceeded") == 1
    # On a slow machine the last one may have ended before it began.
    begun = value(registry, "time_to_first_token_seconds_count")
    assert begun in (2, 3)
    assert value(registry, "inter_token_seconds_count") == stats.generated_tokens - begun


def test_several_engines_of_one_registry() -> None:
    registry = CollectorRegistry()
    first, second = Prometheus(registry=registry), Prometheus(engine="b", registry=registry)
    first.observe(EventsDropped(1.0, 1))
    second.observe(EventsDropped(1.0, 2))
    assert value(registry, "dropped_events_total") == 1
    assert value(registry, "dropped_events_total", engine="b") == 2
    assert generate_latest(registry).count(b"# TYPE asyncinfer_steps_total") == 1
    with pytest.raises(ValueError, match="engine='b': another open engine"):
        Prometheus(engine="b", registry=registry)
    second.close()
    # What it counted can be scraped until the next one begins.
    assert value(registry, "dropped_events_total", engine="b") == 2
    Prometheus(engine="b", registry=registry)
    assert value(registry, "dropped_events_total", engine="b") == 0


def test_a_label_is_a_text() -> None:
    with pytest.raises(ValueError, match=r"^engine=5: must be a string$"):
        Prometheus(engine=5, registry=CollectorRegistry())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^engine='.udcff': must be valid Unicode$"):
        Prometheus(engine="\udcff", registry=CollectorRegistry())


def test_it_serves_by_its_name() -> None:
    assert "prometheus" in observers.names()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = ("prometheus", {"port": port})
        with pytest.raises(PluginError, match=r"'prometheus' \(asyncinfer-prometheus .*cannot be"):
            asyncio.run(Engine.open(FakeModel(), observers=[busy]))

    async def serve() -> str:
        async with Engine(FakeModel(), observers=[busy]) as engine:
            await engine.generate("hello", max_tokens=4, ignore_eos=True)
            opened = await asyncio.to_thread(
                urllib.request.urlopen, f"http://127.0.0.1:{port}/metrics", None, 120
            )
            with opened:
                return str(opened.read(), "utf-8")

    for _ in range(2):
        text = asyncio.run(serve())
        assert 'asyncinfer_generated_tokens_total{engine=""} 4.0' in text
