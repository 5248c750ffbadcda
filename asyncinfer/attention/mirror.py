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
    """Keys and values of some sequences in every layer: `[parts, rows, kv_heads, capacity,
    head_dim]`, made when the layer first asks."""

    def __init__(self, capacity: int) -> None:
        #: Tokens of each row that there is room for.
        self.capacity = capacity
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

    def gathered(
        self, layer: int, starts: list[int], gather: Gather, dtype: torch.dtype
    ) -> torch.Tensor:
        """The same from the pages, with the tokens at `starts` in them; `gather` is of `capacity`
        tokens of each row."""
        pages = self._layers.get(layer)
        if pages is None:
            pages = torch.empty(gather.shape, dtype=dtype, device=gather.device)
            self._layers[layer] = pages
        gather(layer, pages.view(-1))
        self._held[layer] = [start + 1 for start in starts]
        return pages

    def places(self, starts: torch.Tensor, parts: int, kv_heads: int) -> torch.Tensor:
        """Where tokens at `starts` int64 `[rows]` go, in pages seen as vectors of `head_dim`."""
        vectors = parts * len(starts) * kv_heads
        first = torch.arange(0, vectors * self.capacity, self.capacity, device=starts.device)
        return (first.view(parts, -1, kv_heads) + starts[:, None]).flatten()


class Mirrors:
    """The mirrors of one cache: of the groups of rows that were computed last."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._mirrors: dict[tuple[int, ...], Mirror] = {}

    def of(
        self, groups: Sequence[tuple[int, ...]], lengths: Sequence[int], token_bytes: int, size: int
    ) -> list[Mirror] | None:
        """The mirror of each group of sequences, `lengths` tokens long at most; a new one where its
        rows, or its room, are not what they were. None, and none is kept, if they take too much.

        Args:
            token_bytes: of a token in all layers.
            size: tokens of a page; a capacity is a multiple.
        """
        before, self._mirrors = self._mirrors, {}
        found = []
        for group, length in zip(groups, lengths, strict=True):
            mirror = before.get(group)
            if mirror is None or mirror.capacity < length:
                room = length + int(length * _SPARE) + _SPARE_TOKENS
                mirror = Mirror(-(-room // size) * size)
            found.append(mirror)
        taken = sum(len(group) * m.capacity for group, m in zip(groups, found, strict=True))
        if taken * token_bytes > self._most_bytes:
            return None
        self._mirrors = dict(zip(groups, found, strict=True))
        return found
