"""`asyncinfer bench http`: the cost of the application and the in-process clients."""

from asyncinfer.bench.http.options import HttpOptions
from asyncinfer.bench.http.run import HttpResult, measure_http

__all__ = ["HttpOptions", "HttpResult", "measure_http"]
