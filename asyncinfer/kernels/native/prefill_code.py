"""LLVM's code of causal attention of a prompt's tokens.

A thread takes a tile of rows of one KV head, see `PrefillRows`. It lays out the keys of a span in
blocks. The number of threads does not change the order in which a row is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.key_layout import key_layout, span_lines
from asyncinfer.kernels.native.prefill_rows_code import ROWS, SPAN, TILE, PrefillRows

__all__ = ["FIELDS", "PrefillCode", "prefill_code", "scratch_numbers"]

#: The arguments of a call, 64 bits each: addresses, sizes, and the counters that threads share.
FIELDS = (
    *("q", "keys", "values", "out", "scratch", "tokens", "start", "tile", "tiles", "items"),
    *("q_stride", "out_stride", "keys_stride", "keys_step", "values_stride"),
    *("threads", "started", "next"),
)


def scratch_numbers(head_dim: int, rows: int = ROWS) -> int:
    """The float32 numbers of a thread's scratch memory: the scores of the rows that are computed at
    once, a highest score and a sum for each row of a tile, and the keys of a span as they are laid
    out."""
    return rows * SPAN + 2 * TILE + SPAN * head_dim


def prefill_code(head_dim: int, group: int, lanes: int, scale: float) -> str:
    """The assembly of `attend(task)`, where `task` points to `FIELDS`, as int64.

    - `q` and `out`: float32 `[tokens, kv_heads * group, head_dim]`, with `q_stride` and
      `out_stride` bytes from one token to the next.
    - `keys` and `values`: float32 `[kv_heads, start + tokens, head_dim]`, with `keys_stride` and
      `values_stride` bytes from one head to the next. The keys of a head are `keys_step` bytes
      apart; its values have nothing between them.
    - `start`: the position of the first token, which attends to the keys before it and its own.
    - `tile`: tokens of a tile, at most `TILE // group`; `tiles`: the fewest that cover all tokens;
      `items`: `tiles * kv_heads`.
    - `scratch`: float32 `[threads, scratch_numbers(head_dim)]`. `started` and `next`: 0.

    Keys are taken `SPAN` at a time, by an online softmax (Milakov and Gimelshein, 2018). `head_dim`
    is a multiple of `lanes`, `scale` is above 0, and `group` at most `TILE`.
    """
    return PrefillCode(head_dim, group, lanes, scale).text()


class PrefillCode(PrefillRows):
    """Emits the code for float32. Subclasses for other numbers override its public methods."""

    def __init__(
        self,
        head_dim: int,
        group: int,
        lanes: int,
        scale: float,
        *,
        size: int = 4,
        laid_size: int = 4,
    ) -> None:
        """Sizes: see `PrefillRows`."""
        super().__init__(FIELDS, head_dim, group, lanes, scale, size, laid_size)

    def text(self) -> str:
        self.on_task("attend", self._work(self.key_layout(), self.rows()))
        return str(self.module)

    def _work(self, lay: Any, rows: Any) -> Any:
        """`work(task)`: compute one tile of a KV head after the other until none is left."""
        function, b = self.begin("work", self.pointer)
        (task,) = function.args
        q, keys, values, out, scratch = (self.address(b, task, name) for name in FIELDS[:5])
        tokens, start, tile_tokens, tiles, items, q_stride, out_stride = (
            self.field(b, task, name) for name in FIELDS[5:12]
        )
        keys_stride, keys_step, values_stride = (
            self.field(b, task, name) for name in FIELDS[12:15]
        )
        place = self.counted(b, task, "started")
        size = self.integer(4 * self.scratch)
        scratch = self.at(b, scratch, b.mul(place, size))
        states = self.at(b, scratch, self.integer(4 * self.at_once * SPAN))
        laid = self.at(b, states, self.integer(4 * 2 * TILE))
        index, following = self.next_item(b, task, items)
        head = b.sdiv(index, tiles)
        # The last tiles have the most keys and take longest, so they come first.
        tile = b.sub(b.sub(tiles, self.integer(1)), b.srem(index, tiles))
        group = self.integer(self.group)
        first = b.mul(tile, tile_tokens)
        left = b.sub(tokens, first)
        count = b.mul(b.select(b.icmp_signed("<", left, tile_tokens), left, tile_tokens), group)
        skip = b.mul(head, self.integer(self.group * self.head_bytes))
        tile_q = self.at(b, q, b.add(skip, b.mul(first, q_stride)))
        tile_out = self.at(b, out, b.add(skip, b.mul(first, out_stride)))
        keys = self.at(b, keys, b.mul(head, keys_stride))
        values = self.at(b, values, b.mul(head, values_stride))
        begin = b.add(start, first)
        last = b.add(begin, b.sdiv(b.sub(count, self.integer(1)), group))
        size = self.integer(self.head_bytes)
        behind = self.at(b, laid, self.integer(4 * SPAN * self.laid_words))
        sums = self.sums_of(b, behind, tile_out)
        queries = self.queries_of(b, behind, tile_q, q_stride, count)

        def span(b: Any, key: Any, _: Sequence[Any]) -> Sequence[Any]:
            most, highest = self.integer(SPAN - 1), b.sub(last, key)
            highest = b.select(b.icmp_signed("<", highest, most), highest, most)
            b.call(lay, [self.at(b, keys, b.mul(key, keys_step)), keys_step, highest, laid])
            span_values = self.at(b, values, b.mul(key, size))
            span_kv = laid, self.values_of(b, span_values, highest, behind)
            following = b.add(key, self.integer(SPAN))
            next_keys = self.at(b, keys, b.mul(following, keys_step))
            ahead = next_keys, self.at(b, values, b.mul(following, size))
            # The position of the tile's first token, counted from the span's first key.
            offset = b.sub(begin, key)
            begun = b.icmp_signed(">", key, self.integer(0))

            def few_rows(b: Any, row: Any, _: Sequence[Any]) -> Sequence[Any]:
                highest = b.sub(count, self.integer(1))
                final = b.add(row, self.integer(self.at_once - 1))
                final = b.select(b.icmp_signed("<", final, highest), final, highest)
                seen = b.add(b.add(offset, b.sdiv(final, group)), self.integer(1))
                with b.if_then(b.icmp_signed(">", seen, self.integer(0))):
                    whole = self.integer(SPAN)
                    ends = b.icmp_signed("<=", seen, whole)
                    seen = b.select(ends, seen, whole)
                    strides = [q_stride, out_stride]
                    places = [queries, sums, *span_kv, scratch, states]
                    index = b.sdiv(row, self.integer(self.at_once))
                    fetched = span_lines(self, b, index, ahead, keys_step, self.head_bytes)
                    about = [row, final, offset, seen, begun, ends]
                    b.call(rows, [*places, *fetched, *strides, *about])
                return []

            return self.loop(b, count, self.at_once, few_rows, [])

        self.loop(b, b.add(last, self.integer(1)), SPAN, span, [])
        self.finish(b, sums, tile_out, count, out_stride)
        b.branch(following)
        return function

    def key_layout(self) -> Any:
        """The function that lays out keys, see there."""
        return key_layout(self, self.laid_words, self.block)

    @property
    def scratch(self) -> int:
        """The float32 numbers of a thread's scratch memory."""
        return scratch_numbers(self.head_dim)

    def sums_of(self, b: Any, scratch: Any, out: Any) -> Any:
        """Where a tile's sums lie: where its results do, or in the scratch memory."""
        return out

    def queries_of(self, b: Any, scratch: Any, q: Any, q_stride: Any, rows: Any) -> Any:
        """A tile's queries, as `query_of` finds them."""
        return q

    def values_of(self, b: Any, values: Any, last: Any, scratch: Any) -> Any:
        """The span's values up to the one numbered `last`, as `products` takes them."""
        return values

    def finish(self, b: Any, sums: Any, out: Any, rows: Any, out_stride: Any) -> None:
        """Write the sums of a tile of so many rows to its results."""
