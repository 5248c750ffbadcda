"""LLVM's code of the weights of a row's keys, by an online softmax (Milakov and Gimelshein,
2018)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["row_weights"]


def row_weights(
    a: Assembly, block: int, scale: float, store: Callable[[Any, Any, Any, Any], None]
) -> Callable[[Any, Any, Any, Any, Any, Any], tuple[Any, Any]]:
    """A function `weights(b, row, limit, state, seen, begun)` that emits code: it turns a row's
    scores of the first `seen` keys into the weights of those up to `limit`, the exp of the score
    less the row's highest score so far. The highest score and the weights' sum go to `state`. With
    `begun` the row has had an earlier span.

    It returns, in every lane, the factor for the sums of earlier spans, and the weights' sum.
    `block`: scores were written up to the end of a block of so many keys. `store(b, weight, row,
    at)` stores the weights of the keys from `at` on, in the place of the row's scores.
    """
    lane = a.ir.Constant(a.ints, list(range(a.lanes)))
    lowest = a.all(float("-inf"))

    def weights(b: Any, row: Any, limit: Any, state: Any, seen: Any, begun: Any) -> tuple[Any, Any]:
        most = a.everywhere(b, limit)
        count = b.add(seen, a.integer(block - 1))
        count = b.and_(count, a.integer(-block))

        def mask(b: Any, at: Any, values: Sequence[Any]) -> Sequence[Any]:
            number = b.add(a.everywhere(b, b.trunc(at, a.i32)), lane)
            score = b.select(b.icmp_signed("<=", number, most), a.load(b, row, at), lowest)
            a.store(b, score, row, at)
            return [b.call(a.maximum, [values[0], score])]

        before = b.select(begun, a.one(b, state, a.integer(0)), lowest)
        (vector,) = a.loop(b, count, a.lanes, mask, [before])
        highest = a.highest(b, vector)

        def weigh(b: Any, at: Any, values: Sequence[Any]) -> Sequence[Any]:
            weight = a.softmax_weight(b, b.fsub(a.load(b, row, at), highest), scale)
            store(b, weight, row, at)
            return [b.fadd(values[0], weight)]

        (sums,) = a.loop(b, count, a.lanes, weigh, [a.all(0.0)])
        factor = b.select(begun, a.softmax_weight(b, b.fsub(before, highest), scale), a.all(0.0))
        earlier = b.select(begun, b.fmul(a.one(b, state, a.integer(1)), factor), a.all(0.0))
        first = a.ir.Constant(a.i32, 0)
        total = b.fadd(b.extract_element(earlier, first), a.total(b, sums))
        b.store(b.extract_element(highest, first), state, align=4)
        b.store(total, a.at(b, state, a.integer(4)), align=4)
        return factor, a.everywhere(b, total)

    return weights
