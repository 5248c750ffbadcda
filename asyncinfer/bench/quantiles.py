"""`Quantiles`: what is kept of many samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from asyncinfer.bench.record import BenchError

__all__ = ["Quantiles"]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of at least one sample, in the samples' unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float
    #: Every percentile from 0 to 100, for plots.
    curve: tuple[float, ...]

    @classmethod
    def of(cls, samples: Iterable[float]) -> Quantiles:
        values = np.fromiter(samples, np.float64)
        if not values.size:
            raise BenchError("nothing was measured: the run was too short")
        curve = np.percentile(values, np.arange(101))
        return cls(
            count=int(values.size),
            mean=float(values.mean()),
            p50=float(curve[50]),
            p90=float(curve[90]),
            p99=float(curve[99]),
            max=float(curve[100]),
            curve=tuple(curve.tolist()),
        )
