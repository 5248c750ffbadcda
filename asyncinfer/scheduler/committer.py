"""`Committer`: from a step's result to tokens, published blocks and ends."""

from __future__ import annotations

from itertools import islice

from asyncinfer.errors import RequestFailed
from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.sequence import Sequence, SequenceState
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.step import Step
from asyncinfer.scheduler.step_runner import StepResult
from asyncinfer.scheduler.verification import agreed, verified

__all__ = ["Committer"]

RUNNING, FINISHED = SequenceState.RUNNING, SequenceState.FINISHED


class Committer:
    """Appends what a step drew, publishes full blocks, ends sequences that are done, and writes
    into the step what came out."""

    def __init__(self, block_size: int, states: SequenceStates, counters: Counters) -> None:
        self._block_size = block_size
        self._states = states
        self._counters = counters
        self._blocks = states.slots.blocks

    def commit(self, step: Step, result: StepResult) -> None:
        """Commit a step; steps come in the order in which they were scheduled."""
        tokens, decodes, rows = result.tokens, step.decodes, len(step.sequences)
        assert len(tokens) == sum(step.samples), "a token for every draw"
        self._counters.steps += 1
        # Filled in for the common case, that every decode row goes on.
        step.drawn = [*zip(tokens[:decodes], strict=True), *([()] * (rows - decodes))]
        step.reasons = [None] * rows
        self._commit_decodes(step, result)
        drawn = iter(tokens[decodes:])
        for row in range(decodes, rows):
            self._commit_row(step, row, tuple(islice(drawn, step.samples[row])), result)

    def _commit_decodes(self, step: Step, result: StepResult) -> None:
        """`_commit_row` of the rows below `decodes`, which draw one token each. Runs for every
        token drawn: keep it lean."""
        running, failed, size = RUNNING, result.failed, self._block_size
        rows, others = range(step.decodes), 0
        for row, sequence, token in zip(rows, step.sequences, result.tokens, strict=False):
            if sequence.state is not running or failed:
                others += 1
                self._commit_row(step, row, (token,), result)
                continue
            sequence.committed = committed = sequence.committed + 1
            if not committed % size:
                # `_publish` without `advance`: nobody waits for the prefix of a decoding sequence.
                self._blocks.publish(sequence, committed)
                self._blocks.trim(sequence, committed)
            known = sequence.tokens
            known.append(token)
            if token in sequence.stop_ids or len(known) >= sequence.max_total:
                step.reasons[row] = self._end(sequence)
        self._counters.generated_tokens += step.decodes - others

    def _commit_row(self, step: Step, row: int, draws: tuple[int, ...], result: StepResult) -> None:
        """Commit one row, whatever the state of its sequence."""
        sequence, error = step.sequences[row], result.failed.get(row)
        guides = sequence.guides is not None
        beam = sequence.candidates > 0
        draft = step.drafts.get(row, ())
        drawn, right = draws, len(draft)
        sequence.committed += step.counts[row]
        if guides and draws and error is None:
            # A guide goes on with the token that its sequence drew, in the row before.
            drawn = step.drawn[row - 1] or ()
            right = agreed(draft, drawn)
        elif draws and error is None and sequence.state is not FINISHED and not beam:
            usable = result.spoilt.get(row, len(draws))
            try:
                drawn, right = verified(sequence, draft, draws[:usable])
            except RequestFailed as failure:
                error = failure
        # The KV of wrong tokens is overwritten by the next row.
        wrong = len(draft) - right
        sequence.computed -= wrong
        sequence.committed -= wrong
        sequence.drafted = 0
        if sequence.state is FINISHED or error is not None:
            step.drawn[row] = None
            self._blocks.trim(sequence, sequence.committed)
            if sequence.state is not FINISHED and error is not None:
                self._states.finish(sequence)
                step.failed.append((sequence, error))
        else:
            if drawn and not beam:
                self._append(sequence, draws, drawn)
            if draft and sequence.drafter is not None:
                self._states.speculator.verified(sequence.drafter, len(draft), right)
            if row in result.predicted and sequence.drafter is not None:
                sequence.drafter.predicted = result.predicted[row]
            if wrong:
                self._states.slots.rewind(sequence)
            self._publish(sequence)
            if row in step.prompt_logprobs:
                sequence.scored = min(sequence.committed, sequence.prompt_len - 1)
            if guides:
                step.drawn[row] = ()
            elif drawn and beam:
                # The successors are chosen among all beams, so this draw appends nothing.
                step.drawn[row] = drawn
                sequence.draws_left += 1
                self._counters.generated_tokens += 1
            elif drawn:
                step.drawn[row] = drawn
                step.reasons[row] = self._end(sequence)
            elif sequence.prompt_only and sequence.committed == sequence.prompt_len:
                step.reasons[row] = "length"
                self._states.finish(sequence)
        if not sequence.in_flight and sequence.id in self._states.leaving:
            self._states.release(sequence)

    def _append(self, sequence: Sequence, draws: tuple[int, ...], drawn: tuple[int, ...]) -> None:
        """Append new tokens: those of `draws` that stand, and those that had to follow."""
        if len(sequence.tokens) == sequence.prompt_len:
            # The first draw: answers share the prompt's list, which must not change.
            sequence.tokens, sequence.keys = [*sequence.tokens, *drawn], [*sequence.keys]
        else:
            sequence.tokens.extend(drawn)
        if sequence.guides is None:
            self._counters.generated_tokens += len(drawn)
        sequence.draws_left += len(draws) - len(drawn)
        same = 0
        for one, other in zip(draws, drawn, strict=False):
            if one != other:
                break
            same += 1
        if same < len(drawn):
            self._states.slots.force(sequence, drawn[same:])

    def _publish(self, sequence: Sequence) -> None:
        self._blocks.publish(sequence, sequence.committed)
        self._blocks.trim(sequence, sequence.committed)
        if sequence.state is RUNNING:
            self._states.advance(sequence)

    def _end(self, sequence: Sequence) -> str | None:
        """End the sequence if its last token is its last one. Gives why, or None."""
        known = sequence.tokens
        if known[-1] in sequence.stop_ids and (
            len(known) - sequence.prompt_len >= sequence.params.min_tokens
        ):
            reason = "stop"
        elif sequence.matcher is not None and sequence.matcher.complete:
            reason = "complete"
        elif len(known) >= sequence.max_total:
            reason = "length"
        else:
            return None
        self._states.finish(sequence)
        return reason
