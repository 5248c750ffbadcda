"""What the simulation is for: with a mend taken out it finds the fault, in so many steps at most.

Each hazard is one that the engine had, brought back where a call can be replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncinfer.engine import intake
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.deadlines import Deadlines
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.intake import Intake
from asyncinfer.engine.job import Job, Phase
from asyncinfer.engine.prompt_workers import PromptWorkers
from asyncinfer.engine.stream_buffer import StreamBuffer
from asyncinfer.engine.thread import DecodeThread
from asyncinfer.engine.watchdog import Watchdog
from asyncinfer.scheduler.queue import WaitingQueue
from asyncinfer.scheduler.scheduler import Scheduler
from asyncinfer.scheduler.step_budget import StepBudget
from asyncinfer.testing import simulate
from asyncinfer.testing.simulator.model import SimulatedModel

Plant = Callable[[pytest.MonkeyPatch], None]


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Plant:
    return lambda patch: patch.setattr(owner, name, function)


def inbox_forgotten(patch: pytest.MonkeyPatch) -> None:
    close = Admission.close

    def taken_only(self: Admission, error: Any) -> list[Job]:
        return [job for job in close(self, error) if job.phase is Phase.TAKEN]

    patch.setattr(Admission, "close", taken_only)


def prepared_for_nobody(patch: pytest.MonkeyPatch) -> None:
    def regardless(self: Intake, job: Job, *args: Any) -> None:
        try:
            self.prepare(job, *args)
        except BaseException:
            self._admission.refuse(job)
            raise
        if self._admission.advance(job, Phase.QUEUED):
            self._core.post(Command.SUBMIT, job)
        else:
            self._drop(job)

    patch.setattr(PromptWorkers, "drop", lambda self, task: False)
    patch.setattr(Intake, "prepare_here", regardless)
    patch.setattr(intake, "_go_on", lambda job: None)


def stalled_while_reading(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "unread_since", lambda self, now: self.paused_at)


def coalesced_lost(patch: pytest.MonkeyPatch) -> None:
    tell = StreamBuffer.tell

    def dropping(self: StreamBuffer, news: Any) -> None:
        if news.error is not None and len(self.chunks) > 1:
            self.chunks.popleft()
        tell(self, news)

    patch.setattr(StreamBuffer, "tell", dropping)


def thread_kept_that_never_ran(patch: pytest.MonkeyPatch) -> None:
    start = PromptWorkers._start

    def careless(self: Any) -> None:
        try:
            start(self)
        except Exception:
            self._threads += [None, None]

    patch.setattr(PromptWorkers, "_start", careless)


def removed_but_held(patch: pytest.MonkeyPatch) -> None:
    remove = WaitingQueue.remove
    held: list[Any] = []

    def keeping(self: WaitingQueue, request: Any) -> None:
        remove(self, request)
        held.append(request)
        del held[:-64]

    patch.setattr(WaitingQueue, "remove", keeping)


def bytes_kept(patch: pytest.MonkeyPatch) -> None:
    leave = Admission.leave

    def keeping(self: Admission, job: Job) -> None:
        leave(self, job)
        self.held_bytes += 1

    patch.setattr(Admission, "leave", keeping)


def close_goes_on_though_cancelled(patch: pytest.MonkeyPatch) -> None:
    drain = Frontend.drain

    def at_first(self: Frontend, seconds: float) -> None:
        if self.admission.drain_until is None:
            drain(self, seconds)

    patch.setattr(Frontend, "drain", at_first)


def only_steps_are_watched(patch: pytest.MonkeyPatch) -> None:
    hangs, gate = Watchdog._hangs, SimulatedModel._gate
    steps: list[int] = []

    def in_step(self: SimulatedModel, *args: Any) -> None:
        steps.append(1)
        try:
            gate(self, *args)
        finally:
            steps.pop()

    def looking(self: Watchdog, now: float) -> bool:
        if steps:
            return hangs(self, now)
        self._looked, self._turn = now, None
        return False

    patch.setattr(SimulatedModel, "_gate", in_step)
    patch.setattr(Watchdog, "_hangs", looking)


#: The first life's seed, the steps within which one of them fails, how, and the hazard.
HAZARDS: dict[str, tuple[int, int, str | tuple[str, ...], Plant]] = {
    "a death does not tell who is still in the inbox": (0, 4000, "liveness", inbox_forgotten),
    "a prompt is tokenised though its consumer left": (
        0,
        6000,
        "I13: a prompt",
        prepared_for_nobody,
    ),
    "a deadline keeps its request after the end": (
        0,
        1000,
        ("I9", "I13", "drain: a deadline"),
        replaced(Deadlines, "discard", lambda self, job: None),
    ),
    "a deadline waits for the step": (
        0,
        2000,
        "liveness",
        replaced(Watchdog, "_end", lambda self, jobs, now: None),
    ),
    "a close while opening is dropped": (
        0,
        2000,
        "drain: threads",
        replaced(DecodeThread, "cancel_open", lambda self: None),
    ),
    "a consumer that reads steadily is stalled": (50, 4000, "end: ", stalled_while_reading),
    "what was coalesced is lost at an error": (0, 4000, "I7", coalesced_lost),
    "a thread that cannot start is kept": (70, 6000, "liveness", thread_kept_that_never_ran),
    "what left the queue is held": (0, 1000, "I13", removed_but_held),
    "steps stay small after a lack of room": (
        20,
        4000,
        "I9",
        replaced(StepBudget, "computed", lambda self, *, retried: None),
    ),
    "a plugin that hangs outside a step is not seen": (
        0,
        4000,
        "liveness",
        only_steps_are_watched,
    ),
    "a close goes on though it is cancelled": (
        0,
        4000,
        "liveness",
        close_goes_on_though_cancelled,
    ),
    "a request's bytes are not given back": (
        0,
        1000,
        "drain",
        bytes_kept,
    ),
    "a request that ended after a retraction is held": (
        0,
        4000,
        "I13",
        replaced(Scheduler, "_forget_ended", lambda self: None),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("hazard", HAZARDS)
def test_is_found(hazard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, steps, how, plant = HAZARDS[hazard]
    plant(monkeypatch)
    (trace,) = simulate(seed, steps, checking="light", shrink=0).failures
    assert trace.failure.startswith(how), trace.failure
