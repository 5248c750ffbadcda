"""Measurements of the engine, one module per question; `asyncinfer bench` prints them."""

from asyncinfer.bench.accuracy import (
    AccuracyOptions,
    AccuracyResult,
    Perplexity,
    measure_accuracy,
)
from asyncinfer.bench.adapters import (
    AdapterOptions,
    AdapterResult,
    AdapterTurn,
    measure_adapters,
)
from asyncinfer.bench.agents_trace import agents_trace
from asyncinfer.bench.cache import BLOCKS, CacheOptions, CacheResult, measure_cache
from asyncinfer.bench.cache_table import cache_tables, hybrid_table
from asyncinfer.bench.cache_trace import read_trace
from asyncinfer.bench.checkout import from_checkout
from asyncinfer.bench.company import CompanyOptions, CompanyResult, measure_company
from asyncinfer.bench.compare import Change, changes, differences
from asyncinfer.bench.constrained import (
    ConstrainedOptions,
    ConstrainedResult,
    measure_constrained,
)
from asyncinfer.bench.environment import Environment
from asyncinfer.bench.host import HostOptions, HostResult, measure_host
from asyncinfer.bench.http import HttpOptions, HttpResult, measure_http
from asyncinfer.bench.lag import FAKE_MODELS, LagOptions, LagResult, measure_lag
from asyncinfer.bench.load import LoadOptions, LoadResult, measure_load
from asyncinfer.bench.loops import LOOPS, available_loops
from asyncinfer.bench.pace import PaceOptions, PaceResult, measure_pace
from asyncinfer.bench.peers import PEERS, installed_peers, parse_peers
from asyncinfer.bench.plots import check_plot, save_plot
from asyncinfer.bench.plugins import PluginOptions, PluginResult, measure_plugins
from asyncinfer.bench.quantized import (
    QuantizedOptions,
    QuantizedResult,
    QuantizedRow,
    measure_quantized,
)
from asyncinfer.bench.record import BenchError, Figure, Record
from asyncinfer.bench.route import RouteOptions, RouteResult, RouteRun, measure_route
from asyncinfer.bench.serve import measure_serve
from asyncinfer.bench.serve_options import ServeOptions
from asyncinfer.bench.serve_result import ServeResult
from asyncinfer.bench.soak import SoakOptions, SoakResult, measure_soak
from asyncinfer.bench.speculate import (
    SpeculateOptions,
    SpeculateResult,
    measure_speculate,
)
from asyncinfer.bench.tables import (
    change_table,
    difference_table,
    environment_line,
    record_tables,
)
from asyncinfer.bench.workloads import RANDOM, SHIPPED, WORKLOADS, Workload

__all__ = [
    "BLOCKS",
    "FAKE_MODELS",
    "LOOPS",
    "PEERS",
    "RANDOM",
    "SHIPPED",
    "WORKLOADS",
    "AccuracyOptions",
    "AccuracyResult",
    "AdapterOptions",
    "AdapterResult",
    "AdapterTurn",
    "BenchError",
    "CacheOptions",
    "CacheResult",
    "Change",
    "CompanyOptions",
    "CompanyResult",
    "ConstrainedOptions",
    "ConstrainedResult",
    "Environment",
    "Figure",
    "HostOptions",
    "HostResult",
    "HttpOptions",
    "HttpResult",
    "LagOptions",
    "LagResult",
    "LoadOptions",
    "LoadResult",
    "PaceOptions",
    "PaceResult",
    "Perplexity",
    "PluginOptions",
    "PluginResult",
    "QuantizedOptions",
    "QuantizedResult",
    "QuantizedRow",
    "Record",
    "RouteOptions",
    "RouteResult",
    "RouteRun",
    "ServeOptions",
    "ServeResult",
    "SoakOptions",
    "SoakResult",
    "SpeculateOptions",
    "SpeculateResult",
    "Workload",
    "agents_trace",
    "available_loops",
    "cache_tables",
    "change_table",
    "changes",
    "check_plot",
    "difference_table",
    "differences",
    "environment_line",
    "from_checkout",
    "hybrid_table",
    "installed_peers",
    "measure_accuracy",
    "measure_adapters",
    "measure_cache",
    "measure_company",
    "measure_constrained",
    "measure_host",
    "measure_http",
    "measure_lag",
    "measure_load",
    "measure_pace",
    "measure_plugins",
    "measure_quantized",
    "measure_route",
    "measure_serve",
    "measure_soak",
    "measure_speculate",
    "parse_peers",
    "read_trace",
    "record_tables",
    "save_plot",
]
