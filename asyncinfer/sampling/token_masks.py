"""`TokenMasks`: what the grammars of a step's rows allow, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.grammar import Matcher, fill_masks
from asyncinfer.sampling.transfer import upload

__all__ = ["TokenMasks"]

I64 = npt.NDArray[np.int64]


class TokenMasks:
    """The masks of one step. `fill` makes them on the host, best while the device computes the
    logits; `bar` applies them to some rows of the step."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        #: The rows of the masks, by slot and the position that is drawn at.
        self._rows: dict[tuple[int, int], int] = {}
        #: int32 `[rows, words]`: a bit for each token that is barred.
        self._barred = np.zeros((0, 0), np.int32)
        self._shifts = torch.arange(32, dtype=torch.int32, device=device)

    def fill(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        matchers: Sequence[Matcher],
        drafts: Sequence[Sequence[int]],
    ) -> None:
        """Replace the masks by those of these slots: one for the position at which each draws
        first, and one for each token of its draft, after that token."""
        places = [
            (slot, position + drafted)
            for slot, position, draft in zip(slots, positions, drafts, strict=True)
            for drafted in range(1 + len(draft))
        ]
        self._rows = {place: row for row, place in enumerate(places)}
        if matchers:
            self._barred = ~fill_masks(matchers, drafts)

    def bar(self, logits: torch.Tensor, slots: I64, positions: I64, rows: I64) -> None:
        """Set `logits` float32 `[n, vocab_size]` to -inf where a token does not fit.

        Args:
            slots, positions: int64 `[k]`: of the rows.
            rows: int64 `[k]`: ascending rows of the logits.
        """
        places = zip(slots.tolist(), positions.tolist(), strict=True)
        barred = self._unpacked(np.array([self._rows[place] for place in places]))
        if len(rows) == len(logits):
            logits.masked_fill_(barred, -torch.inf)
            return
        (at,) = upload(self._device, rows)
        logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(barred, -torch.inf))

    def _unpacked(self, rows: I64) -> torch.Tensor:
        """bool `[k, vocab_size]` of these rows of the masks, on the device."""
        packed = self._barred[rows]
        if self._device.type == "cpu":
            # Several times as fast as shifts.
            octets = packed.view(np.uint8)
            flags = np.unpackbits(octets, axis=1, count=self._vocab_size, bitorder="little")
            return torch.from_numpy(flags.view(np.bool_))
        (words,) = upload(self._device, packed)
        bits = (words[:, :, None] >> self._shifts) & 1
        return bits.view(len(rows), -1)[:, : self._vocab_size].bool()
