"""`Gpu`: memory and speed of a GPU; `gpus.toml` is the table of known ones."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from asyncinfer.errors import InvalidRequest

__all__ = ["Gpu", "find_gpu", "gpus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Nominal figures of one GPU, without sparsity, and measured ones where there are any."""

    #: The name to ask for it by, such as "h200".
    name: str
    title: str
    #: Other names for it.
    also: tuple[str, ...] = ()
    #: Bytes.
    memory: float
    #: Bytes a second.
    bandwidth: float
    #: Operations a second of the matrix units in bfloat16 and float16.
    bf16: float
    #: The same in fp8; None: the GPU has no fp8.
    fp8: float | None = None
    #: Operations a second of the plain units, in float32.
    fp32: float
    source: str = ""
    #: What a copy and a bfloat16 product reached; None: not measured.
    measured_bandwidth: float | None = None
    measured_bf16: float | None = None


@cache
def gpus() -> Mapping[str, Gpu]:
    """The GPUs that are known, by name."""
    table = tomllib.loads(files("asyncinfer.planner").joinpath("gpus.toml").read_text("utf-8"))
    return MappingProxyType({name: _gpu(name, **row) for name, row in table.items()})


def find_gpu(name: str) -> Gpu:
    """The GPU of this name in any case, "RTX 4090" as well as "rtx-4090". `InvalidRequest` lists
    those that are known."""
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    for gpu in gpus().values():
        if wanted in (gpu.name, *gpu.also):
            return gpu
    raise InvalidRequest("gpu", name, f"must be one of {', '.join(gpus())}")


def _gpu(
    name: str,
    *,
    title: str,
    memory: float,
    bandwidth: float,
    bf16: float,
    fp32: float,
    source: str,
    also: Sequence[str] = (),
    fp8: float | None = None,
    measured: Mapping[str, Any] = MappingProxyType({}),
) -> Gpu:
    tera = 1e12
    return Gpu(
        name=name,
        title=title,
        also=tuple(also),
        memory=memory * 1e9,
        bandwidth=bandwidth * tera,
        bf16=bf16 * tera,
        fp8=None if fp8 is None else fp8 * tera,
        fp32=fp32 * tera,
        source=source,
        measured_bandwidth=measured["bandwidth"] * tera if measured else None,
        measured_bf16=measured["bf16"] * tera if measured else None,
    )
