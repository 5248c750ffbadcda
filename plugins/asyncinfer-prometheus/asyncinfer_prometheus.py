"""Metrics of an asyncinfer engine for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from threading import Lock
from typing import ClassVar, Final
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from asyncinfer import EngineStats
from asyncinfer.protocols import (
    EngineEnded,
    EngineOpened,
    EventsDropped,
    Observer,
    ObserverEvent,
    RequestEnded,
    StepTaken,
)

__all__ = ["Prometheus"]

#: Upper bounds in seconds: of whole requests and first tokens, and between two tokens.
REQUEST: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
)

#: Metric -> field of `EngineStats`, help text.
COUNTERS: Final = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts taken in."),
    "cached_prompt_tokens": ("cached_tokens", "Of these, tokens found in the prefix cache."),
    "generated_tokens": ("generated_tokens", "Tokens drawn."),
    "preemptions": ("preemptions", "Requests that gave their blocks back for a while."),
    "steps": ("steps", "Decode steps."),
    "refused_requests": ("refused", "Requests refused because the engine was full."),
}
#: Metric -> label, field of `_Series`, help text.
LABELLED: Final = {
    "requests": ("outcome", "outcomes", "Requests that ended."),
    "answers": ("finish_reason", "reasons", "Answers that are complete."),
    "request_errors": ("error", "errors", "Errors that ended requests."),
}
#: Metric -> field of `_Series`, help text.
HISTOGRAMS: Final = {
    "queue_seconds": ("queued", "From submission to the first step."),
    "time_to_first_token_seconds": ("first_token", "From submission to the first token."),
    "inter_token_seconds": ("between_tokens", "Between two tokens of a request."),
    "request_seconds": ("whole", "From submission to the end."),
}


class Prometheus(Observer):
    """Exports counters, gauges and histograms of an engine to Prometheus.

    Args:
        port: serve them on this port; None leaves that to the program, which has `registry`.
        address: of the interface that `port` is opened on.
        engine: label of every series, to tell several engines of one process apart.
        registry: where the metrics are; the library's own by default.
    """

    #: Times between tokens are those of steps.
    every_step: ClassVar[bool] = True

    def __init__(
        self,
        port: int | None = None,
        address: str = "127.0.0.1",
        engine: str = "",
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        # Any other label would fail each scrape of the whole registry. Names of files may have
        # lone surrogates.
        if not isinstance(engine, str):
            raise ValueError(f"engine={engine!r}: must be a string")
        if any("\ud800" <= char <= "\udfff" for char in engine):
            raise ValueError(f"engine={engine!r}: must be valid Unicode")
        self._engine = _exporter(registry).add(engine)
        try:
            self._server = None if port is None else start_http_server(port, address, registry)
        except BaseException:
            self._engine.open = False
            raise

    def observe(self, event: ObserverEvent) -> None:
        engine = self._engine
        match event:
            case StepTaken() | RequestEnded() | EventsDropped():
                engine.count(event)
            case EngineOpened():
                engine.stats = event.stats
            case EngineEnded():
                last = engine.stats()
                engine.stats = lambda: last

    def close(self) -> None:
        self._engine.open = False
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, seconds: Iterable[float]) -> None:
        for value in seconds:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        cumulative, found = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            cumulative += count
            found.append((bound, float(cumulative)))
        return found


@dataclass
class _Series:
    """What is known of one engine."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    queued: _Histogram = field(default_factory=lambda: _Histogram(REQUEST))
    first_token: _Histogram = field(default_factory=lambda: _Histogram(REQUEST))
    between_tokens: _Histogram = field(default_factory=lambda: _Histogram(TOKEN))
    whole: _Histogram = field(default_factory=lambda: _Histogram(REQUEST))

    def end(self, event: RequestEnded) -> None:
        self.outcomes[event.outcome] += 1
        self.reasons.update(reason for reason in event.finish_reasons if reason is not None)
        if event.error is not None:
            self.errors[event.error] += 1
        self.queued.add([event.timings.queued])
        if event.usage.completion_tokens:
            self.first_token.add([event.timings.ttft])
        self.whole.add([event.timings.total])


class _Engine:
    """One engine: its observer writes, a scrape reads."""

    def __init__(self) -> None:
        #: While it is, no other may have the label; what it counted stays for later scrapes.
        self.open = True
        self.stats: Callable[[], EngineStats] = EngineStats
        self._series = _Series()
        self._lock = Lock()

    def count(self, event: StepTaken | RequestEnded | EventsDropped) -> None:
        with self._lock:
            match event:
                case StepTaken():
                    self._series.between_tokens.add(event.gaps)
                case RequestEnded():
                    self._series.end(event)
                case EventsDropped():
                    self._series.dropped += event.count

    def series(self) -> _Series:
        """As they are now."""
        with self._lock:
            return deepcopy(self._series)


class _Exporter(Collector):
    """All engines of one registry, so that each metric is there once."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._lock = Lock()

    def add(self, label: str) -> _Engine:
        with self._lock:
            if label in self._engines and self._engines[label].open:
                raise ValueError(f"engine={label!r}: another open engine has this label")
            engine = self._engines[label] = _Engine()
            return engine

    def describe(self) -> Iterable[Metric]:
        # Nothing: the registry need not collect in order to know the names.
        return ()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            engines = list(self._engines.items())
        found = [(label, engine.series(), engine.stats()) for label, engine in engines]
        for name, (attribute, text) in COUNTERS.items():
            metric = CounterMetricFamily(f"asyncinfer_{name}", text, labels=["engine"])
            for label, _, stats in found:
                metric.add_metric([label], getattr(stats, attribute))
            yield metric
        for name, (kind, attribute, text) in LABELLED.items():
            metric = CounterMetricFamily(f"asyncinfer_{name}", text, labels=["engine", kind])
            for label, series, _ in found:
                for value, count in getattr(series, attribute).items():
                    metric.add_metric([label, value], count)
            yield metric
        for name, text, states in (
            ("held_requests", "Requests in the engine.", _requests),
            ("kv_blocks", "KV blocks, by what they hold.", _blocks),
            ("kv_window_pages", "The same of layers that see a window.", _window_pages),
            ("kv_state_pages", "The same of layers that keep a state.", _state_pages),
        ):
            metric = GaugeMetricFamily(f"asyncinfer_{name}", text, labels=["engine", "state"])
            for label, _, stats in found:
                for state, count in states(stats).items():
                    metric.add_metric([label, state], count)
            yield metric
        for name, (attribute, text) in HISTOGRAMS.items():
            metric = HistogramMetricFamily(f"asyncinfer_{name}", text, labels=["engine"])
            for label, series, _ in found:
                histogram = getattr(series, attribute)
                metric.add_metric([label], buckets=histogram.buckets(), sum_value=histogram.total)
            yield metric
        text = "Events that the exporter was too slow for."
        metric = CounterMetricFamily("asyncinfer_dropped_events", text, labels=["engine"])
        for label, series, _ in found:
            metric.add_metric([label], series.dropped)
        yield metric


def _requests(stats: EngineStats) -> dict[str, int]:
    return {"running": stats.running, "waiting": stats.waiting, "paused": stats.paused}


def _blocks(stats: EngineStats) -> dict[str, int]:
    used = stats.blocks_total - stats.blocks_free - stats.blocks_cached
    return {"free": stats.blocks_free, "cached": stats.blocks_cached, "used": used}


def _window_pages(stats: EngineStats) -> dict[str, int]:
    free, cached = stats.window_pages_free, stats.window_pages_cached
    return {"free": free, "cached": cached, "used": stats.window_pages_total - free - cached}


def _state_pages(stats: EngineStats) -> dict[str, int]:
    free, cached = stats.state_pages_free, stats.state_pages_cached
    return {"free": free, "cached": cached, "used": stats.state_pages_total - free - cached}


_exporters: WeakKeyDictionary[CollectorRegistry, _Exporter] = WeakKeyDictionary()
_exporters_lock = Lock()


def _exporter(registry: CollectorRegistry) -> _Exporter:
    with _exporters_lock:
        if registry not in _exporters:
            exporter = _Exporter()
            registry.register(exporter)
            _exporters[registry] = exporter
        return _exporters[registry]
