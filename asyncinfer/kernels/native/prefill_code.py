"""LLVM's code of causal attention of a prompt's tokens.

A row is one query head of one token. A thread takes a tile of rows of one KV head. It computes
`ROWS` rows at once, for which registers hold the sums. It lays out the keys of a span in blocks,
whose vectors hold the same dimension of several keys: nothing is summed across lanes. Neither other
rows nor the number of threads change the order in which a row is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.native.key_layout import key_layout, span_lines
from asyncinfer.kernels.native.softmax_code import row_weights

__all__ = [
    "FIELDS",
    "ROWS",
    "SPAN",
    "TILE",
    "PrefillCode",
    "block_of",
    "prefill_code",
    "scratch_numbers",
]

#: The arguments of a call, 64 bits each: addresses, sizes, and the counters that threads share.
FIELDS = (
    *("q", "keys", "values", "out", "scratch", "tokens", "start", "tile", "tiles", "items"),
    *("q_stride", "out_stride", "keys_stride", "keys_step", "values_stride"),
    *("threads", "started", "next"),
)
#: Rows that are computed at once.
ROWS = 6
#: Keys of a span. All rows of a tile are computed with one span before the next, so that the span
#: stays in a core's second-level cache. A multiple of a block's keys.
SPAN = 256
#: The most rows of a tile, a multiple of `ROWS`.
TILE = 96


def block_of(lanes: int) -> int:
    """Keys of a block."""
    return lanes * (4 if lanes == 16 else 2)


def scratch_numbers(head_dim: int) -> int:
    """The float32 numbers of a thread's scratch memory: the scores of `ROWS` rows, a highest score
    and a sum for each row of a tile, and the keys of a span as they are laid out."""
    return ROWS * SPAN + 2 * TILE + SPAN * head_dim


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


class PrefillCode(Assembly):
    """Emits the code for float32. Subclasses for other numbers override its public methods."""

    def __init__(self, head_dim: int, group: int, lanes: int, scale: float, size: int = 4) -> None:
        """`size`: bytes of a number of queries, keys and values."""
        super().__init__("prefill", lanes, FIELDS)
        self._head_dim, self._group, self._scale = head_dim, group, scale
        self._block = block_of(lanes)
        self._size = size
        #: Words of 32 bits of a head.
        self._words = head_dim * size // 4

    def text(self) -> str:
        self.on_task("attend", self._work(key_layout(self, self._words, self._block), self._rows()))
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
        states = self.at(b, scratch, self.integer(4 * ROWS * SPAN))
        laid = self.at(b, states, self.integer(4 * 2 * TILE))
        index, following = self.next_item(b, task, items)
        head = b.sdiv(index, tiles)
        # The last tiles have the most keys and take longest, so they come first.
        tile = b.sub(b.sub(tiles, self.integer(1)), b.srem(index, tiles))
        group = self.integer(self._group)
        first = b.mul(tile, tile_tokens)
        left = b.sub(tokens, first)
        count = b.mul(b.select(b.icmp_signed("<", left, tile_tokens), left, tile_tokens), group)
        skip = b.mul(head, self.integer(self._size * self._group * self._head_dim))
        tile_q = self.at(b, q, b.add(skip, b.mul(first, q_stride)))
        tile_out = self.at(b, out, b.add(skip, b.mul(first, out_stride)))
        keys = self.at(b, keys, b.mul(head, keys_stride))
        values = self.at(b, values, b.mul(head, values_stride))
        begin = b.add(start, first)
        last = b.add(begin, b.sdiv(b.sub(count, self.integer(1)), group))
        size = self.integer(4 * self._words)
        behind = self.at(b, laid, self.integer(4 * SPAN * self._words))
        sums = self.sums_of(b, behind, tile_out)

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
                final = b.add(row, self.integer(ROWS - 1))
                final = b.select(b.icmp_signed("<", final, highest), final, highest)
                seen = b.add(b.add(offset, b.sdiv(final, group)), self.integer(1))
                with b.if_then(b.icmp_signed(">", seen, self.integer(0))):
                    whole = self.integer(SPAN)
                    ends = b.icmp_signed("<=", seen, whole)
                    seen = b.select(ends, seen, whole)
                    strides = [q_stride, out_stride]
                    places = [tile_q, sums, *span_kv, scratch, states]
                    index = b.sdiv(row, self.integer(ROWS))
                    fetched = span_lines(self, b, index, ahead, keys_step, self._words)
                    about = [row, final, offset, seen, begun, ends]
                    b.call(rows, [*places, *fetched, *strides, *about])
                return []

            return self.loop(b, count, ROWS, few_rows, [])

        self.loop(b, b.add(last, self.integer(1)), SPAN, span, [])
        self.finish(b, sums, tile_out, count, out_stride)
        b.branch(following)
        return function

    def _rows(self) -> Any:
        """`rows(q, out, keys, values, scratch, states, ahead, step, q_stride, out_stride, row,
        last, offset, seen, begun, ends)`: compute the rows `row .. last`, at most `ROWS`, with the
        first `seen` keys of a span.

        `ahead` and `step` are of `span_lines`, `offset` of `span`. `begun`: the rows have had an
        earlier span. `ends`: the rows see no later span.
        """
        kinds = [self.pointer] * 7 + [self.i64] * 7 + [self.bit] * 2
        function, b = self.begin("rows", *kinds)
        function.attributes.add("noinline")
        q, out, keys, values, scratch, states, ahead, step, *more = function.args
        q_stride, out_stride, row, last, offset, seen, begun, ends = more
        queries, outs, limits, kept = [], [], [], []
        for number in range(ROWS):
            # Rows beyond the last one are computed as the last.
            this = b.add(row, self.integer(number))
            kept.append(self.at(b, states, b.mul(this, self.integer(8))))
            this = b.select(b.icmp_signed("<", this, last), this, last)
            token = b.udiv(this, self.integer(self._group))
            head = b.mul(b.urem(this, self.integer(self._group)), self.integer(4 * self._words))
            queries.append(self.at(b, q, b.add(b.mul(token, q_stride), head)))
            outs.append(self.sum_of(b, out, this, b.add(b.mul(token, out_stride), head)))
            limits.append(b.trunc(b.add(offset, token), self.i32))
        self._scores(b, queries, keys, scratch, seen)
        weights = row_weights(self, self._block, self._scale, self.store_weight)
        factors = [
            weights(b, self._row(b, scratch, number), limit, slot, seen, begun)
            for number, (limit, slot) in enumerate(zip(limits, kept, strict=True))
        ]
        self._sums(b, outs, values, scratch, (ahead, step), seen, begun, ends, factors)
        b.ret_void()
        return function

    def _scores(self, b: Any, queries: Sequence[Any], keys: Any, scratch: Any, seen: Any) -> None:
        """Write to `scratch` the product of each query with each key, up to the end of a block."""
        parts = range(0, self._block, self.lanes)

        def block(b: Any, key: Any, _: Sequence[Any]) -> Sequence[Any]:
            block_keys = self.at(b, keys, b.mul(key, self.integer(4 * self._words)))

            def number(b: Any, at: Any, sums: Sequence[Any]) -> Sequence[Any]:
                start = b.mul(at, self.integer(self._block))
                places = [b.add(start, self.integer(part)) for part in parts]
                column = [self.load(b, block_keys, place) for place in places]
                return self.products(b, [self.one(b, each, at) for each in queries], column, sums)

            none = [self.all(0.0)] * (ROWS * len(parts))
            sums = [*self.loop(b, self.integer(self._words), 1, number, none)]
            for index in range(ROWS):
                into = self._row(b, scratch, index)
                for part in parts:
                    self.store(b, sums.pop(0), into, b.add(key, self.integer(part)))
            return []

        self.loop(b, seen, self._block, block, [])

    def _sums(
        self,
        b: Any,
        outs: Sequence[Any],
        values: Any,
        scratch: Any,
        fetched: tuple[Any, Any],
        seen: Any,
        begun: Any,
        ends: Any,
        factors: Sequence[tuple[Any, Any]],
    ) -> None:
        """Add the values by their weights to the rows of `outs`, after those of earlier spans times
        their factor. Rows that see no later span are divided by the weights' sum."""
        weights = [self._row(b, scratch, number) for number in range(ROWS)]
        vectors = self._block // self.lanes
        none = self.all(0.0)
        for first in range(0, self._head_dim, self._block):
            parts = range(first, min(first + vectors * self.lanes, self._head_dim), self.lanes)
            before = [
                b.select(begun, b.fmul(self.load(b, out, self.integer(part)), factor), none)
                for out, (factor, _) in zip(outs, factors, strict=True)
                for part in parts
            ]

            def key(
                b: Any, number: Any, sums: Sequence[Any], parts: range = parts
            ) -> Sequence[Any]:
                if parts.start == 0:
                    self.fetch_later(b, fetched, number)
                start = b.mul(number, self.integer(self._head_dim))
                column = [self.load(b, values, b.add(start, self.integer(part))) for part in parts]
                ones = [self.one(b, each, number) for each in weights]
                return self.products(b, ones, column, sums)

            sums = list(self.loop(b, self.rows_of(b, seen), 1, key, before))
            for out, (_, total) in zip(outs, factors, strict=True):
                by = b.select(ends, total, self.all(1.0))
                for part in parts:
                    self.store(b, b.fdiv(sums.pop(0), by), out, self.integer(part))

    @property
    def scratch(self) -> int:
        """The float32 numbers of a thread's scratch memory."""
        return scratch_numbers(self._head_dim)

    def sums_of(self, b: Any, scratch: Any, out: Any) -> Any:
        """Where a tile's sums lie: where its results do, or in the scratch memory."""
        return out

    def sum_of(self, b: Any, sums: Any, row: Any, place: Any) -> Any:
        """Where the sum of this row of a tile lies; `place`: the bytes to its result."""
        return self.at(b, sums, place)

    def values_of(self, b: Any, values: Any, last: Any, scratch: Any) -> Any:
        """The span's values up to the one numbered `last`, as `products` takes them."""
        return values

    def rows_of(self, b: Any, keys: Any) -> Any:
        """The rows of `values_of` that so many keys have."""
        return keys

    def store_weight(self, b: Any, weight: Any, row: Any, at: Any) -> None:
        """Store the weights of the keys from `at` on, over a row's scores."""
        self.store(b, weight, row, at)

    def fetch_later(self, b: Any, fetched: tuple[Any, Any], row: Any) -> None:
        """Fetch what `span_lines` says, for this row of `values_of`."""
        self.fetch(b, self.at(b, fetched[0], b.mul(row, fetched[1])), near=False)

    def finish(self, b: Any, sums: Any, out: Any, rows: Any, out_stride: Any) -> None:
        """Write the sums of a tile of so many rows to its results."""

    def products(
        self, b: Any, numbers: Sequence[Any], column: Sequence[Any], sums: Sequence[Any]
    ) -> Sequence[Any]:
        """The sums after the products of each row's number and each vector were added."""
        pairs = ((number, vector) for number in numbers for vector in column)
        return [b.call(self.fma, [*pair, one]) for pair, one in zip(pairs, sums, strict=True)]

    def _row(self, b: Any, scratch: Any, number: int) -> Any:
        return self.at(b, scratch, self.integer(4 * SPAN * number))
