"""`TokenHistory`: the tokens of every slot, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.transfer import upload

__all__ = ["TokenHistory"]

I64 = npt.NDArray[np.int64]
_FIRST = 256


class TokenHistory:
    """Token ids by slot and position, int32 `[slots, capacity]`.

    They are on the device because drawn tokens are: the next step reads those from here before the
    host has seen them. The host knows positions, not tokens. `capacity` grows as sequences need it;
    graphs may be recorded over `flat` only if the first capacity reaches for every sequence.
    """

    def __init__(
        self,
        slots: int,
        device: torch.device,
        *,
        capacity: int = _FIRST,
        here: bool = False,
    ) -> None:
        """`here`: the tokens are on the host, and nothing has to be waited for."""
        self.device = device
        self._here = here
        self._tokens = torch.zeros((slots, capacity), dtype=torch.int32, device=device)
        #: `flat` of a history on a CPU, once it was asked for.
        self._host: npt.NDArray[np.int32] | None = None

    @property
    def capacity(self) -> int:
        return self._tokens.shape[1]

    @property
    def table(self) -> torch.Tensor:
        """int32 `[slots, capacity]`: the memory itself."""
        return self._tokens

    @property
    def flat(self) -> torch.Tensor:
        """int32 `[slots * capacity]`: the same memory."""
        return self._tokens.view(-1)

    def join(self, slot: int, token_ids: Sequence[int]) -> None:
        """Replace the slot's tokens."""
        self.reserve(len(token_ids))
        self.put(slot, self.stage(token_ids))

    def stage(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Copy tokens to the device, for `put`."""
        (tokens,) = upload(self.device, np.asarray(token_ids, dtype=np.int32))
        return tokens

    def put(self, slot: int, tokens: torch.Tensor, start: int = 0) -> None:
        """Replace the slot's tokens from a position on, up to `capacity`. Allocates nothing."""
        self._tokens[slot, start : start + len(tokens)] = tokens

    def read(self, slots: I64, positions: I64) -> torch.Tensor:
        """int64 `[n]`: the token at each `(slot, position)`."""
        (index,) = upload(self.device, self.places(slots, positions))
        return self.at(index)

    def places(self, slots: I64, positions: I64) -> I64:
        """The index into `flat` of each `(slot, position)`, valid until `capacity` grows."""
        return slots * self.capacity + positions

    def at(self, places: torch.Tensor) -> torch.Tensor:
        """int64 `[n]`: the tokens at `places`, int64 `[n]` on the device."""
        return self.flat.index_select(0, places).long()

    def on_host(self, places: I64) -> npt.NDArray[np.int32]:
        """The tokens at `places`, of a history on a CPU."""
        return self._on_host()[places]

    def _on_host(self) -> npt.NDArray[np.int32]:
        """`flat` of a history on a CPU. Python keeps the GIL, which torch's operators give up."""
        if self._host is None:
            self._host = self.flat.numpy()
        return self._host

    def write(self, slots: I64, positions: I64, tokens: torch.Tensor) -> None:
        """Put `tokens` int64 `[n]` at each `(slot, position)`; no pair occurs twice."""
        self.reserve(int(positions.max(initial=-1)) + 1)
        places = self.places(slots, positions)
        if self._here:
            self._on_host()[places] = tokens.numpy()
            return
        (index,) = upload(self.device, places)
        self.flat.index_copy_(0, index, tokens.int())

    def window(self, slots: I64, starts: I64, stops: I64) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens at positions `starts .. stops - 1` of each slot, aligned left and padded.

        Returns:
            int64 `[n, longest]`, padded with each window's first token (an empty window's tokens
            mean nothing), and bool of the same shape, False at padding.
        """
        longest = int((stops - starts).max(initial=0))
        offsets = np.arange(longest)
        first = np.minimum(slots * self.capacity + starts, self._tokens.numel() - 1)
        index, lengths, offset = upload(self.device, first, stops - starts, offsets)
        valid = offset < lengths[:, None]
        places = torch.where(valid, index[:, None] + offset, index[:, None])
        return self._tokens.view(-1)[places].long(), valid

    def recent(self, slots: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
        """int64 `[n, width]`: the tokens before each `(slot, position)`, both int64 `[n]` on the
        device, aligned right; -1 where there is none."""
        before = positions[:, None] + torch.arange(-width, 0, device=self.device)
        index = slots[:, None] * self.capacity + before.clamp(min=0)
        return self._tokens.view(-1)[index].long().masked_fill_(before < 0, -1)

    def reserve(self, length: int) -> None:
        """Grow `capacity` to `length` tokens at least."""
        if length <= self.capacity:
            return
        slots, capacity = self._tokens.shape
        while capacity < length:
            capacity *= 2
        grown = torch.zeros((slots, capacity), dtype=torch.int32, device=self.device)
        grown[:, : self.capacity] = self._tokens
        self._tokens, self._host = grown, None
