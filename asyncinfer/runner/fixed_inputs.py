"""`FixedInputs`: the inputs of recorded layers, in tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.attention import (
    ContiguousKV,
    FixedChunk,
    FixedRows,
    KVCache,
    StateCache,
    begin_copy,
    reads_plain_pages,
)
from asyncinfer.kernels.native import ChunkKV, EndKernels, end_kernels
from asyncinfer.layers import ForwardPass
from asyncinfer.models import Decoder
from asyncinfer.runner.input_batch import StepArrays
from asyncinfer.scheduler import RunnerSpec

__all__ = ["MOST_CHUNK", "FixedInputs", "PromptChunk", "can_record"]

I64 = npt.NDArray[np.int64]

#: Tokens of a chunk that is recorded, at most: beside more of them, Python's part is short.
MOST_CHUNK: Final = 256


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """A chunk of a prompt that comes after the decode rows of a step."""

    copy: ContiguousKV
    cache: KVCache
    #: Decode rows before it.
    rows: int
    #: The position of its first token, and the number of its tokens.
    start: int
    tokens: int

    @classmethod
    def of(cls, arrays: StepArrays, number: int, cache: KVCache) -> PromptChunk | None:
        """The chunk that is a step's last row, with a copy of all keys before it; None where there
        is no memory for the copy. `number`: that of the cache's group."""
        if arrays.sequences is None:
            return None
        start, tokens, sequence = arrays.starts[-1], arrays.counts[-1], arrays.sequences[-1]
        end = start + tokens
        copy = cache.contiguous.kept((sequence,), end)
        if copy is None or not copy.holds(cache.num_layers, start):
            table = torch.from_numpy(arrays.block_tables[number][-1])
            prompt_len = end if arrays.prompt_lens is None else arrays.prompt_lens[-1]
            copy = begin_copy(cache, sequence, table, start, end, prompt_len)
        return None if copy is None else cls(copy, cache, arrays.decode_rows, start, tokens)

    @property
    def kv(self) -> ChunkKV:
        """What recorded calls need of it."""
        memory, size = self.copy.memory, self.cache.dtype.itemsize
        head_bytes = self.copy.capacity * self.cache.head_dim * size
        place = memory.data_ptr(), size * len(memory), head_bytes
        return ChunkKV(self.rows, self.tokens, self.start, *place)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Inputs of a step that differ from those of the one before."""

    #: int64 `[tokens]`, and int32 `[rows]`.
    positions: I64
    lengths: npt.NDArray[np.int32]
    #: By cache: see `_slots`.
    slots: list[I64]


class FixedInputs:
    """The inputs of decode rows, and of a chunk of a prompt after them, in tensors that stay where
    they are."""

    def __init__(
        self, decoder: Decoder, paged: Sequence[tuple[int, KVCache]], spec: RunnerSpec
    ) -> None:
        """`paged`: the caches, each with its group's number."""
        self._decoder = decoder
        self._paged = paged
        rows, config = spec.max_slots, decoder.config
        most = rows + MOST_CHUNK
        self._embedded = torch.empty(most, config.hidden_size, dtype=decoder.dtype)
        angles = decoder.angles(torch.zeros(most, dtype=torch.int64))
        self._angles = [tuple(each.contiguous().clone() for each in pair) for pair in angles]
        #: What each of them is looked up in; None where torch computes them.
        self._sources = _sources(decoder)
        self._tokens = np.zeros(most, np.int64)
        #: By cache. A table only grows, so that a later step's serves an earlier one of the same
        #: sequences, too.
        self._tables = [np.zeros((rows, spec.table_width), np.int32) for _ in paged]
        self._most_rows = rows
        #: What recorded calls read, and then what they will read in later steps.
        self._numbers = [self._made_numbers(most)]
        #: Where a chunk's tokens go in its copy, and the heads of rows in the results.
        heads = max((kv.storage.shape[3] for _, kv in paged), default=0)
        self._places = np.zeros(MOST_CHUNK * heads, np.int64)
        self._order = torch.arange(rows * config.num_heads)

    @property
    def kernels(self) -> EndKernels | None:
        """What looks up tokens' vectors and angles in recorded calls; None where torch computes
        some of them before these."""
        return None if self._sources is None else self._sources[0]

    def send(
        self,
        arrays: StepArrays,
        tokens: npt.NDArray[np.int32] | None,
        chunk: PromptChunk | None,
        place: int = 0,
    ) -> None:
        """Put the inputs of a step there: `tokens` `[tokens]`, None if the step before draws them.
        `place` is 0 for the next step. For one that `load` begins, behind others that are not
        computed yet, it is one that none of these has."""
        count, rows = len(arrays.positions), arrays.decode_rows
        # Nobody looks any more in recorded calls.
        if arrays.positions.max() >= self._decoder.max_context:
            last = self._decoder.max_context - 1
            raise IndexError(f"position {arrays.positions.max()} is not from 0 to {last}")
        numbers = self._numbers_of(place)
        numbers.positions[:count] = arrays.positions
        if tokens is not None:
            self._send_tokens(tokens)
        numbers.lengths[:rows] = arrays.seq_lens[:rows]
        caches = zip(self._paged, self._tables, numbers.slots, strict=True)
        for (number, kv), tables, slots in caches:
            given, mapping = arrays.block_tables[number], arrays.slot_mapping[number]
            tables[:rows, : given.shape[1]] = given[:rows]
            slots[:, : count * kv.storage.shape[3]] = _slots(kv, mapping)
            # As `GatheredAttention` does: a later step may read a block to its end.
            begun = _begun_blocks(kv.block_size, arrays, mapping)
            if len(begun):
                _clear(kv, begun)
        if chunk is not None:
            capacity, kv_heads = chunk.copy.capacity, chunk.cache.storage.shape[3]
            places = arrays.positions[rows:, None] + np.arange(0, kv_heads * capacity, capacity)
            self._places[: places.size] = places.ravel()

    def load(self, place: int, drawn: I64) -> None:
        """Record that a later step of the same decode rows begins: its inputs become those that
        recorded calls read, and its tokens are those that the step before has `drawn` `[rows]`."""
        kernels, rows = self.kernels, len(drawn)
        assert kernels is not None
        now, then = self._numbers[0], self._numbers_of(place)
        copies: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = [
            (self._tokens[:rows], drawn),
            (now.positions[:rows], then.positions[:rows]),
        ]
        copies.append((now.lengths[:rows], then.lengths[:rows]))
        for (_, kv), into, of in zip(self._paged, now.slots, then.slots, strict=True):
            count = rows * kv.storage.shape[3]
            copies += [(one[:count], other[:count]) for one, other in zip(into, of, strict=True)]
        for one, other in copies:
            kernels.copy(torch.from_numpy(one), torch.from_numpy(other))

    def _numbers_of(self, place: int) -> _Numbers:
        while place >= len(self._numbers):
            self._numbers.append(self._made_numbers(self._most_rows))
        return self._numbers[place]

    def _made_numbers(self, tokens: int) -> _Numbers:
        return _Numbers(
            np.zeros(tokens, np.int64),
            np.ones(self._most_rows, np.int32),
            [np.zeros((2, tokens * kv.storage.shape[3]), np.int64) for _, kv in self._paged],
        )

    def _send_tokens(self, tokens: npt.NDArray[np.int32]) -> None:
        vocab_size, count = self._decoder.config.vocab_size, len(tokens)
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            wrong = tokens.max() if tokens.max() >= vocab_size else tokens.min()
            raise IndexError(f"token {wrong} is not from 0 to {vocab_size - 1}")
        self._tokens[:count] = tokens
        if self._sources is None:
            self._compute(count)

    def _compute(self, count: int) -> None:
        """Put vectors and angles of so many tokens there, by torch."""
        given = self._tokens, self._numbers[0].positions
        tokens, positions = (torch.from_numpy(each[:count]) for each in given)
        self._embedded[:count].copy_(self._decoder.embedding(tokens, positions))
        for fixed, made in zip(self._angles, self._decoder.angles(positions), strict=True):
            for into, each in zip(fixed, made, strict=True):
                into[:count].copy_(each)

    def look_up(self, count: int) -> None:
        """Record that so many tokens' vectors and angles are looked up, if `send` does not compute
        them."""
        if self._sources is None:
            return
        kernels, tables = self._sources
        tokens = torch.from_numpy(self._tokens)
        positions = torch.from_numpy(self._numbers[0].positions)
        looked_up = [(self._embedded, tokens)]
        looked_up += [(each, positions) for pair in self._angles for each in pair]
        for (into, places), table in zip(looked_up, tables, strict=True):
            taken = kernels.take(into[:count], table, places[:count])
            assert taken

    def first(
        self, rows: int, longest: int, chunk: PromptChunk | None
    ) -> tuple[torch.Tensor, ForwardPass]:
        """The input of the first layer, and what all layers are given, for so many decode rows of
        at most `longest` tokens and a chunk."""
        attends: dict[int, FixedRows] = {}
        count = rows + (chunk.tokens if chunk else 0)
        scale = self._decoder.config.query_scale
        numbers = self._numbers[0]
        caches = zip(self._paged, self._tables, numbers.slots, strict=True)
        for (_, kv), tables, slots in caches:
            heads = kv.storage.shape[3]
            keys, values = (torch.from_numpy(each[: count * heads]) for each in slots)
            lengths = torch.from_numpy(numbers.lengths[:rows])
            given = torch.from_numpy(tables[:rows])
            fixed_chunk = None
            if chunk is not None:
                places = torch.from_numpy(self._places[: chunk.tokens * heads])
                order = self._order[: rows * self._decoder.config.num_heads]
                fixed_chunk = FixedChunk(kv, scale, chunk.copy, chunk.start, places, order)
            fixed = FixedRows(kv, scale, given, lengths, (keys, values), longest, fixed_chunk)
            attends |= dict.fromkeys(kv.layers, fixed)
        angles = [(cos[:count], sin[:count]) for cos, sin in self._angles]
        return self._embedded[:count], ForwardPass(angles, attends)


def _sources(decoder: Decoder) -> tuple[EndKernels, list[torch.Tensor]] | None:
    """Native code that looks up tokens' vectors and angles, with the tables of both: the vectors,
    and the cosines and sines of each rotation. None where there is more to do for one of them."""
    kernels, vectors = end_kernels(decoder.dtype), decoder.embedding.table
    angles = [each for each in decoder.angle_tables if each is not None]
    if kernels is None or vectors is None or len(angles) < len(decoder.angle_tables):
        return None
    tables = [vectors, *(side for each in angles for side in each.unbind())]
    plain = all(type(each) is torch.Tensor and each.is_contiguous() for each in tables)
    return (kernels, tables) if plain and vectors.dtype is decoder.dtype else None


def _clear(kv: KVCache, blocks: I64) -> None:
    """`KVCache.clear` on this thread alone: others may compute a step now."""
    for tensor in kv.tensors:
        numbers = tensor.view(torch.uint8).numpy()
        for block in blocks.tolist():
            numbers[:, :, block] = 0


def _begun_blocks(size: int, arrays: StepArrays, mapping: I64) -> I64:
    """int64 `[n]`: the blocks of which a step of a cache writes only the first tokens. `mapping`
    int64 `[tokens]` is `AttentionBatch.slot_mapping`."""
    last = arrays.query_starts[1:].astype(np.int64) - 1
    ends, starts = arrays.positions[last] + 1, np.array(arrays.starts)
    begun = (ends % size != 0) & (ends // size * size >= starts)
    blocks: I64 = mapping[last[begun]] // size
    return blocks


def _slots(kv: KVCache, mapping: I64) -> I64:
    """int64 `[2, tokens * kv_heads]`: where each token's heads lie in a layer's keys, and in its
    values, seen as `[2 * num_blocks * kv_heads * block_size, head_dim]`. `mapping` int64 `[tokens]`
    is `AttentionBatch.slot_mapping`."""
    _, _, blocks, kv_heads, size, _ = kv.storage.shape
    first = (mapping // size) * (kv_heads * size) + mapping % size
    keys = (first[:, None] + np.arange(0, kv_heads * size, size)).ravel()
    return np.stack((keys, keys + blocks * kv_heads * size))


def can_record(decoder: Decoder, kv: Sequence[KVCache | StateCache]) -> bool:
    """Whether layers of this model may be recorded: they are given nothing but angles, and
    attention to plain pages."""
    config = decoder.config
    rows = config.bidirectional, config.indexed, config.chunked_layers
    other = any((*rows, config.per_layer_inputs, config.temperatures, decoder.predictor))
    known = decoder.dtype in (torch.float32, torch.bfloat16)
    plain = known and decoder.device.type == "cpu"
    return plain and not other and all(isinstance(c, KVCache) and reads_plain_pages(c) for c in kv)
