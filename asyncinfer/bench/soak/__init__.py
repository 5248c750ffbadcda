"""`asyncinfer bench soak`: load over a long time, and what it leaves behind."""

from asyncinfer.bench.soak.plot import plot_soak
from asyncinfer.bench.soak.run import SoakOptions, SoakResult, measure_soak

__all__ = ["SoakOptions", "SoakResult", "measure_soak", "plot_soak"]
