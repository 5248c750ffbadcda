"""What an ended request leaves behind: nothing."""

from __future__ import annotations

import contextvars
import gc
import weakref
from typing import Any

import anyio
import pytest

from asyncinfer import Engine, RequestFailed
from asyncinfer.testing import FakeModel

pytestmark = pytest.mark.anyio

CARRIED: contextvars.ContextVar[Any] = contextvars.ContextVar("carried")


class Carried:
    """Held by whatever holds the request's context variables."""


@pytest.mark.parametrize("end", ["finished", "aborted", "failed"])
async def test_a_deadline_in_an_hour_holds_no_ended_request(end: str) -> None:
    model = FakeModel(failing=lambda plan: {0: ArithmeticError("NaN")} if end == "failed" else {})
    async with Engine(model, drain_timeout=0.0) as engine:
        carried: list[weakref.ref[Carried]] = []

        async def request() -> None:
            thing = Carried()
            carried.append(weakref.ref(thing))
            token = CARRIED.set(thing)
            # The full buffer holds it back, so that leaving it is an abort.
            buffer = 2 if end == "aborted" else 256
            options = {"deadline": 3600.0, "logprobs": 3, "buffer": buffer}
            stream = engine.stream("hello" * 50, max_tokens=40, **options)
            CARRIED.reset(token)
            del thing
            if end == "failed":
                with pytest.raises(RequestFailed):
                    await stream
            elif end == "aborted":
                async with stream:
                    await anext(stream)
            else:
                await stream

        for _ in range(5):
            await request()
        # The turn of the decode thread that ended the last one may still run.
        with anyio.fail_after(120):
            while any(ref() for ref in carried):
                gc.collect()
                await anyio.sleep(0.01)
