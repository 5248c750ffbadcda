"""Decides whether a CPU computes a model in bfloat16 or in float32."""

from __future__ import annotations

import operator
import time
from pathlib import Path
from typing import Final

import torch

from asyncinfer.config import EngineConfig
from asyncinfer.kernels import onednn
from asyncinfer.kernels.kept import keep, kept_path, read_kept
from asyncinfer.kernels.native import between_kernels, source_hash
from asyncinfer.machine import cpu_model
from asyncinfer.models import ModelConfig
from asyncinfer.quantization import make_linear
from asyncinfer.runner.device import use_cpu_threads

__all__ = ["computes_in_bfloat16"]

#: With fewer numbers in a matrix, products are too small a part of a step: where native code
#: computes what is between them, and where torch's operators do.
_SMALLEST, _SMALLEST_OF_TORCH = 1 << 18, 1 << 20
#: The longest side of the matrix that is measured.
_SIDE: Final = 2048
#: By how much bfloat16 must be faster for so many rows: one request, a batch, a chunk of a prompt.
#: A prompt may take a little longer where each token after it takes less time.
_FASTER: Final = {1: 1.1, 16: 1.1, 64: 0.8}
#: Repetitions, of which the fastest counts, since other programs only slow one down.
_REPEAT: Final = 9


def computes_in_bfloat16(
    model: ModelConfig, config: EngineConfig, folder: Path | None = None
) -> bool:
    """Whether this CPU decodes faster in bfloat16 than in float32, for a model whose weights are in
    bfloat16 and held unchanged.

    That is measured on a matrix of the model's size, in 20 to 200 ms, and kept in `folder` (None:
    the user's cache folder) for the processor, torch's version, the native code and the size.
    """
    if model.scheme is not None or config.weights != "plain" or config.deterministic:
        return False
    outputs, inputs = min(model.intermediate_size, _SIDE), min(model.hidden_size, _SIDE)
    if outputs * inputs < _SMALLEST or not onednn.multiplies_bfloat16():
        return False
    if outputs * inputs < _SMALLEST_OF_TORCH and between_kernels(torch.bfloat16) is None:
        return False
    key = {
        "processor": cpu_model(),
        "torch": torch.__version__,
        "native": source_hash(),
        "matrix": f"{outputs} x {inputs}",
    }
    path = kept_path("cpu-dtypes", key, folder)
    kept = read_kept(path, key)
    if kept is not None and isinstance(kept.get("bfloat16"), bool):
        return bool(kept["bfloat16"])
    ratios = _ratios(outputs, inputs)
    faster = all(map(operator.ge, ratios, _FASTER.values()))
    keep(path, key, bfloat16=faster, ratios=[round(ratio, 2) for ratio in ratios])
    return faster


def _ratios(outputs: int, inputs: int) -> list[float]:
    """How many times as fast bfloat16 is, for each row count of `_FASTER`. Measured on one thread,
    since several would wait for each other beside other programs."""
    threads = torch.get_num_threads()
    use_cpu_threads(1)
    try:
        return _measured(outputs, inputs)
    finally:
        use_cpu_threads(threads)


def _measured(outputs: int, inputs: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator, dtype=torch.float32)
    layers = {dtype: make_linear(weight.to(dtype)) for dtype in (torch.float32, torch.bfloat16)}
    found = []
    with torch.inference_mode():
        for rows in _FASTER:
            x = torch.randn(rows, inputs, generator=generator, dtype=torch.float32)
            best = dict.fromkeys(layers, float("inf"))
            # In turns, so that a disturbance affects both.
            for _ in range(_REPEAT):
                for dtype, layer in layers.items():
                    given = x.to(dtype)
                    began = time.perf_counter()
                    layer(given)
                    best[dtype] = min(best[dtype], time.perf_counter() - began)
            found.append(best[torch.float32] / best[torch.bfloat16])
    return found
