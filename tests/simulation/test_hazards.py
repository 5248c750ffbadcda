"""What the simulation is for: with a mend taken out it finds the fault, in so many steps at most.

Each hazard is one that the engine had, brought back where a call can be replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncinfer.engine import closing, preparer, requests
from asyncinfer.engine.adapter_registry import AdapterRegistry, AdapterUse
from asyncinfer.engine.admission import Admission
from asyncinfer.engine.deadlines import Deadlines
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.inbox import Command
from asyncinfer.engine.intake import Intake
from asyncinfer.engine.prompt_workers import PromptWorkers
from asyncinfer.engine.request import Phase, Request
from asyncinfer.engine.stream_buffer import StreamBuffer
from asyncinfer.engine.thread import DecodeThread
from asyncinfer.engine.watchdog import Watchdog
from asyncinfer.errors import Overloaded
from asyncinfer.grammar import GrammarCompiler, Matcher
from asyncinfer.sampling import PluginSamplers
from asyncinfer.sampling.guarded_sampler import GuardedSampler
from asyncinfer.scheduler import Sequence, SequenceState
from asyncinfer.scheduler.planner import StepBudget
from asyncinfer.scheduler.queue import WaitingQueue
from asyncinfer.scheduler.scheduler import Scheduler
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.slot_allocator import SlotAllocator
from asyncinfer.telemetry.observers import Observers
from asyncinfer.testing import simulate
from asyncinfer.testing.simulator.model import SimulatedModel

Plant = Callable[[pytest.MonkeyPatch], None]


def replaced(owner: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, value)


def inbox_forgotten(patch: pytest.MonkeyPatch) -> None:
    close = Admission.close

    def taken_only(self: Admission, error: Any) -> list[Request]:
        return [request for request in close(self, error) if request.phase is Phase.TAKEN]

    patch.setattr(Admission, "close", taken_only)


def prepared_for_nobody(patch: pytest.MonkeyPatch) -> None:
    def regardless(self: Intake, request: Request, *args: Any) -> None:
        try:
            self._preparer.prepare(request, *args)
        except BaseException:
            self._admission.refuse(request)
            raise
        if self._admission.advance(request, Phase.QUEUED):
            self._core.post(Command.SUBMIT, request)
        else:
            self._drop(request)

    patch.setattr(PromptWorkers, "drop", lambda self, task: False)
    patch.setattr(Intake, "prepare_here", regardless)
    patch.setattr(preparer, "_raise_if_ended", lambda request: None)


def stalled_while_reading(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "unread_since", lambda self, now: self.paused_at)


def coalesced_lost(patch: pytest.MonkeyPatch) -> None:
    tell = StreamBuffer.tell

    def dropping(self: StreamBuffer, news: Any) -> None:
        if news.error is not None and len(self.chunks) > 1:
            self.chunks.popleft()
        tell(self, news)

    patch.setattr(StreamBuffer, "tell", dropping)


def raised_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    take_in = Intake.take_in

    async def raising(self: Intake, request: Request, *args: Any) -> None:
        await take_in(self, request, *args)
        if request.buffer.failed and request.buffer.chunks:
            assert request.buffer.outcome is not None
            raise request.buffer.outcome.raised()

    patch.setattr(Intake, "take_in", raising)


def guide_keeps_its_pages(patch: pytest.MonkeyPatch) -> None:
    vacate = SlotAllocator.vacate

    def keeping(self: SlotAllocator, sequence: Sequence) -> None:
        if sequence.guides is None or sequence.guides.state is not SequenceState.FINISHED:
            vacate(self, sequence)

    patch.setattr(SlotAllocator, "vacate", keeping)


def thread_kept_that_never_ran(patch: pytest.MonkeyPatch) -> None:
    start = PromptWorkers.start

    def careless(self: Any) -> None:
        try:
            start(self)
        except Exception:
            self._threads += [None, None]

    patch.setattr(PromptWorkers, "start", careless)


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

    def keeping(self: Admission, request: Request) -> None:
        leave(self, request)
        self.held_bytes += 1

    patch.setattr(Admission, "leave", keeping)


def close_goes_on_though_cancelled(patch: pytest.MonkeyPatch) -> None:
    drain = Frontend.drain

    def at_first(self: Frontend, seconds: float) -> None:
        if self.admission.drain_until is None:
            drain(self, seconds)

    patch.setattr(Frontend, "drain", at_first)


def only_steps_are_watched(patch: pytest.MonkeyPatch) -> None:
    hangs, gate = Watchdog.hangs, SimulatedModel.gate
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

    patch.setattr(SimulatedModel, "gate", in_step)
    patch.setattr(Watchdog, "hangs", looking)


def dropped_but_counted(patch: pytest.MonkeyPatch) -> None:
    tell = StreamBuffer.tell

    def counting(self: StreamBuffer, news: Any) -> None:
        first = self.outcome is None
        tell(self, news)
        if first:
            self.outcome = news

    patch.setattr(StreamBuffer, "tell", counting)


def refused_twice(patch: pytest.MonkeyPatch) -> None:
    charge = Admission.charge

    def twice(self: Admission, *args: Any) -> None:
        try:
            charge(self, *args)
        except Overloaded:
            self.refused += 1
            raise

    patch.setattr(Admission, "charge", twice)


def refusal_kept_by_its_frame(patch: pytest.MonkeyPatch) -> None:
    enter = Admission.enter

    def keeping(self: Admission, request: Request) -> None:
        try:
            enter(self, request)
        except Overloaded as error:
            kept = error
            raise kept from None

    patch.setattr(Admission, "enter", keeping)


def a_hang_told_on_threads_only(patch: pytest.MonkeyPatch) -> None:
    abandon = Observers.abandon

    def to_threads(self: Observers, *args: Any) -> None:
        receivers, direct = self._receivers, self._direct
        self._receivers, self._direct = [*self._threads], []
        abandon(self, *args)
        self._receivers, self._direct = receivers, direct

    patch.setattr(Observers, "abandon", to_threads)


def freed_in_use(patch: pytest.MonkeyPatch) -> None:
    def at_once(self: AdapterRegistry, use: AdapterUse) -> None:
        if use.retired and self.pool is not None:
            self.pool.release(use.loaded)

    patch.setattr(AdapterRegistry, "_free_if_idle", at_once)


def keyed_by_name(patch: pytest.MonkeyPatch) -> None:
    made = AdapterUse.__init__

    def named(self: AdapterUse, registry: AdapterRegistry, name: str, *rest: Any) -> None:
        made(self, registry, name, *rest)
        self.key = name

    patch.setattr(AdapterUse, "__init__", named)


def shared_matcher(patch: pytest.MonkeyPatch) -> None:
    made = GrammarCompiler.matchers

    def one(self: GrammarCompiler, form: Any, count: int, *rest: Any) -> list[Matcher]:
        return made(self, form, 1, *rest) * count

    patch.setattr(GrammarCompiler, "matchers", one)


def state_lost(patch: pytest.MonkeyPatch) -> None:
    leave = GuardedSampler.leave

    def forgetting(self: GuardedSampler, slot: int) -> None:
        leave(self, slot)

    patch.setattr(GuardedSampler, "leave", forgetting)


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
        replaced(Deadlines, "discard", lambda self, request: None),
    ),
    "a deadline waits for the step": (
        0,
        2000,
        "liveness",
        replaced(Watchdog, "_end", lambda self, requests, now: None),
    ),
    "a close while opening is dropped": (
        0,
        2000,
        "drain: threads",
        replaced(DecodeThread, "cancel_open", lambda self: None),
    ),
    "a consumer that reads steadily is stalled": (50, 4000, "end: ", stalled_while_reading),
    "what was coalesced is lost at an error": (0, 4000, "I7", coalesced_lost),
    "a late loop hears of an error before the tokens": (100, 2000, "I7", raised_before_it_is_read),
    "a thread that cannot start is kept": (
        0,
        6000,
        ("liveness", "end: a close raised"),
        thread_kept_that_never_ran,
    ),
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
        165,
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
    "rows of a small step are always the same": (
        2760,
        1000,
        "I9",
        replaced(SequenceStates, "rotate", lambda self, rows: None),
    ),
    "a close waits for as long as a step may take": (
        490,
        6000,
        "liveness: a close",
        replaced(closing, "CLOSE_GRACE", 1e9),
    ),
    "a refusal while a prompt is prepared counts twice": (85, 4000, "stats", refused_twice),
    "usage counts tokens that were dropped": (950, 4000, "I7", dropped_but_counted),
    "observers hear of an end twice": (
        208,
        1000,
        "observer",
        replaced(Admission, "claim_report", lambda self, request: True),
    ),
    "observers on the decode thread do not hear of its hang": (
        37,
        1000,
        "observer",
        a_hang_told_on_threads_only,
    ),
    "a request that ended after a retraction is held": (
        80,
        1000,
        "I13",
        replaced(Scheduler, "_forget_ended", lambda self: None),
    ),
    "an adapter is given away under its requests": (65, 6000, "end: ", freed_in_use),
    "an adapter has the prefixes of the one before it": (0, 4000, "end: ", keyed_by_name),
    "a load of an adapter outlives the engine": (
        20,
        1000,
        ("liveness: a load", "AssertionError"),
        replaced(AdapterRegistry, "refuse_loads", lambda self, error: None),
    ),
    "answers share what has come of their format": (80, 1000, ("I7", "end"), shared_matcher),
    "the runner is not told of tokens that must follow": (
        5002,
        1000,
        "end: ",
        replaced(SlotAllocator, "force", lambda self, sequence, tokens: None),
    ),
    "a guide keeps its pages": (40, 1000, ("I", "end: "), guide_keeps_its_pages),
    "a sampler begins anew after a preemption": (300, 1000, ("I7", "end"), state_lost),
    "a step without room leaves samplers changed": (
        232,
        2000,
        ("I7", "end"),
        replaced(PluginSamplers, "roll_back", lambda self: self.before.clear()),
    ),
    "a refusal keeps its request until the collector runs": (
        0,
        1000,
        "I13",
        refusal_kept_by_its_frame,
    ),
    "the error of a request keeps those of its step": (
        260,
        2000,
        "I13",
        replaced(requests, "drop_frames", lambda error: None),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("hazard", HAZARDS)
def test_is_found(hazard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed, steps, how, plant = HAZARDS[hazard]
    plant(monkeypatch)
    (trace,) = simulate(seed, steps, checking="light", shrink=0).failures
    assert trace.failure.startswith(how), trace.failure
