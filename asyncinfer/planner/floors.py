"""The least time a step can take, from the bytes it moves and the arithmetic it does.

A decode step takes `max(weight bytes / bandwidth, 2 * parameters * batch / arithmetic)` and, since
attention waits for what comes before it, `batch * tokens * KV bytes / bandwidth` on top; `tokens`
are those of the context and the new one. An embedding is looked up, not read, unless it is the head
too. A prefill is arithmetic: two operations per parameter of the layers and token, two per element
of a query and of its answer for each key it attends to, and the head once. This is the roofline of
Williams, Waterman and Patterson (2009), with a ceiling for each part.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncinfer.planner.size import ModelSize

__all__ = ["Floor", "Speed", "Storage", "decode_floor", "prefill_floor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a GPU does at most."""

    #: Bytes a second.
    bandwidth: float
    #: Operations a second in the dtype of the model.
    flops: float
    #: The same for the layers' matrices; None: as `flops`.
    linear_flops: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Bytes per number."""

    #: Embedding, head, norms and biases.
    weights: float = 2.0
    #: The layers' matrices, experts among them; scales included.
    linear: float = 2.0
    #: Keys and values; scales included.
    kv: float = 2.0

    def weight_bytes(self, size: ModelSize) -> int:
        """Bytes of all weights in memory."""
        small = size.linear + size.experts
        return round(self.weights * (size.parameters - small) + self.linear * small)

    def streamed_bytes(self, size: ModelSize, tokens: int) -> float:
        """Bytes of the weights that a step of `tokens` tokens reads."""
        linear = size.linear + size.experts * size.experts_read(tokens)
        return self.weights * (size.head_parameters + size.other) + self.linear * linear

    def kv_bytes_per_token(self, size: ModelSize) -> int:
        """Bytes of the keys and values of one token, over all layers."""
        return self.kv_bytes(sum(size.kv_elements))

    def kv_bytes(self, elements: int) -> int:
        """Bytes of so many elements of keys and values."""
        return round(self.kv * elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least seconds of a step, by part."""

    #: Seconds of reading the weights.
    weights: float
    #: Seconds of arithmetic, at the same time.
    compute: float
    #: Seconds of reading and writing keys and values.
    kv: float

    @property
    def seconds(self) -> float:
        return max(self.weights, self.compute) + self.kv

    @property
    def compute_bound(self) -> bool:
        """Whether arithmetic takes longer than either way of moving bytes."""
        return self.compute > max(self.weights, self.kv)


def decode_floor(
    size: ModelSize, speed: Speed, *, batch: int, context: int, storage: Storage | None = None
) -> Floor:
    """The floor of a decode step: one token for each of `batch` sequences that have `context`
    tokens behind them."""
    storage = storage or Storage()
    matrices = 2 * batch * size.layer_parameters / (speed.linear_flops or speed.flops)
    head = 2 * batch * size.head_parameters / speed.flops
    return Floor(
        weights=storage.streamed_bytes(size, batch) / speed.bandwidth,
        compute=matrices + head,
        kv=storage.kv_bytes(batch * size.kv_read(context + 1)) / speed.bandwidth,
    )


def prefill_floor(
    size: ModelSize, speed: Speed, *, tokens: int, storage: Storage | None = None
) -> Floor:
    """The floor of a prompt of `tokens` tokens with nothing cached, until its first logits."""
    storage = storage or Storage()
    matrices = 2 * tokens * size.layer_parameters / (speed.linear_flops or speed.flops)
    attention = 2 * size.multiplied(tokens) / speed.flops
    head = 2 * size.head_parameters / speed.flops
    # Keys and values are written while the arithmetic goes on.
    moved = storage.streamed_bytes(size, tokens) + tokens * storage.kv_bytes_per_token(size)
    return Floor(
        weights=moved / speed.bandwidth,
        compute=matrices + attention + head,
        kv=0.0,
    )
