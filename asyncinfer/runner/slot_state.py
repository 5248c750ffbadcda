"""`SlotState`: the state of every slot that stays on the device between steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.runner.accelerator import Memory
from asyncinfer.runner.input_batch import integers

__all__ = ["SlotState", "Staging"]

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

#: Fewest changes of one transfer; fewer are padded with writes to an unused word.
_FEWEST = 32
#: Unused words at the beginning of the state, which padding changes are written to.
_NOWHERE = 2


class Staging:
    """Pinned memory for all that one step sends to the device. It is reused once the step is
    collected."""

    def __init__(self) -> None:
        #: Buffers for changes of the slots' state, by capacity.
        self.buffers: dict[int, tuple[torch.Tensor, I64, I32]] = {}
        #: A buffer for the inputs of a recorded pass, as large as the largest so far.
        self.inputs: torch.Tensor | None = None


class SlotState:
    """Positions, block tables of each KV group, the batch's rows, adapters and sampling options, on
    the device.

    The state is one flat array of 32-bit words with a copy on the host. The host notes the address
    of each word that it changes, and `send` transfers them in one copy and one scatter. Both are
    ordered by the stream, so a step in flight still sees the old words. The device itself advances
    positions; the host follows in `counted`, and sends only a position that differs.

    One slot more than `slots` is for padding rows (`padding`). Its position is -1.

    Args:
        slots, groups: how many.
        width: entries of a slot's block table in each group.
        rows: most rows of a batch.
        options: words per slot for the sampler.
    """

    def __init__(
        self,
        accelerator: Memory,
        slots: int,
        groups: int,
        width: int,
        rows: int,
        options: int,
    ) -> None:
        self._accelerator = accelerator
        self.padding = slots
        all_slots = slots + 1
        table_words = all_slots * groups * width
        sizes = (_NOWHERE, rows, all_slots, all_slots, all_slots * options, table_words)
        # Each part begins at an even word, so that it can hold 64-bit numbers.
        starts = np.concatenate(([0], np.cumsum([size + size % 2 for size in sizes])))
        (
            self._rows_at,
            self._positions_at,
            self._adapters_at,
            self._options_at,
            self._tables_at,
            total,
        ) = (int(start) for start in starts[1:])
        self._host: I32 = np.zeros(total, np.int32)
        self._device = torch.zeros(total, dtype=torch.int32, device=accelerator.device)

        def part(start: int, size: int) -> slice:
            return slice(start, start + size)

        rows_part = part(self._rows_at, rows)
        positions_part = part(self._positions_at, all_slots)
        adapters_part = part(self._adapters_at, all_slots)
        options_part = part(self._options_at, all_slots * options)
        tables_part = part(self._tables_at, table_words)
        #: On the host: int32 `[rows]`, `[slots + 1]`, `[slots + 1]`, `[slots + 1, options]`,
        #: `[slots + 1, groups, width]`.
        self.host_rows = self._host[rows_part]
        self.host_positions = self._host[positions_part]
        self.host_adapters = self._host[adapters_part]
        self.host_options = self._host[options_part].reshape(all_slots, options)
        self.host_tables = self._host[tables_part].reshape(all_slots, groups, width)
        #: The same on the device: each row's slot; each slot's next query position, adapter (-1 for
        #: none), options and block tables.
        self.rows = self._device[rows_part]
        self.positions = self._device[positions_part]
        self.adapters = self._device[adapters_part]
        self.options = self._device[options_part].view(all_slots, options)
        self.tables = self._device[tables_part].view(all_slots, groups, width)
        #: Where changes arrive on the device, by capacity: the whole memory, addresses, values.
        self._inboxes: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self.changed: list[I64] = []

        self.host_rows[:] = slots
        self.host_positions[slots] = -1
        self._note(self._rows_at + np.arange(rows))
        self._note(np.array([self._positions_at + slots]))
        self.host_adapters[:] = -1
        self._note(self._adapters_at + np.arange(all_slots))

    def touch_tables(self, group: int, slots: I64 | int, indices: I64) -> None:
        """Note that these entries of the group's tables have changed on the host."""
        _, groups, width = self.host_tables.shape
        self._note(self._tables_at + (slots * groups + group) * width + indices)

    def set_adapter(self, slot: int, adapter: int) -> None:
        """Set the slot's adapter, -1 for none."""
        if self.host_adapters[slot] != adapter:
            self.host_adapters[slot] = adapter
            self._note(np.array([self._adapters_at + slot]))

    def set_options(self, slot: int, words: I32) -> None:
        """Set the slot's options to `words`, int32 `[options]`."""
        self.host_options[slot] = words
        start = self._options_at + slot * len(words)
        self._note(np.arange(start, start + len(words)))

    def place(self, slots: Sequence[int], starts: Sequence[int], size: int) -> tuple[I64, I64]:
        """Set the next step's rows to these slots, with query tokens at `starts`, padded to `size`
        rows. Returns slots and starts as arrays."""
        slots_array, starts_array = integers(slots), integers(starts)
        count = len(slots_array)
        rows = np.full(size, self.padding)
        rows[:count] = slots_array
        moved = np.flatnonzero(self.host_rows[:size] != rows)
        if moved.size:
            self.host_rows[moved] = rows[moved]
            self._note(self._rows_at + moved)
        off = slots_array[self.host_positions[slots_array] != starts_array]
        if off.size:
            self.host_positions[slots_array] = starts_array
            self._note(self._positions_at + off)
        return slots_array, starts_array

    def counted(self, slots: I64) -> None:
        """Note that the device has added one to these slots' positions."""
        self.host_positions[slots] += 1

    def send(self, staging: Staging) -> None:
        """Transfer what has changed to the device, on the current stream."""
        if not self.changed:
            return
        changed = self.changed[0]
        if len(self.changed) > 1:
            # An address noted twice is sent once, so that changes cannot pile up without a bound.
            changed = np.unique(np.concatenate(self.changed))
        count = len(changed)
        capacity = max(_FEWEST, 1 << (count - 1).bit_length())
        there, addresses, values = self._inbox(capacity)
        here, host_addresses, host_values = self._staged(staging, capacity)
        host_addresses[:count], host_addresses[count:] = changed, 0
        host_values[:count], host_values[count:] = self._host[changed], 0
        there.copy_(here, non_blocking=True)
        self._device.index_copy_(0, addresses, values)
        # Last, since after an out-of-memory error above the changes are still to be sent.
        self.changed.clear()

    def _note(self, addresses: I64) -> None:
        self.changed.append(addresses)

    def _inbox(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inbox = self._inboxes.get(capacity)
        if inbox is None:
            memory = torch.empty(12 * capacity, dtype=torch.uint8, device=self._device.device)
            addresses = memory[: 8 * capacity].view(torch.int64)
            inbox = memory, addresses, memory[8 * capacity :].view(torch.int32)
            self._inboxes[capacity] = inbox
        return inbox

    def _staged(self, staging: Staging, capacity: int) -> tuple[torch.Tensor, I64, I32]:
        staged = staging.buffers.get(capacity)
        if staged is None:
            memory = self._accelerator.pinned(12 * capacity)
            words = memory.numpy()
            addresses = words[: 8 * capacity].view(np.int64)
            staged = memory, addresses, words[8 * capacity :].view(np.int32)
            staging.buffers[capacity] = staged
        return staged
