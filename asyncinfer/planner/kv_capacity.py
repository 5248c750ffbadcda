"""How many sequences run at once in the memory for KV, divided as an engine divides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncinfer.cache import STATE_WINDOW, KVGroupSpec, steady_pages
from asyncinfer.config import MOST_RUNNING, EngineConfig
from asyncinfer.models import ModelConfig
from asyncinfer.runner.memory import pages_in_flight, share_out, share_states

__all__ = ["KVCapacity", "kv_capacity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCapacity:
    """How many sequences fit, and the bytes of keys and values that they hold."""

    #: How many run at once.
    sequences: int
    #: Layers that keep the KV of all tokens; other layers keep a window, a state or nothing.
    layers: tuple[int, ...]
    #: Bytes of each sequence: whole blocks, and the pages it decodes with in layers with a window
    #: or a state.
    per_sequence: int
    #: Bytes that layers with a window or a state hold for query tokens in flight, of all sequences
    #: together.
    in_flight: int


def kv_capacity(
    config: ModelConfig,
    engine: EngineConfig,
    layer_bytes: Sequence[int],
    free: Callable[[int], int],
    overlap: int,
    state_bytes: int = 0,
) -> KVCapacity:
    """For sequences that grow to `engine.max_context` tokens, in an engine whose `max_running` is
    how many of them fit.

    Args:
        layer_bytes: of a block of KV in each layer.
        free: bytes there are for KV in an engine with this `max_running`.
        overlap: most steps in flight.
        state_bytes: of a page of states, in a model that has them.
    """
    size, context = engine.block_size, engine.max_context or config.max_context
    width = -(-context // size)
    steady = 0 if config.window is None else steady_pages(config.window, size)
    in_flight = pages_in_flight(engine, overlap)

    if config.state_layers:
        steady = steady_pages(STATE_WINDOW, size)

    def shares(slots: int) -> tuple[KVGroupSpec, ...]:
        if config.state_layers:
            return share_states(free(slots), config, engine, layer_bytes, state_bytes, slots)
        if config.window is None:
            return ()
        return share_out(free(slots), context, config, layer_bytes, size, slots, in_flight)

    def run(count: int) -> bool:
        """Whether `count` sequences run at once."""
        divided = shares(count)
        if not divided:
            return free(count) >= count * width * sum(layer_bytes)
        blocks, pages = (group.num_pages for group in divided)
        # A sequence that runs alone takes smaller chunks if it must.
        chunks = min(in_flight, count * (width - steady)) if count > 1 else 0
        return blocks >= count * width and pages >= count * steady + chunks

    sequences = _most(run, MOST_RUNNING)
    chunks = min(in_flight, max(sequences, 1) * (width - steady))
    near = config.windowed_layers if shares(max(sequences, 1)) else ()
    far = tuple(layer for layer in config.kv_layers if layer not in near)
    page_bytes = sum(layer_bytes[layer] for layer in near) or state_bytes
    return KVCapacity(
        sequences=sequences,
        layers=far,
        per_sequence=width * sum(layer_bytes[layer] for layer in far) + steady * page_bytes,
        in_flight=chunks * page_bytes,
    )


def _most(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` for which `holds`, which is true of every smaller one."""
    low, high = 0, 1
    while high <= limit and holds(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
