"""LLVM's code of the weights of rows' keys, by an online softmax (Milakov and Gimelshein, 2018)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["row_weights"]


def row_weights(
    a: Assembly, block: int, scale: float, store: Callable[[Any, Any, Any, Any], None]
) -> Callable[[Any, Sequence[Any], Sequence[Any], Sequence[Any], Any, Any], list[tuple[Any, Any]]]:
    """A function `weights(b, rows, limits, states, seen, begun)` that emits code: it turns each
    row's scores of the first `seen` keys into the weights of those up to its limit, the exp of the
    score less the row's highest score so far. The highest score and the weights' sum go to the
    row's state. With `begun` the rows have had an earlier span.

    It returns for each row, in every lane, the factor for the sums of earlier spans, and the
    weights' sum. `block`: scores were written up to the end of a block of so many keys. `store(b,
    weight, row, at)` stores the weights of the keys from `at` on, in the place of the row's scores.

    One row's numbers wait for each other: its highest score for all scores, its weights for that.
    So a processor computes a few rows in little more time than one.
    """
    lane = a.ir.Constant(a.ints, list(range(a.lanes)))
    lowest, parts = a.all(float("-inf")), range(0, block, a.lanes)

    def weights(
        b: Any,
        rows: Sequence[Any],
        limits: Sequence[Any],
        states: Sequence[Any],
        seen: Any,
        begun: Any,
    ) -> list[tuple[Any, Any]]:
        count = b.add(seen, a.integer(block - 1))
        count = b.and_(count, a.integer(-block))
        most = [a.everywhere(b, limit) for limit in limits]
        # All rows see all keys before this one.
        ends = (b.add(b.sext(limit, a.i64), a.integer(1)) for limit in limits)
        begin = b.and_(
            functools.reduce(lambda one, other: a.least(b, one, other), ends, count),
            a.integer(-block),
        )
        begin = b.select(b.icmp_signed(">", begin, a.integer(0)), begin, a.integer(0))

        def find(b: Any, at: Any, values: Sequence[Any]) -> Sequence[Any]:
            found = list(values)
            for part in parts:
                this = b.add(at, a.integer(part))
                for index, row in enumerate(rows):
                    found[index] = b.call(a.maximum, [found[index], a.load(b, row, this)])
            return found

        def mask(b: Any, on: Any, values: Sequence[Any]) -> Sequence[Any]:
            found = list(values)
            for part in parts:
                this = b.add(begin, b.add(on, a.integer(part)))
                number = b.add(a.everywhere(b, b.trunc(this, a.i32)), lane)
                for index, (row, last) in enumerate(zip(rows, most, strict=True)):
                    score = a.load(b, row, this)
                    score = b.select(b.icmp_signed("<=", number, last), score, lowest)
                    a.store(b, score, row, this)
                    found[index] = b.call(a.maximum, [found[index], score])
            return found

        zero, one = a.integer(0), a.integer(1)
        before = [b.select(begun, a.one(b, state, zero), lowest) for state in states]
        found = a.loop_or_not(b, begin, block, find, before)
        found = a.loop_or_not(b, b.sub(count, begin), block, mask, found)
        highest = [a.highest(b, each) for each in found]

        def weigh(b: Any, at: Any, values: Sequence[Any]) -> Sequence[Any]:
            sums = list(values)
            for part in parts:
                this = b.add(at, a.integer(part))
                for index, (row, high) in enumerate(zip(rows, highest, strict=True)):
                    weight = a.softmax_weight(b, b.fsub(a.load(b, row, this), high), scale)
                    store(b, weight, row, this)
                    sums[index] = b.fadd(sums[index], weight)
            return sums

        none = a.all(0.0)
        sums = a.loop(b, count, block, weigh, [none] * len(rows))
        results = []
        for state, old, high, own in zip(states, before, highest, sums, strict=True):
            factor = a.softmax_weight(b, b.fsub(old, high), scale)
            factor = b.select(begun, factor, none)
            earlier = b.select(begun, b.fmul(a.one(b, state, one), factor), none)
            first = a.ir.Constant(a.i32, 0)
            total = b.fadd(b.extract_element(earlier, first), a.total(b, own))
            b.store(b.extract_element(high, first), state, align=4)
            b.store(total, a.at(b, state, a.integer(4)), align=4)
            results.append((factor, a.everywhere(b, total)))
        return results

    return weights
