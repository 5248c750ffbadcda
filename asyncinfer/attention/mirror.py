"""What decode rows attend to, side by side, kept from step to step.

Pages are shared and scattered; torch attends to what lies in one piece. Gathering the pages of a
row takes about as long as attending to them, so what was gathered is kept, and a step adds to it
the one token of each row that is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from asyncinfer.attention.gather import Gather

__all__ = ["Mirror", "Mirrors"]

#: A mirror has room for this share of its tokens more, and this many: then it is gathered anew.
_SPARE, _SPARE_TOKENS = 1 / 8, 32


class Mirror:
    """Keys and values of some sequences in every layer."""

    def __init__(self, capacity: int, room: torch.Tensor) -> None:
        """`room` `[n]`, of the cache's dtype, is what it lies in, layer after layer."""
        #: Tokens of each row that there is room for.
        self.capacity = capacity
        self.room = room
        #: By layer, as they come: `[parts, rows, kv_heads, capacity, head_dim]`.
        self._layers: dict[int, torch.Tensor] = {}
        #: By layer: how many tokens of each row it has.
        self._held: dict[int, list[int]] = {}

    def extended(
        self, layer: int, starts: list[int], new: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor | None:
        """What `layer` holds of the rows, after adding their tokens at `starts`; None if those are
        not all that it lacks.

        Args:
            new: the tokens, `[parts, rows, kv_heads, head_dim]`.
            places: where they go, see `places`.
        """
        # A step that failed has left some layers ahead of others, so each says what it has.
        if self._held.get(layer) != starts:
            return None
        pages = self._layers[layer]
        pages.view(-1, new.shape[-1]).index_copy_(0, places, new.reshape(-1, new.shape[-1]))
        self._held[layer] = [start + 1 for start in starts]
        return pages

    def gathered(self, layer: int, starts: list[int], gather: Gather) -> torch.Tensor:
        """The same from the pages, with the tokens at `starts` in them; `gather` is of `capacity`
        tokens of each row."""
        self._held.pop(layer, None)
        pages = self._layers.get(layer)
        if pages is None:
            first = len(self._layers) * gather.size
            pages = self.room[first : first + gather.size].view(gather.shape)
            self._layers[layer] = pages
        gather(layer, pages.view(-1))
        self._held[layer] = [start + 1 for start in starts]
        return pages

    def places(self, starts: torch.Tensor, parts: int, kv_heads: int) -> torch.Tensor:
        """Where tokens at `starts` int64 `[rows]` go, in a layer seen as vectors of `head_dim`:
        int64 `[parts * rows * kv_heads]`."""
        vectors = parts * len(starts) * kv_heads
        first = torch.arange(0, vectors * self.capacity, self.capacity, device=starts.device)
        return (first.view(parts, -1, kv_heads) + starts[:, None]).flatten()


class Mirrors:
    """The mirrors of one cache. Groups of rows have one that were the same in two passes in a
    row: where requests come and go with every step, nothing is kept."""

    def __init__(self, most: int, token: int, dtype: torch.dtype) -> None:
        """All of them take `most` elements of `dtype`; a token takes `token` in all layers."""
        self._most = most
        self._token = token
        self._dtype = dtype
        self._before: set[tuple[int, ...]] = set()
        self._mirrors: dict[tuple[int, ...], Mirror] = {}
        #: The largest that is not used now. Memory that goes back to the system is faulted in page
        #: by page when the next one is made.
        self._spare: torch.Tensor | None = None

    def of(
        self, groups: Sequence[tuple[int, ...]], lengths: Sequence[int], size: int
    ) -> list[Mirror | None]:
        """The mirror of each group of sequences, `lengths` tokens long at most, if it has one. What
        others had is let go.

        Args:
            size: tokens of a page; a capacity is a multiple.
        """
        if not self._most:
            return [None] * len(groups)
        kept = {group: self._mirrors[group] for group in groups if group in self._mirrors}
        for group, length in zip(groups, lengths, strict=True):
            if group in kept and kept[group].capacity < length:
                del kept[group]
        rooms = [mirror.room for group, mirror in self._mirrors.items() if group not in kept]
        rooms += [] if self._spare is None else [self._spare]
        self._spare = max(rooms, key=len, default=None)
        del rooms
        self._mirrors = kept
        for group, length in zip(groups, lengths, strict=True):
            if group in self._before and group not in kept:
                wanted = length + int(length * _SPARE) + _SPARE_TOKENS
                capacity = -(-wanted // size) * size
                room = self._room(len(group) * capacity * self._token)
                if room is not None:
                    kept[group] = Mirror(capacity, room)
        self._before = set(groups)
        return [kept.get(group) for group in groups]

    def _room(self, elements: int) -> torch.Tensor | None:
        """Memory of so many elements at least, if there is any."""
        spare, self._spare = self._spare, None
        if spare is not None and elements <= len(spare):
            return spare
        del spare
        if elements > self._most - sum(len(mirror.room) for mirror in self._mirrors.values()):
            return None
        try:
            return torch.empty(elements, dtype=self._dtype)
        except RuntimeError:
            # Attention works without, and asks no more.
            self._most = 0
            return None
