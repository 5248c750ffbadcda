"""`Committer`: from a step's result to tokens, published blocks and ends."""

from __future__ import annotations

from asyncinfer.scheduler.counters import Counters
from asyncinfer.scheduler.sequence import Sequence, SequenceState
from asyncinfer.scheduler.sequence_states import SequenceStates
from asyncinfer.scheduler.step import Step
from asyncinfer.scheduler.step_runner import StepResult

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
        assert len(result.tokens) == sum(step.samples), "a token for every draw"
        self._counters.steps += 1
        self._commit_decodes(step, result)
        drawn = iter(result.tokens[step.decodes :])
        for row in range(step.decodes, len(step.sequences)):
            self._commit_row(step, row, next(drawn) if step.samples[row] else None, result)

    def _commit_decodes(self, step: Step, result: StepResult) -> None:
        """`_commit_row` of the rows below `decodes`, which draw one token each. Runs for every
        token drawn: keep it lean."""
        failed, size = result.failed, self._block_size
        advanced, drawn, reasons = step.advanced.append, step.drawn.append, step.reasons.append
        count = 0
        for row, (sequence, token) in enumerate(zip(step.sequences, result.tokens, strict=False)):
            if row == step.decodes:
                break
            if sequence.state is not RUNNING or failed:
                self._commit_row(step, row, token, result)
                continue
            sequence.in_flight -= 1
            sequence.committed = committed = sequence.committed + 1
            if not committed % size:
                self._publish(sequence)
            known = sequence.tokens
            known.append(token)
            count += 1
            advanced(row)
            drawn((token,))
            if len(known) < sequence.max_total and token not in sequence.stop_ids:
                reasons(None)
            else:
                reasons(self._end(sequence))
        self._counters.generated_tokens += count

    def _commit_row(self, step: Step, row: int, token: int | None, result: StepResult) -> None:
        """Commit the row of a sequence in whatever state."""
        sequence = step.sequences[row]
        sequence.in_flight -= 1
        if sequence.state is not FINISHED:
            error = result.failed.get(row)
            if error is not None:
                self._states.finish(sequence)
                step.failed.append((sequence, error))
            else:
                sequence.committed += step.counts[row]
                self._publish(sequence)
                scored = row in step.prompt_logprobs
                if scored:
                    sequence.scored = min(sequence.committed, sequence.prompt_len - 1)
                reason = None
                if token is not None:
                    if len(sequence.tokens) == sequence.prompt_len:
                        # The first draw: answers share the prompt's list, which must not change.
                        sequence.tokens, sequence.keys = [*sequence.tokens, token], [*sequence.keys]
                    else:
                        sequence.tokens.append(token)
                    self._counters.generated_tokens += 1
                    reason = self._end(sequence)
                if scored or token is not None:
                    step.advanced.append(row)
                    step.drawn.append(() if token is None else (token,))
                    step.reasons.append(reason)
        if not sequence.in_flight and sequence.id in self._states.leaving:
            self._states.release(sequence)

    def _publish(self, sequence: Sequence) -> None:
        self._blocks.commit(sequence, sequence.committed)
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
        elif len(known) >= sequence.max_total:
            reason = "length"
        else:
            return None
        self._states.finish(sequence)
        return reason
