"""`AdapterHistory`: which adapters a simulated life has had under which name."""

from __future__ import annotations

from asyncinfer.scheduler import Step
from asyncinfer.testing.fake_adapters import FakeAdapters
from asyncinfer.testing.invariants import hold

__all__ = ["AdapterHistory"]


class AdapterHistory:
    """An adapter is the number of its load, which no other has."""

    def __init__(self) -> None:
        #: By the key that prefixes are cached by: the adapter that it stands for.
        self.by_key: dict[str, int] = {}
        self._time = 0
        #: By name, in the order of their loads.
        self._named: dict[str, list[int]] = {}
        #: Whose loads are done.
        self._done: set[int] = set()
        #: Whose name was taken away before the load was known to be done: it may have had the name
        #: by then, or have got it later.
        self._unsure: set[int] = set()
        #: From when on nobody gets it any more.
        self._retired: dict[int, int] = {}

    @property
    def now(self) -> int:
        """How many changes there were."""
        return self._time

    def asked(self, name: str, adapter: int) -> None:
        """A load begins."""
        self._named.setdefault(name, []).append(adapter)

    def loaded(self, name: str, adapter: int) -> None:
        """A load is done: those before it have no name any more."""
        before = self._named[name]
        self._retire(before[: before.index(adapter)])
        self._done.add(adapter)

    def known(self, name: str) -> list[int]:
        """The adapter that surely has the name, if any."""
        adapters = self._named.get(name, [])
        sure = self._done - self._unsure - self._retired.keys()
        return adapters[-1:] if adapters and adapters[-1] in sure else []

    def unloaded(self, name: str, known: list[int]) -> None:
        """A name was taken away; `known` had it, if any did for sure."""
        self._retire(known)
        self._unsure.update(a for a in self._named.get(name, ()) if a not in self._done)

    def _retire(self, adapters: list[int]) -> None:
        self._time += 1
        for adapter in adapters:
            self._retired.setdefault(adapter, self._time)

    def since(self, name: str, begun: int) -> list[int]:
        """The adapters that a request may have which named its adapter at that time, or later."""
        return [
            adapter
            for adapter in self._named.get(name, ())
            if self._retired.get(adapter, begun + 1) > begun
        ]

    def launched(self, plan: Step, pool: FakeAdapters) -> None:
        """I10: a key of prefixes stands for one adapter for ever."""
        for sequence in plan.sequences:
            if sequence.adapter_slot >= 0:
                key, adapter = sequence.namespace[1], pool.content(sequence.adapter_slot)
                known = self.by_key.setdefault(key, adapter)
                hold("I10", known == adapter, "{} stands for {} and {}", key, known, adapter)
