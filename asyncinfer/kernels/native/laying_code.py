"""LLVM's code that writes a quantised matrix's numbers into the blocks that its products read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly
from asyncinfer.kernels.orders import AWQ_PLACES

__all__ = ["NAMES", "RUN", "laying_code"]

#: The functions. Those that end in a number copy so many bytes at a time.
NAMES = ("rows_16", "rows_8", "swapped_16", "swapped_8", "words", "awq")
#: Bytes of an output that `words` and `awq` write at a time: groups hold a multiple of them.
RUN = 16
_LOW, _HIGH = 0x0F0F0F0F, 0xF0F0F0F0
_EVEN, _ODD = 0x00FF00FF, 0xFF00FF00


def laying_code() -> str:
    """The assembly of functions `(blocks, stored, outputs, taken, numbers, block, first, count,
    flip, ends, size, most)`, by the kinds of `NumberOrder`.

    `blocks` has a row of `taken` bytes for each output. A row is blocks of `block` bytes: first
    `numbers` bytes of numbers, then an end of `size` (2, 4 or 8) bytes, which are the scale and the
    offset. A call writes bytes `first .. first + written - 1` of each row's numbers, with the bits
    `flip` of each byte inverted. It also writes the ends of the blocks that are full then, from
    `ends` `[outputs, blocks of a row, size]`. `stored` holds `count`

    - bytes of each output (`rows`, `swapped`); `first` is 0, and `written` is `count`. `most`, 16
      bytes, gets the largest of their low 7 bits,
    - words of each output (`words`), int32 `[count, outputs]`, a multiple of 4;
      `written` is `4 * count`,
    - inputs (`awq`), int32 `[count, outputs / 8]`, a multiple of 32; `written` is
      `count / 2`.

    Outputs of `words` are a multiple of 4, of `awq` of 32.
    """
    return _LayingCode("laying", 4).text()


class _LayingCode(Assembly):
    def text(self) -> str:
        for width in (16, 8):
            for swapped in (False, True):
                self._rows(width, swapped)
        self._words()
        self._awq()
        return str(self.module)

    def _start(self, name: str) -> tuple[Any, tuple[Any, ...]]:
        kinds = [self.pointer] * 2 + [self.i64] * 7 + [self.pointer, self.i64, self.pointer]
        function, b = self.begin(name, *kinds, public=True)
        for argument in function.args[:2]:
            argument.add_attribute("noalias")
        return b, tuple(function.args)

    def _rows(self, width: int, swapped: bool) -> None:
        b, arguments = self._start(f"{'swapped' if swapped else 'rows'}_{width}")
        blocks, stored, outputs, taken, numbers, block, _, count, flip = arguments[:9]
        vector = self.ir.VectorType(self.byte, width)
        low, four, seven = (self.ir.Constant(vector, [value] * width) for value in (15, 4, 127))
        mask = self._splat(b, b.trunc(flip, self.byte), width)

        def row(b: Any, number: Any, largest: Sequence[Any]) -> Sequence[Any]:
            source = self.at(b, stored, b.mul(number, count))
            target = self.at(b, blocks, b.mul(number, taken))

            def group(b: Any, start: Any, largest: Sequence[Any]) -> Sequence[Any]:
                into = self.at(b, target, b.mul(b.udiv(start, numbers), block))
                given = self.at(b, source, start)

                def part(b: Any, at: Any, largest: Sequence[Any]) -> Sequence[Any]:
                    value = b.load(self.at(b, given, at), typ=vector, align=1)
                    size = b.and_(value, seven)
                    more = b.icmp_unsigned(">", size, largest[0])
                    if swapped:
                        value = b.or_(b.shl(value, four), b.and_(b.lshr(value, four), low))
                    b.store(b.xor(value, mask), self.at(b, into, at), align=1)
                    return [b.select(more, size, largest[0])]

                return self.loop(b, numbers, width, part, largest)

            found: Sequence[Any] = self._stepped(b, count, numbers, group, largest)
            self._end(b, arguments, number, count)
            return found

        zero = self.ir.Constant(vector, [0] * width)
        (largest,) = self.loop(b, outputs, 1, row, [zero])
        b.store(largest, arguments[11], align=1)
        b.ret_void()

    def _words(self) -> None:
        b, arguments = self._start("words")
        blocks, stored, outputs, taken, numbers, block, first, count, flip = arguments[:9]
        mask, wide = self._mask(b, flip), b.mul(outputs, self.integer(4))

        def column(line: Any) -> None:
            ends = b.add(line, self.integer(16))
            end = b.select(b.icmp_signed("<", ends, outputs), ends, outputs)

            def four(b: Any, word: Any, _: Sequence[Any]) -> Sequence[Any]:
                place = self._byte_at(b, b.add(first, b.mul(word, self.integer(4))), numbers, block)
                source = self.at(b, stored, b.mul(word, wide))

                def square(output: Any) -> None:
                    given = self.at(b, source, b.mul(output, self.integer(4)))
                    parts = [
                        b.load(
                            self.at(b, given, b.mul(wide, self.integer(row))),
                            typ=self.ints,
                            align=4,
                        )
                        for row in range(4)
                    ]
                    into = self.at(b, blocks, b.add(b.mul(output, taken), place))
                    for lane, value in enumerate(self._turned(b, parts)):
                        target = self.at(b, into, b.mul(taken, self.integer(lane)))
                        b.store(b.xor(value, mask), target, align=1)

                self.each(b, line, end, 4, square)
                return []

            self.loop(b, count, 4, four, [])
            written = b.mul(count, self.integer(4))
            self.each(b, line, end, 1, lambda output: self._end(b, arguments, output, written))

        self.each(b, self.integer(0), outputs, 16, column)
        b.ret_void()

    def _awq(self) -> None:
        b, arguments = self._start("awq")
        blocks, stored, outputs, taken, numbers, block, first, count, flip = arguments[:9]
        mask, words = self._mask(b, flip), b.udiv(outputs, self.integer(8))
        wide = b.mul(words, self.integer(4))

        def column(line: Any) -> None:
            ends = b.add(line, self.integer(16))
            end = b.select(b.icmp_signed("<", ends, words), ends, words)

            def inputs(b: Any, number: Any, _: Sequence[Any]) -> Sequence[Any]:
                start = b.add(first, b.udiv(number, self.integer(2)))
                place = self._byte_at(b, start, numbers, block)
                source = self.at(b, stored, b.mul(number, wide))

                def square(word: Any) -> None:
                    given = self.at(b, source, b.mul(word, self.integer(4)))
                    eights = [self._eight(b, given, wide, 8 * each) for each in range(4)]
                    output = b.mul(word, self.integer(8))
                    into = self.at(b, blocks, b.add(b.mul(output, taken), place))
                    for row, at in enumerate(AWQ_PLACES):
                        turned = self._turned(b, [eight[at] for eight in eights])
                        for lane, value in enumerate(turned):
                            target = self.at(b, into, b.mul(taken, self.integer(8 * lane + row)))
                            b.store(b.xor(value, mask), target, align=1)

                self.each(b, line, end, 4, square)
                return []

            self.loop(b, count, 32, inputs, [])
            written, eight = b.udiv(count, self.integer(2)), self.integer(8)
            from_, to = b.mul(line, eight), b.mul(end, eight)
            self.each(b, from_, to, 1, lambda output: self._end(b, arguments, output, written))

        self.each(b, self.integer(0), words, 16, column)
        b.ret_void()

    def _eight(self, b: Any, given: Any, wide: Any, start: int) -> list[Any]:
        """Eight inputs of four words, from input `start` on. Returns a vector for each place in a
        word, whose lanes hold the eight numbers of one output each."""
        rows = [
            b.load(
                self.at(b, given, b.mul(wide, self.integer(start + row))), typ=self.ints, align=4
            )
            for row in range(8)
        ]
        four = self._ints(4)
        # Bytes of two inputs: of places 0, 2, 4, 6, and of 1, 3, 5, 7.
        even, odd = [], []
        for one, two in zip(rows[0::2], rows[1::2], strict=True):
            low, high = self._ints(_LOW), self._ints(_HIGH)
            even.append(b.or_(b.and_(one, low), b.shl(b.and_(two, low), four)))
            odd.append(b.or_(b.lshr(b.and_(one, high), four), b.and_(two, high)))
        turned = [self._bytes_turned(b, each) for each in (even, odd)]
        return [turned[place % 2][place // 2] for place in range(8)]

    def _bytes_turned(self, b: Any, parts: Sequence[Any]) -> list[Any]:
        """Four vectors transposed in bytes: result k has byte k of each lane of all four."""
        eight, sixteen = self._ints(8), self._ints(16)
        pairs = []
        for one, two in (parts[:2], parts[2:]):
            low, high = self._ints(_EVEN), self._ints(_ODD)
            pairs.append(b.or_(b.and_(one, low), b.shl(b.and_(two, low), eight)))
            pairs.append(b.or_(b.lshr(b.and_(one, high), eight), b.and_(two, high)))
        halves = self._ints(0xFFFF)
        found = []
        for one, two in ((pairs[0], pairs[2]), (pairs[1], pairs[3])):
            found.append(b.or_(b.and_(one, halves), b.shl(two, sixteen)))
            found.append(b.or_(b.lshr(one, sixteen), b.and_(two, self._ints(0xFFFF0000))))
        return [found[0], found[2], found[1], found[3]]

    def _turned(self, b: Any, parts: Sequence[Any]) -> list[Any]:
        """The columns of the matrix whose rows are four vectors of four lanes."""
        low, high = (0, 4, 1, 5), (2, 6, 3, 7)
        one, two = self._pair(b, parts[0], parts[2], low), self._pair(b, parts[0], parts[2], high)
        others = self._pair(b, parts[1], parts[3], low), self._pair(b, parts[1], parts[3], high)
        return [
            self._pair(b, ours, theirs, lanes)
            for ours, theirs in zip((one, two), others, strict=True)
            for lanes in (low, high)
        ]

    def _pair(self, b: Any, one: Any, two: Any, lanes: Sequence[int]) -> Any:
        return b.shuffle_vector(one, two, self.ir.Constant(self.ints, list(lanes)))

    def _end(self, b: Any, arguments: Sequence[Any], output: Any, written: Any) -> None:
        """Write the ends of an output's blocks that `written` bytes have filled."""
        blocks, _, _, taken, numbers, block, first, _, _, ends, size, _ = arguments
        begin = b.udiv(first, numbers)
        full = b.udiv(b.add(first, written), numbers)
        row = self.at(b, self.at(b, blocks, b.mul(output, taken)), numbers)
        # Rows end with a block.
        given = self.at(b, ends, b.mul(b.mul(output, b.udiv(taken, block)), size))
        for width in (2, 4, 8):
            kind = self.ir.IntType(8 * width)

            def one(group: Any, kind: Any = kind, width: int = width) -> None:
                value = b.load(
                    self.at(b, given, b.mul(group, self.integer(width))), typ=kind, align=1
                )
                b.store(value, self.at(b, row, b.mul(group, block)), align=1)

            with b.if_then(b.icmp_unsigned("==", size, self.integer(width))):
                self.each(b, begin, full, 1, one)

    def _byte_at(self, b: Any, byte: Any, numbers: Any, block: Any) -> Any:
        """The offset in a row of byte `byte` of the row's numbers."""
        return b.add(b.mul(b.udiv(byte, numbers), block), b.urem(byte, numbers))

    def _stepped(self, b: Any, end: Any, step: Any, body: Any, values: Sequence[Any]) -> Any:
        """Emit a loop over the multiples of `step`, which is known only when the code runs."""

        def one(b: Any, index: Any, values: Sequence[Any]) -> Sequence[Any]:
            return body(b, b.mul(index, step), values)  # type: ignore[no-any-return]

        return self.loop(b, b.udiv(end, step), 1, one, values)

    def _mask(self, b: Any, flip: Any) -> Any:
        word = b.mul(b.trunc(flip, self.i32), self.ir.Constant(self.i32, 0x01010101))
        return self.everywhere(b, word)

    def _splat(self, b: Any, number: Any, width: int) -> Any:
        kind = self.ir.VectorType(number.type, width)
        undefined = self.ir.Constant(kind, self.ir.Undefined)
        one = b.insert_element(undefined, number, self.ir.Constant(self.i32, 0))
        return self.shuffle(b, one, [0] * width)

    def _ints(self, value: int) -> Any:
        return self.ir.Constant(self.ints, [value] * self.lanes)
