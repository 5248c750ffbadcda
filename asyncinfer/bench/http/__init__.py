"""`asyncinfer bench http`: what the application and the in-process clients cost."""

from asyncinfer.bench.http.options import HttpOptions
from asyncinfer.bench.http.run import HttpResult, measure_http

__all__ = ["HttpOptions", "HttpResult", "measure_http"]
