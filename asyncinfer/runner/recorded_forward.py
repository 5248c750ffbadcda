"""`RecordedForward`: the layers of a step with any rows, as one function of device memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import DeviceBatch, KVCache
from asyncinfer.layers import ForwardPass
from asyncinfer.models import Decoder
from asyncinfer.runner.accelerator import Memory
from asyncinfer.runner.input_batch import StepArrays
from asyncinfer.runner.slot_state import SlotState, Staging
from asyncinfer.sampling import TokenHistory
from asyncinfer.scheduler import RunnerSpec

__all__ = ["RecordedForward", "input_bytes", "row_sizes", "token_sizes"]

#: The inputs of a pass, in one allocation that is copied at once: for each token its place in the
#: history, its position, and the place of its KV in each group; for each row its slot, its length,
#: and its first query token, with the total after the last; for each token its adapter.
_DTYPES: Final = (*[torch.int64] * 3, *[torch.int32] * 4)

#: Query tokens of the largest recorded pass of any model, and tokens times the square of the hidden
#: size where that allows more. Above, a GPU takes longer for the layers than Python does to launch
#: them, and padding costs more than launches.
_MOST_TOKENS: Final = 1024
_MOST_PRODUCTS: Final = 1 << 33
_FEWEST_TOKENS: Final = 16
#: Rows of a small pass. Attention launches a program for each row that a pass has room for.
_FEW_ROWS: Final = 32
#: The alignment of each input in bytes.
_ALIGN: Final = 16


def token_sizes(most: int, hidden_size: int) -> list[int]:
    """Query tokens of the recorded passes, ascending: powers of two from 16 on, and the middle of
    two, up to 1024 or to what keeps a GPU busy in a model that narrow. The last is the smallest
    that holds `most`, where that is smaller."""
    largest = max(_MOST_TOKENS, _MOST_PRODUCTS // hidden_size**2)
    sizes = [_FEWEST_TOKENS]
    while sizes[-1] < most and (larger := _next_size(sizes[-1])) <= largest:
        sizes.append(larger)
    return sizes


def _next_size(size: int) -> int:
    power = 1 << (size.bit_length() - 1)
    return power * 3 // 2 if size == power and power >= 32 else 2 * power


def row_sizes(most: int) -> list[int]:
    """Decode rows of the recorded passes, ascending, and as many other rows: 32, then `most`."""
    return [_FEW_ROWS, most] if most > _FEW_ROWS else [most]


class RecordedForward:
    """The hidden states of prompt chunks, rows with drafts and decode rows, in one pass.

    A pass has room for as many decode rows as for others. Unused rows have no tokens. Unused tokens
    belong to a last row of length 0, for which nothing is read or written. The block tables are
    those of `SlotState`, which was sent before.

    Args:
        groups: the number of each cache's group; None: each is a group, in order.
        rows: most decode rows of a pass, and most others.
        tokens: most query tokens.
    """

    def __init__(
        self,
        accelerator: Memory,
        decoder: Decoder,
        kv: Sequence[KVCache],
        spec: RunnerSpec,
        state: SlotState,
        history: TokenHistory,
        *,
        groups: Sequence[int] | None = None,
        rows: int,
        tokens: int,
        adapters: AdapterPool | None = None,
    ) -> None:
        device = accelerator.device
        self._accelerator = accelerator
        self._decoder = decoder
        self._kv = kv
        self._block_size = spec.block_size
        self._state = state
        self._history = history
        self._adapters = adapters
        self.most_rows = rows
        self._groups = len(spec.groups)
        self._group_of = groups or range(len(kv))
        size = input_bytes(tokens, rows, self._groups)
        self._inputs = torch.zeros(size, dtype=torch.uint8, device=device)
        # Zero, because every launch expects zeros and leaves zeros.
        counters = rows * decoder.config.num_heads
        self._arrivals = torch.zeros(counters, dtype=torch.int32, device=device)
        #: `[tokens, hidden]` in the model's dtype: the result of the last pass.
        shape = (tokens, decoder.config.hidden_size)
        self.hidden = torch.zeros(shape, dtype=decoder.dtype, device=device)
        #: The same for the layers whose inputs a drafting head gets.
        self._captured = [torch.zeros_like(self.hidden) for _ in decoder.captures]

    def __call__(self, tokens: int, rows: int, adapted: bool) -> None:
        """Compute a pass whose inputs were sent by `send` with the same numbers."""
        places, positions, *_, of_tokens = self._parts(tokens, rows)
        lora = None
        if adapted and self._adapters is not None:
            lora = self._adapters.rows_on_device(of_tokens)
        one = self._decoder.begin(
            positions, self._kv, self._batches(tokens, rows, self._arrivals), lora
        )
        hidden = self._decoder.run(self._history.at(places), positions, one)
        self.hidden[:tokens].copy_(hidden)
        for kept, captured in zip(self._captured, one.captured, strict=True):
            kept[:tokens].copy_(captured)

    def passed(self, tokens: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, ForwardPass]:
        """The inputs of a predictor after such a pass, padding included: positions int64
        `[tokens]`, hidden states, and a pass over the same rows."""
        positions = self._parts(tokens, rows)[1]
        one = self._decoder.begin(positions, self._kv, self._batches(tokens, rows, None))
        one.captured.extend(kept[:tokens] for kept in self._captured)
        return positions, self.hidden[:tokens], one

    def _batches(self, tokens: int, rows: int, arrivals: torch.Tensor | None) -> list[DeviceBatch]:
        """The rows of a pass, for each cache."""
        _, _, mapping, slots, lengths, starts, _ = self._parts(tokens, rows)
        tables = self._state.tables.index_select(0, slots)
        return [
            DeviceBatch(
                block_tables=tables[:, group],
                seq_lens=lengths,
                query_starts=starts,
                slot_mapping=mapping[group * tokens : (group + 1) * tokens],
                block_size=self._block_size,
                decode_rows=rows,
                arrivals=arrivals,
            )
            for group in self._group_of
        ]

    def send(self, arrays: StepArrays | None, tokens: int, rows: int, staging: Staging) -> None:
        """Copy the inputs of a pass of this size to the device, on the current stream. None: the
        pass has no rows."""
        here, inputs = self._staged(staging, tokens, rows)
        places, positions, mapping, slots, lengths, starts, of_tokens = inputs
        count = 0 if arrays is None else len(arrays.positions)
        padding = self._state.padding
        places[count:], positions[count:] = padding * self._history.capacity, 0
        mapping = mapping.reshape(self._groups, tokens)
        mapping[:, count:] = -1
        slots[:], lengths[:], starts[:], of_tokens[:] = padding, 0, count, -1
        starts[-1] = tokens
        if arrays is not None:
            places[:count] = self._history.places(arrays.token_slots, arrays.positions)
            positions[:count] = arrays.positions
            mapping[:, :count] = arrays.slot_mapping
            row_slots = arrays.token_slots[arrays.query_starts[:-1]]
            decode, others = arrays.decode_rows, len(row_slots) - arrays.decode_rows
            for first, part in ((0, slice(decode)), (rows, slice(decode, None))):
                end = first + len(row_slots[part])
                slots[first:end] = row_slots[part]
                lengths[first:end] = arrays.seq_lens[part]
            starts[:rows] = decode
            starts[:decode] = arrays.query_starts[:decode]
            starts[rows : rows + others] = arrays.query_starts[decode:-1]
            if arrays.adapters is not None:
                of_tokens[:count] = arrays.adapters
        self._inputs[: len(here)].copy_(here, non_blocking=True)

    def _parts(self, tokens: int, rows: int) -> list[torch.Tensor]:
        """The inputs on the device."""
        return [
            self._inputs[start:end].view(dtype)
            for (start, end), dtype in zip(
                _layout(tokens, rows, self._groups), _DTYPES, strict=True
            )
        ]

    def _staged(
        self, staging: Staging, tokens: int, rows: int
    ) -> tuple[torch.Tensor, list[npt.NDArray[Any]]]:
        """Pinned memory for the inputs, and views of each of them."""
        layout = _layout(tokens, rows, self._groups)
        size = layout[-1][1]
        if staging.inputs is None or staging.inputs.numel() < size:
            staging.inputs = self._accelerator.pinned(size)
        memory = staging.inputs[:size]
        words = memory.numpy()
        widths = (np.int64 if dtype is torch.int64 else np.int32 for dtype in _DTYPES)
        return memory, [
            words[start:end].view(width) for (start, end), width in zip(layout, widths, strict=True)
        ]


def input_bytes(tokens: int, rows: int, groups: int) -> int:
    """Bytes of the inputs of a pass with room for so many tokens, and so many rows of each kind."""
    return _layout(tokens, rows, groups)[-1][1]


def _layout(tokens: int, rows: int, groups: int) -> list[tuple[int, int]]:
    """Where each input begins and ends, in bytes."""
    count = 2 * rows + 1
    numbers = (tokens, tokens, tokens * groups, count, count, count + 1, tokens)
    layout, start = [], 0
    for number, dtype in zip(numbers, _DTYPES, strict=True):
        end = start + number * dtype.itemsize
        layout.append((start, end))
        start = -(-end // _ALIGN) * _ALIGN
    return layout
