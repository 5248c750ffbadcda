"""`RowTasks`: functions whose threads take one turn of rows after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncinfer.kernels.native.assembly import Assembly

__all__ = ["HEAD", "RowTasks"]

#: The fields that every task begins with: rows of all arguments, rows that a thread takes at a
#: time, threads, and the counter that threads share, which is 0.
HEAD = ("rows", "turn", "threads", "next")


class RowTasks(Assembly):
    """Builds a module of functions that work on rows of numbers of one dtype."""

    def __init__(self, name: str, dtype: str, lanes: int, *, rounds: bool = False) -> None:
        """`dtype`: "float32" or "bfloat16"; `rounds`: see `Host`."""
        super().__init__(name, lanes, HEAD)
        self._dtype, self._rounds = dtype, rounds
        #: Bytes of a number.
        self.bytes = 2 if dtype == "bfloat16" else 4

    def begun(self, name: str, *kinds: Any) -> tuple[Any, Any, Sequence[Any]]:
        """A function that each thread of `name(task)` calls: its task, a builder at its beginning,
        and the arguments behind `HEAD`. A narrow one takes the lowest of its field's 64 bits."""
        function, b = self.begin(f"{name}_rows", self.pointer)
        self.on_task(name, function)
        (task,) = function.args
        places = [self.integer(8 * (len(HEAD) + index)) for index in range(len(kinds))]
        pairs = zip(places, kinds, strict=True)
        return task, b, [b.load(self.at(b, task, at), typ=kind, align=8) for at, kind in pairs]

    def each_row(self, b: Any, task: Any, body: Callable[[Any, Any], None]) -> None:
        """Emit a loop over the rows that a thread takes, and the function's end."""
        rows, turn = self.field(b, task, "rows"), self.field(b, task, "turn")
        turns = b.sdiv(b.add(rows, b.sub(turn, self.integer(1))), turn)
        index, following = self.next_item(b, task, turns)
        first = b.mul(index, turn)
        left = b.sub(rows, first)
        count = b.select(b.icmp_signed("<", turn, left), turn, left)

        def one(b: Any, number: Any, _: Sequence[Any]) -> Sequence[Any]:
            body(b, b.add(first, number))
            return []

        self.loop(b, count, 1, one, [])
        b.branch(following)

    def number(self, b: Any, numbers: Any, number: Any) -> Any:
        """The address of one of `numbers`."""
        return self.at(b, numbers, b.mul(number, self.integer(self.bytes)))

    def read(self, b: Any, numbers: Any, number: Any) -> Any:
        """A vector of numbers from this one on, as float32."""
        return self.wide(b, self.number(b, numbers, number), self._dtype)

    def put(self, b: Any, vector: Any, numbers: Any, number: Any) -> None:
        """Store a vector of float32 numbers, from `number` on."""
        if self._dtype == "bfloat16":
            vector = self.rounded(b, vector, at_once=self._rounds)
        b.store(vector, self.number(b, numbers, number), align=self.bytes)
