"""Links to replicas that carry pickled data, and break when they are told to."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

from asyncinfer.remote import Replica, ReplicaLost
from asyncinfer.testing import FakeModel, StepGate
from asyncinfer.text import ChatTemplate

__all__ = ["TEMPLATE", "Wire", "wires"]

SECRET = b"the secret of tests"
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")


class Wire:
    """A link to a replica in this process. What goes over it is pickled. `kill` loses the replica
    with all that it does; `revive` makes another in its place."""

    def __init__(self, make: Callable[[], Replica]) -> None:
        self._make = make
        self.replica = make()
        self.dead: asyncio.Event = asyncio.Event()
        #: Names of the calls that were made.
        self.calls: list[str] = []
        #: Whether calls are never answered, and methods whose calls are not.
        self.mute = False
        self.hold: set[str] = set()

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        if self.mute or method in self.hold:
            await asyncio.Event().wait()
        given = pickle.loads(pickle.dumps(args))
        if self.dead.is_set():
            raise ReplicaLost(f"{method}: connection refused")
        work = asyncio.ensure_future(getattr(self.replica, method)(*given))
        # Whoever called may have left.
        work.add_done_callback(lambda work: work.cancelled() or work.exception())
        end = asyncio.ensure_future(self.dead.wait())
        await asyncio.wait([work, end], return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if not work.done():
            work.cancel()
            raise ReplicaLost(f"{method}: connection reset")
        try:
            return pickle.loads(pickle.dumps(work.result()))
        except Exception as error:
            raise pickle.loads(pickle.dumps(error)) from None

    async def kill(self) -> None:
        self.dead.set()
        await self.replica.close(0.0)

    def revive(self) -> None:
        self.replica = self._make()
        self.dead = asyncio.Event()


def wires(count: int = 2, gates: list[StepGate] | None = None, **options: Any) -> dict[str, Wire]:
    """Links to so many replicas of a fake model; each has its gate."""

    def maker(index: int) -> Callable[[], Replica]:
        gate = None if gates is None else gates[index]

        def make() -> Replica:
            source = FakeModel(template=TEMPLATE, gate=gate)
            return Replica(source, **{"prefix_secret": SECRET, "block_size": 4, **options})

        return make

    return {f"replica-{index}": Wire(maker(index)) for index in range(count)}
