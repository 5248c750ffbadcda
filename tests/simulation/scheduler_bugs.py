"""Bugs in steps in flight, and in the scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulation.planted import Plant, afterwards, instead, result

from asyncinfer.scheduler import Step
from asyncinfer.scheduler.admitter import Admitter
from asyncinfer.scheduler.committer import Committer
from asyncinfer.scheduler.inflight_prefixes import InflightPrefixes
from asyncinfer.scheduler.planner import Planner
from asyncinfer.scheduler.queue import WaitingQueue
from asyncinfer.scheduler.sequence import SequenceState
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.slot_allocator import SlotAllocator

__all__ = ["SCHEDULER_BUGS"]


def vacate_at_once(states: SequenceStates, sequence: Any) -> None:
    if states.leaving.pop(sequence.id, None) is not None:
        states.slots.vacate(sequence)


def release_at_once(states: SequenceStates, sequence: Any) -> None:
    if sequence.id in states.leaving:
        # As if no step in flight computed it.
        sequence.computed = sequence.committed
        states.release(sequence)


def deliver_ended(committer: Committer, step: Step, computed: Any) -> None:
    tokens = iter(computed.tokens)
    for row, draws in enumerate(step.samples):
        token = next(tokens) if draws else None
        if token is not None and step.drawn[row] is None and row not in computed.failed:
            step.drawn[row] = (token,)


def draw_again(draws: bool, step: Step, sequence: Any, count: int) -> bool:
    sequence.draws_left += draws
    return draws


def take_draws(step: Step) -> None:
    for sequence, draws in zip(step.sequences, step.samples, strict=True):
        sequence.draws_left -= draws


def leave_computed(step: Step) -> None:
    for sequence, count in zip(step.sequences, step.counts, strict=True):
        sequence.computed += count


def the_last_too(limit: int, admitter: Admitter, sequence: Any) -> int:
    return limit + (limit == len(sequence.tokens) - 1)


def scored_too(limit: int, admitter: Admitter, sequence: Any) -> int:
    return len(sequence.tokens) - 1


def score_again(step: Step, sequence: Any, count: int) -> None:
    row, top = len(step.sequences) - 1, sequence.prompt_logprobs
    if top is not None and step.starts[row] < sequence.prompt_len - 1:
        step.prompt_logprobs[row] = top


def hide_blocks(slots: SlotAllocator, step: Step) -> None:
    for changes in step.groups[:1]:
        changes.grown = [entry for entry in changes.grown if entry[1] % 3 != 2]


def first_untold(grow_each: Any) -> Any:
    def substitute(slots: SlotAllocator, sequences: Any) -> None:
        untold = len(sequences) > 1
        slots.blocks.grow_each(sequences[:untold])
        grow_each(slots, sequences[untold:])

    return substitute


def hide_leaves(slots: SlotAllocator, step: Step) -> None:
    step.leaves = []


def one_too_many(slots: SlotAllocator, sequence: Any, entries: Any) -> None:
    sequence.computed += bool(entries)
    sequence.committed += bool(entries)


def lose_resumed(resume: Any) -> Any:
    def substitute(states: SequenceStates, sequence: Any) -> None:
        lost = sequence.state is SequenceState.PAUSED and sequence.slot < 0
        resume(states, sequence)
        if lost:
            states.queue.remove(sequence)

    return substitute


def leave_in_queue(remove: Any) -> Any:
    def substitute(queue: WaitingQueue, sequence: Any) -> None:
        place = sequence.place
        remove(queue, sequence)
        place.sequence = sequence

    return substitute


SCHEDULER_BUGS: dict[str, Plant] = {
    # Steps in flight.
    "freed in flight at the end": afterwards(SequenceStates, "finish", vacate_at_once),
    "freed in flight by preemption": afterwards(SequenceStates, "preempt", release_at_once),
    "a token is delivered after the end": afterwards(Committer, "commit", deliver_ended),
    "too many draws": result(Step, "add_chunk", draw_again),
    # The scheduler.
    "a retracted draw is not drawn again": afterwards(Step, "take_back", take_draws),
    "a retracted chunk counts as computed": afterwards(Step, "take_back", leave_computed),
    "nothing is left to compute after a full hit": result(Admitter, "_reusable", the_last_too),
    "prompt logprobs lost to a prefix hit": result(Admitter, "_reusable", scored_too),
    "prompt logprobs twice after a preemption": afterwards(Step, "add_chunk", score_again),
    "the runner is not told of a block": afterwards(SlotAllocator, "flush", hide_blocks),
    "the runner is not told of a decoding sequence's block": instead(
        SlotAllocator, "grow_each", first_untold
    ),
    "the runner is not told who left": afterwards(SlotAllocator, "flush", hide_leaves),
    "the answer so far is forgotten": result(
        SlotAllocator,
        "join",
        lambda join, *args: replace(join, token_ids=join.token_ids[: join.prompt_len]),
    ),
    "a hit counts one token too many": afterwards(SlotAllocator, "allocate", one_too_many),
    "followers are forgotten": result(InflightPrefixes, "dissolve", lambda gone, *args: []),
    "a resumed sequence is lost": instead(SequenceStates, "resume", lose_resumed),
    "a removed sequence is admitted": instead(WaitingQueue, "remove", leave_in_queue),
    "a needy sequence is starved": result(Planner, "_relieve", lambda served, *args: served[1:]),
}
