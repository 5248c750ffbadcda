"""Ends that the decode thread came to, and could not tell in time."""

from __future__ import annotations

import contextvars
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from asyncinfer import DeadlineExceeded, SamplingParams
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.event_loops import current_bridge
from asyncinfer.engine.job import End, Job, Phase
from asyncinfer.engine.options import RequestOptions
from asyncinfer.engine.watchdog import Watchdog

pytestmark = pytest.mark.anyio


async def test_usage_of_a_request_whose_end_was_held_up_beyond_its_deadline() -> None:
    """The decode thread ended it, and is in a log handler before it could tell anybody."""
    now = 0.0
    admission = Admission(4, 1 << 20, lambda: now)
    posted: list[Any] = []
    core: Any = SimpleNamespace(turn_began=0.0, post=lambda *what: posted.append(what))
    watchdog = Watchdog(core, admission, 300.0, lambda: now, posted.clear)
    options = RequestOptions(priority=0, deadline=1.0, cache_scope="", buffer=8, on_full="pause")
    context = contextvars.copy_context()
    job = Job("req-1", current_bridge({}), SamplingParams(), options, now, context)
    admission.enter(job)
    admission.advance(job, Phase.TAKEN)
    job.prompt_len = 5
    now = 0.5
    admission.end(job, End.FINISHED, None)
    now = 2.0
    watchdog.turn()
    with anyio.fail_after(30):
        await job.buffer.wait_for(lambda: job.buffer.outcome)
    outcome = job.buffer.outcome
    assert outcome is not None
    assert isinstance(outcome.error, DeadlineExceeded)
    assert outcome.usage.prompt_tokens == 5
    assert outcome.timings.total == 0.5
