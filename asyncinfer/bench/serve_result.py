"""The results of `asyncinfer bench serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from asyncinfer.bench.quantiles import Quantiles
from asyncinfer.bench.record import Figure

__all__ = ["Column", "Interference", "ModelResult", "ServeResult"]


@dataclass(frozen=True, slots=True)
class Interference:
    """A workload beside programs that keep half of the cores busy. Rates in tokens a second."""

    rates: tuple[float, ...]
    peer_rates: Mapping[str, tuple[float, ...]]
    #: The engine's rates on one thread and without busy programs, a bound for `rates`.
    one_thread_rates: tuple[float, ...]

    @property
    def one_thread_ratio(self) -> float:
        return median(self.rates) / median(self.one_thread_rates)


@dataclass(frozen=True, slots=True)
class Column:
    """One workload on one model. Rates are tokens a second, in the order of repetitions."""

    name: str
    title: str
    rates: tuple[float, ...]
    #: Rates by the peer's name.
    peer_rates: Mapping[str, tuple[float, ...]]
    interference: Interference | None
    #: Milliseconds of all repetitions.
    ttft: Quantiles
    itl: Quantiles | None
    #: Prompt tokens found in the prefix cache, per repetition.
    cached_tokens: int
    #: Tokens a second if only the model's matrix products took time, on this machine.
    ceiling: float

    @property
    def rate(self) -> float:
        return median(self.rates)

    def figures(self, model: str) -> list[Figure]:
        title = f"{model}: {self.title}"
        found = [Figure(title, self.rate, "tokens/s", "higher")]
        found += _over(title, self.rate, self.peer_rates)
        share = 100 * self.rate / self.ceiling
        found.append(Figure(f"{title}, share of the products alone", share, "%", "higher"))
        found.append(Figure(f"{title}, TTFT p50", self.ttft.p50, "ms", "lower"))
        if self.itl is not None:
            found.append(Figure(f"{title}, ITL p50", self.itl.p50, "ms", "lower"))
            found.append(Figure(f"{title}, ITL p99", self.itl.p99, "ms", "lower"))
        if self.interference is not None:
            rate, title = median(self.interference.rates), f"{title}, beside busy programs"
            found.append(Figure(title, rate, "tokens/s", "higher"))
            name = f"{title}, over one thread alone"
            if self.interference.one_thread_rates:
                found.append(Figure(name, self.interference.one_thread_ratio, "x", "higher", 0.9))
            found += _over(title, rate, self.interference.peer_rates)
        return found


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model."""

    model: str
    columns: tuple[Column, ...]
    #: Versions by the peer's name.
    peer_versions: Mapping[str, str]
    #: Peers that failed or took too long in a turn, and took no further ones -> why.
    not_measured: Mapping[str, str]
    #: Lateness in milliseconds of a task that slept for one, beside 16 streams and beside none.
    lag: Quantiles
    idle_lag: Quantiles

    def column(self, name: str) -> Column | None:
        return next((column for column in self.columns if column.name == name), None)

    def figures(self) -> list[Figure]:
        found = [figure for column in self.columns for figure in column.figures(self.model)]
        one, sixteen = self.column("one"), self.column("sixteen")
        if one and sixteen:
            ratio = sixteen.rate / one.rate
            found.append(Figure(f"{self.model}: 16 at once over 1", ratio, "x", "higher", 5.0))
        found.append(Figure(f"{self.model}: event-loop lag p99", self.lag.p99, "ms", "lower", 5.0))
        return found


@dataclass(frozen=True, slots=True)
class ServeResult:
    """All models."""

    models: tuple[ModelResult, ...]

    def figures(self) -> tuple[Figure, ...]:
        return tuple(figure for result in self.models for figure in result.figures())


def _over(title: str, rate: float, peer_rates: Mapping[str, tuple[float, ...]]) -> list[Figure]:
    """The rate as a multiple of each peer's."""
    return [
        Figure(f"{title}, over {peer}", rate / median(rates), "x", "higher", 1.0)
        for peer, rates in peer_rates.items()
        if rates
    ]
