"""How long the matrix products of a model's step take on this CPU, by how its weights are held."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from asyncinfer.models import ModelConfig, tensor_table
from asyncinfer.quantization import Linear, make_linear

__all__ = ["HELD", "ProductTimes", "product_times", "read_bandwidth"]

#: What weights are held as -> a layer's dtype, its storage, and the bits of a number. Scales are
#: left out: they add a hundredth to an eighth.
HELD: Final = {
    "float32": (torch.float32, "plain", 32),
    "bfloat16": (torch.bfloat16, "plain", 16),
    "int8": (torch.float32, "int8", 8),
    "int4": (torch.float32, "int4", 4),
}
_EXPERTS: Final = re.compile(r"layers\.\d+\.experts\.(?:up|down)\.weight")
#: Repetitions of a timing, of which the best counts: what else runs only makes one longer. The
#: first only warms up, and one that takes so many seconds is the last.
_REPEAT: Final = 3
_LONG: Final = 0.1
#: Bytes of the weights that are timed, more than most caches hold, and numbers of the largest.
_TIMED_BYTES, _LARGEST = 192 << 20, 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """All products of one step, of weights that are held as `held` names."""

    held: str
    #: Bytes of the matrices that a step of one token reads.
    bytes: int
    #: Rows, the tokens of a step -> seconds of its products.
    seconds: dict[int, float]

    def tokens_per_second(self, rows: int) -> float:
        """What a step of nothing but products would give."""
        return rows / self.seconds[rows]

    @property
    def bandwidth(self) -> float:
        """Bytes of weights a second in a step of one token."""
        return self.bytes / self.seconds[1]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A shape of weights, and how many of them a step reads."""

    outputs: int
    inputs: int
    count: int
    #: Experts of which a token takes `active`; 1 of 1 where there are none.
    experts: int = 1
    active: int = 1

    @property
    def numbers(self) -> int:
        """Numbers of all these matrices that a step of one token reads."""
        return self.outputs * self.inputs * self.count * self.active


def product_times(
    config: ModelConfig,
    rows: tuple[int, ...],
    told: Callable[[str], object] = lambda held: None,
    *,
    kinds: Iterable[str] = HELD,
) -> tuple[ProductTimes, ...]:
    """The products of steps of so many rows, without attention, norms and draws. A sample of the
    matrices is timed, of random numbers, which stands for the rest of their shape.

    Args:
        config: of the model.
        rows: the tokens of a step.
        told: called with each `held` before it is measured.
        kinds: of `HELD`, what weights are held as.
    """
    matrices = [*_matrices(config)]
    found = []
    with torch.inference_mode():
        for held in kinds:
            told(held)
            found.append(_timed(held, matrices, rows))
    return tuple(found)


def read_bandwidth() -> float:
    """Bytes a second that torch's threads read from a matrix: the better result of a sum, and of a
    product with a vector, which some libraries compute on one thread."""
    matrix, vector = torch.ones(_TIMED_BYTES // 4 // 4096, 4096), torch.ones(4096)
    with torch.inference_mode():
        return matrix.nbytes / min(_best(lambda: matrix.mv(vector)), _best(matrix.sum))


def _matrices(config: ModelConfig) -> Iterator[_Matrix]:
    """The matrices that a token is multiplied with, each shape once."""
    plain, of_experts = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    plain[config.vocab_size, config.hidden_size] += 1
    for name, packed in tensor_table(config).items():
        if name.startswith("layers.") and name.endswith(".weight") and len(packed.shape) > 1:
            outputs, inputs = packed.shape
            counter = of_experts if _EXPERTS.fullmatch(name) else plain
            counter[outputs, inputs] += 1
    for (outputs, inputs), count in plain.items():
        yield _Matrix(outputs, inputs, count)
    if config.experts is not None:
        experts, active = config.experts.count, config.experts.active
        for (outputs, inputs), count in of_experts.items():
            # The matrices of all experts lie below each other.
            yield _Matrix(outputs // experts, inputs, count, experts, active)


def _timed(held: str, matrices: list[_Matrix], rows: tuple[int, ...]) -> ProductTimes:
    dtype, storage, bits = HELD[held]
    size = sum(each.numbers for each in matrices) * bits // 8
    share = min(1.0, _TIMED_BYTES / size)
    seconds = dict.fromkeys(rows, 0.0)
    for each in matrices:
        outputs = min(each.outputs, max(64, _LARGEST // each.inputs))
        # As many of one shape as the sample has room for, so that no cache keeps them.
        used = max(1, math.floor(share * each.count * each.active))
        layers = [_layer(outputs, each.inputs, dtype, storage) for _ in range(used)]
        part = each.outputs / outputs
        for count in rows:
            # Rows are shared out among the experts that they need.
            read = min(each.experts, count * each.active)
            of_each = max(1, count * each.active // read)
            spent = _pass_seconds(layers, of_each, each.inputs, dtype)
            seconds[count] += spent / used * part * each.count * read
    return ProductTimes(held=held, bytes=size, seconds=seconds)


def _layer(outputs: int, inputs: int, dtype: torch.dtype, storage: str) -> Linear:
    return make_linear(torch.randn(outputs, inputs).mul_(0.02).to(dtype), storage=storage)


def _pass_seconds(layers: list[Linear], rows: int, inputs: int, dtype: torch.dtype) -> float:
    x = torch.randn(rows, inputs).to(dtype)

    def run() -> None:
        for layer in layers:
            layer(x)

    return _best(run)


def _best(run: Callable[[], object]) -> float:
    best = math.inf
    for turn in range(1 + _REPEAT):
        began = time.perf_counter()
        run()
        spent = time.perf_counter() - began
        if turn or spent >= _LONG:
            best = min(best, spent)
        if spent >= _LONG:
            break
    return best
