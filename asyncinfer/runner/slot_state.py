"""`SlotState`: what the device knows of every slot from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.runner.accelerator import Accelerator

__all__ = ["SlotState", "Staging"]

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

#: Changes that are sent at once, at least: what is missing is sent as nothing.
_FEWEST = 32
#: Two words nobody reads: where changes go that are none.
_NOWHERE = 2


class Staging:
    """Pinned memory for one step's changes, by capacity. In use until that step is collected."""

    def __init__(self) -> None:
        self.buffers: dict[int, tuple[torch.Tensor, I64, I32]] = {}


class SlotState:
    """Positions, block tables of each KV group, the batch's rows and sampling options, on the
    device.

    All of it is one flat array of 32-bit words with a twin on the host. What the host changes is
    noted by address, and `send` brings all of it over in one copy and one scatter, in the order of
    the stream: a step in flight still sees what was there before. The device counts positions on
    by itself; the host follows in `counted`, and sends one only where it is another than expected.

    The slot after the last belongs to nobody (`padding`): rows that fill up a batch point to it.
    Its position is -1.

    Args:
        slots, groups, width: how many, and the length of a slot's block table in each group.
        rows: most rows of a batch.
        options: words per slot for the sampler.
    """

    def __init__(
        self,
        accelerator: Accelerator,
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
        sizes = (_NOWHERE, rows, all_slots, all_slots * options, table_words)
        # Each part begins at an even word, so that it can hold 64-bit numbers.
        starts = np.concatenate(([0], np.cumsum([size + size % 2 for size in sizes])))
        self._rows_at, self._positions_at, self._options_at, self._tables_at, total = (
            int(start) for start in starts[1:]
        )
        self._host: I32 = np.zeros(total, np.int32)
        self._device = torch.zeros(total, dtype=torch.int32, device=accelerator.device)

        def part(start: int, size: int) -> slice:
            return slice(start, start + size)

        rows_part = part(self._rows_at, rows)
        positions_part = part(self._positions_at, all_slots)
        options_part = part(self._options_at, all_slots * options)
        tables_part = part(self._tables_at, table_words)
        #: On the host: int32 `[rows]`, `[slots + 1]`, `[slots + 1, options]`,
        #: `[slots + 1, groups, width]`.
        self.host_rows = self._host[rows_part]
        self.host_positions = self._host[positions_part]
        self.host_options = self._host[options_part].reshape(all_slots, options)
        self.host_tables = self._host[tables_part].reshape(all_slots, groups, width)
        #: The same on the device. A row's slot; a slot's next query position; its options; its
        #: block tables.
        self.rows = self._device[rows_part]
        self.positions = self._device[positions_part]
        self.options = self._device[options_part].view(all_slots, options)
        self.tables = self._device[tables_part].view(all_slots, groups, width)
        #: What arrives from the host, by capacity: all of it, addresses, values.
        self._inboxes: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._changed: list[I64] = []

        self.host_rows[:] = slots
        self.host_positions[slots] = -1
        self._note(self._rows_at + np.arange(rows))
        self._note(np.array([self._positions_at + slots]))

    def touch_tables(self, group: int, slots: I64 | int, indices: I64) -> None:
        """These entries of the group's tables on the host are new."""
        _, groups, width = self.host_tables.shape
        self._note(self._tables_at + (slots * groups + group) * width + indices)

    def set_options(self, slot: int, words: I32) -> None:
        """The slot's options are now these, int32 `[options]`."""
        self.host_options[slot] = words
        start = self._options_at + slot * len(words)
        self._note(np.arange(start, start + len(words)))

    def place(self, slots: Sequence[int], starts: Sequence[int], size: int) -> tuple[I64, I64]:
        """The next step's rows are these slots, with their query token at `starts`, and padding up
        to `size` rows. Gives both as arrays."""
        its_slots, its_starts = np.array(slots), np.array(starts)
        count = len(its_slots)
        rows = np.full(size, self.padding)
        rows[:count] = its_slots
        moved = np.flatnonzero(self.host_rows[:size] != rows)
        if moved.size:
            self.host_rows[moved] = rows[moved]
            self._note(self._rows_at + moved)
        off = its_slots[self.host_positions[its_slots] != its_starts]
        if off.size:
            self.host_positions[its_slots] = its_starts
            self._note(self._positions_at + off)
        return its_slots, its_starts

    def counted(self, slots: I64) -> None:
        """The device has put these slots' positions on by one."""
        self.host_positions[slots] += 1

    def send(self, staging: Staging) -> None:
        """Bring what changed to the device, on the current stream; nothing if nothing did."""
        if not self._changed:
            return
        changed = np.unique(np.concatenate(self._changed))
        count = len(changed)
        capacity = max(_FEWEST, 1 << (count - 1).bit_length())
        there, addresses, values = self._inbox(capacity)
        here, host_addresses, host_values = self._staged(staging, capacity)
        host_addresses[:count], host_addresses[count:] = changed, 0
        host_values[:count], host_values[count:] = self._host[changed], 0
        there.copy_(here, non_blocking=True)
        self._device.index_copy_(0, addresses, values)
        # Not before: where there is no memory for this, the changes are still to be sent.
        self._changed.clear()

    def _note(self, addresses: I64) -> None:
        self._changed.append(addresses)

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
