"""Contiguous copies of the keys and values of rows, kept from step to step.

torch attends to contiguous tensors, and pages are scattered. Gathering the pages of a decode row,
or of a short chunk of a long prompt, takes about as long as attending to them. The copy is
therefore kept, and each step adds the new tokens of each row to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import lt

import torch

__all__ = ["ContiguousKV", "ContiguousKVPool"]

#: Spare capacity of a copy: this share of its tokens, plus this many. A full one is gathered again.
_SPARE, _SPARE_TOKENS = 1 / 8, 32
#: The same for a prompt, which grows by a chunk per step, where there is no room for all of it.
_GROWING_SPARE, _GROWING_TOKENS = 1 / 2, 256


class ContiguousKV:
    """A copy of the keys and values of a group of sequences, in every layer."""

    def __init__(self, capacity: int, memory: torch.Tensor) -> None:
        """`memory` `[n]`, of the cache's dtype, is filled with the copy, layer after layer."""
        #: Most tokens of each row.
        self.capacity = capacity
        self.memory = memory
        #: By layer, in the order of their first use: `[parts, rows, kv_heads, capacity, head_dim]`.
        self._layers: dict[int, torch.Tensor] = {}
        #: By layer: how many tokens of each row are copied.
        self._held: dict[int, list[int]] = {}

    def extended(
        self,
        layer: int,
        starts: list[int],
        ends: list[int],
        new: torch.Tensor,
        places: torch.Tensor,
    ) -> torch.Tensor | None:
        """The copy of `layer`, with the rows' tokens from `starts` up to `ends` added; None if it
        lacks more than those. What it held from `starts` on, such as drafts that were wrong, is not
        believed.

        Args:
            new: keys and values of the tokens, `[parts, rows * queries, kv_heads, head_dim]`.
            places: where they go, see `places`.
        """
        # A step that failed has left some layers ahead of others, so each is counted by itself.
        held = self._held.get(layer)
        if held is None or any(map(lt, held, starts)):
            return None
        pages = self._layers[layer]
        pages.view(-1, new.shape[-1]).index_copy_(0, places, new.reshape(-1, new.shape[-1]))
        self._held[layer] = ends
        return pages

    def holds(self, layers: int, tokens: int) -> bool:
        """Whether so many layers have a copy, of one sequence, that lacks none of its first
        `tokens`."""
        held = self._held.values()
        return len(held) == layers and all(len(each) == 1 and each[0] >= tokens for each in held)

    def layer(self, layer: int) -> torch.Tensor:
        """The copy of a layer that has one, `[parts, rows, kv_heads, capacity, head_dim]`."""
        return self._layers[layer]

    def added(self, end: int) -> None:
        """The caller has written the tokens of a sequence up to this one, from one on that `holds`
        said is there; or those from this one on are wrong."""
        self._held = {layer: [end] for layer in self._held}

    def gathered(
        self,
        layer: int,
        ends: list[int],
        shape: Sequence[int],
        gather: Callable[[int, torch.Tensor], object],
    ) -> torch.Tensor:
        """The copy of `layer`, made anew from pages that have the rows' tokens up to `ends`.

        Args:
            shape: of a layer's copy, `[parts, rows, kv_heads, capacity, head_dim]`.
            gather: fills the memory of a layer's copy.
        """
        self._held.pop(layer, None)
        pages = self._laid_out(layer, shape)
        gather(layer, pages.view(-1))
        self._held[layer] = ends
        return pages

    def begin(self, layer: int, shape: Sequence[int]) -> None:
        """Have a copy of `layer` that holds no token yet. `shape` is that of `gathered`."""
        self._laid_out(layer, shape)
        self._held[layer] = [0] * shape[1]

    def _laid_out(self, layer: int, shape: Sequence[int]) -> torch.Tensor:
        pages = self._layers.get(layer)
        if pages is None:
            size = math.prod(shape)
            first = len(self._layers) * size
            pages = self._layers[layer] = self.memory[first : first + size].view(*shape)
        return pages

    def places(self, positions: torch.Tensor, parts: int, kv_heads: int) -> torch.Tensor:
        """Where the tokens at `positions` int64 `[rows, queries]` go in a layer's copy, seen as
        vectors of `head_dim`: int64 `[parts * rows * queries * kv_heads]`."""
        vectors = parts * len(positions) * kv_heads
        first = torch.arange(0, vectors * self.capacity, self.capacity, device=positions.device)
        return (first.view(parts, -1, 1, kv_heads) + positions[:, :, None]).flatten()


class ContiguousKVPool:
    """The contiguous copies of one cache. A group of sequences gets one when it is the same in two
    passes in a row: where requests come and go with every step, no copy would be used twice."""

    def __init__(self, most: int, token: int, dtype: torch.dtype) -> None:
        """All copies together take at most `most` elements of `dtype`. A token takes `token`
        elements in all layers."""
        self._most = most
        self._token = token
        self._dtype = dtype
        #: The groups of the last pass that asked; others have no copies.
        self.groups: set[tuple[int, ...]] = set()
        self._copies: dict[tuple[int, ...], ContiguousKV] = {}
        #: The largest memory of a dropped copy, kept for the next one: memory that went back to the
        #: system would be faulted in again page by page.
        self._spare: torch.Tensor | None = None

    def kept(self, group: tuple[int, ...], length: int) -> ContiguousKV | None:
        """The copy that a group of sequences of at most `length` tokens has already."""
        copy = self._copies.get(group)
        return copy if copy is not None and copy.capacity >= length else None

    def of(
        self,
        groups: Sequence[tuple[int, ...]],
        lengths: Sequence[int],
        size: int,
        *,
        prompts: Sequence[int] = (),
    ) -> list[ContiguousKV | None]:
        """The copy of each group of sequences, at most `lengths` tokens long; None without a copy.
        Copies of all other groups are dropped. If not all fit, the first groups have copies.

        Args:
            size: tokens of a page; every capacity is a multiple of it.
            prompts: the tokens of the prompts that the last groups are, each of which grows by many
                tokens in each pass; 0 for one whose length is not known.
        """
        if not self._most:
            self._copies, self._spare, self.groups = {}, None, set()
            return [None] * len(groups)
        kept = {group: self._copies[group] for group in groups if group in self._copies}
        for group, length in zip(groups, lengths, strict=True):
            if group in kept and kept[group].capacity < length:
                del kept[group]
        memories = [copy.memory for group, copy in self._copies.items() if group not in kept]
        memories += [] if self._spare is None else [self._spare]
        self._spare = max(memories, key=len, default=None)
        del memories
        self._copies = kept
        for index, (group, length) in enumerate(zip(groups, lengths, strict=True)):
            if group in self.groups and group not in kept:
                of_prompts = index - (len(groups) - len(prompts))
                prompt = prompts[of_prompts] if of_prompts >= 0 else None
                token = len(group) * self._token
                wanted = [-(-each // size) * size for each in _capacities(length, prompt)]
                memory = self._memory([each * token for each in wanted], groups[index + 1 :])
                if memory is not None:
                    # Memory that was kept may be larger than what was asked for.
                    fitting = next(each for each in wanted if each * token <= len(memory))
                    kept[group] = ContiguousKV(fitting, memory)
        self.groups = set(groups)
        return [kept.get(group) for group in groups]

    def begun(
        self, group: tuple[int, ...], length: int, size: int, prompt: int
    ) -> ContiguousKV | None:
        """A copy for a sequence with a prompt of so many tokens, also in its first pass; None where
        the bound does not allow it. All other copies are dropped."""
        self.groups.add(group)
        return self.of([group], [length], size, prompts=[prompt])[0]

    def _memory(
        self, sizes: Sequence[int], others: Sequence[tuple[int, ...]]
    ) -> torch.Tensor | None:
        """Memory of at least as many elements as one of `sizes`, the best first; None if the bound
        allows none even without the `others`."""
        spare, self._spare = self._spare, None
        given = [group for group in others if group in self._copies]
        held = sum(len(copy.memory) for copy in self._copies.values())
        most = self._most - held + sum(len(self._copies[group].memory) for group in given)
        sizes = [each for each in sizes if each <= max(most, 0 if spare is None else len(spare))]
        if spare is not None and sizes and sizes[0] <= len(spare):
            return spare
        del spare
        refused = False
        for elements in sizes:
            if elements > most:
                continue
            if elements > self._most - held:
                for group in given:
                    del self._copies[group]
                held, given = self._most - most, []
            with suppress(RuntimeError):
                return torch.empty(elements, dtype=self._dtype)
            refused = True
        if refused:
            # Attention works without copies. The next attempt would fail as well.
            self._most = 0
        return None


def _capacities(length: int, prompt: int | None) -> Iterator[int]:
    """Tokens to have room for, the best number first: of a sequence of `length` tokens that
    decodes, or that has a `prompt` of so many tokens, of which it has computed these."""
    if prompt is None:
        yield length + int(length * _SPARE) + _SPARE_TOKENS
        return
    if prompt >= length:
        yield prompt + _SPARE_TOKENS
    grown = length + int(length * _GROWING_SPARE) + _GROWING_TOKENS
    if prompt < length or grown < prompt:
        yield grown
