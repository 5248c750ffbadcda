"""`FakeAdapters`: a pool of adapters that are a number each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncinfer.errors import ModelLoadError

__all__ = ["FakeAdapter", "FakeAdapters"]

_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class FakeAdapter:
    """An adapter in the pool."""

    slot: int
    content: int
    rank: int = 1
    bytes: int = _BYTES
    base: str | None = None


class FakeAdapters:
    """The `AdapterPool` of a fake runner, whose answers depend on what is in a row's slot.

    Args:
        slots: adapters that there is room for.
        reading: called in the middle of each `read`; may block, may raise.
    """

    def __init__(self, slots: int, reading: Callable[[], object] = lambda: None) -> None:
        self._free = list(range(slots))
        self._reading = reading
        #: By slot; a slot that nobody owns has none.
        self.contents: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        return _BYTES * len(self.contents)

    def read(
        self, source: Any, config: Mapping[str, Any] | None = None, revision: str | None = None
    ) -> FakeAdapter:
        """`source` is `{"content": number}`. Raises `ModelLoadError` where no slot is free."""
        if not self._free:
            raise ModelLoadError("as many adapters are loaded as there is room for")
        # The slot freed last, whose former content a row might wrongly still read.
        slot = self._free.pop()
        try:
            self._reading()
        except BaseException:
            self._free.append(slot)
            raise
        self.contents[slot] = source["content"]
        return FakeAdapter(slot, source["content"])

    def release(self, loaded: FakeAdapter) -> None:
        found = self.contents.pop(loaded.slot, None)
        assert found == loaded.content, (
            f"slot {loaded.slot}: {loaded} is released, {found} is in it"
        )
        self._free.append(loaded.slot)

    def content(self, slot: int) -> int:
        """The number that a row with this slot computes with; 0 for a row without an adapter."""
        if slot < 0:
            return 0
        assert slot in self.contents, f"a row reads slot {slot} of the adapters, which is empty"
        return self.contents[slot]
