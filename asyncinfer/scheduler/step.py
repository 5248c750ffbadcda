"""`Step`: one step, from its schedule to its delivery.

It is plain Python (no tensors), laid out as parallel lists: row `r` is
`slots[r], starts[r], counts[r], samples[r]`. A row may hold any number of query tokens and draw
any number of tokens, so that prefill chunks, decode and verification of speculated tokens are
one shape.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from asyncinfer.params import SamplingParams
from asyncinfer.scheduler.sequence import ChosenSampler, Sequence

__all__ = ["Join", "PageChanges", "Step"]


@dataclass(slots=True)
class Join:
    """A slot gets a new tenant before the step runs (also after a preemption)."""

    slot: int
    #: Every token known so far: the prompt, and after a preemption the answer so far.
    token_ids: abc.Sequence[int]
    #: How many of them are the prompt; the rest is the answer.
    prompt_len: int
    #: The block table of each KV group so far, in order; -1 where no token to come needs a page.
    tables: abc.Sequence[abc.Sequence[int]]
    params: SamplingParams
    #: Key of the request's random numbers, 64 bits.
    seed: int
    #: Tokens that end the answer (end-of-text and `stop_token_ids`): barred until `min_tokens`.
    stop_ids: frozenset[int] = frozenset()
    #: `bad_words`, tokenised.
    bad_ids: tuple[tuple[int, ...], ...] = ()
    #: In the order in which they are called; only the last may draw.
    samplers: tuple[ChosenSampler, ...] = ()


@dataclass(slots=True)
class PageChanges:
    """What changes in the pages of one KV group before a step is computed. Nobody tells when a page
    is given back: its place in the table is not read any more."""

    #: `(slot, index, page)`: block table entries added since the last step.
    grown: list[tuple[int, int, int]] = field(default_factory=list)
    #: `(source, target)` pages to copy whole before any row is computed (copy-on-write).
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """The scheduler writes it but for `handle`. A runner applies, in this order: `leaves`, `joins`,
    what each group's tables grow by, its copies; then it computes the rows."""

    number: int
    #: The rows: the slot of each.
    slots: list[int] = field(default_factory=list)
    #: Position of each row's first query token (= tokens already in its KV cache).
    starts: list[int] = field(default_factory=list)
    #: Query tokens of each row.
    counts: list[int] = field(default_factory=list)
    #: Tokens each row draws, at its last positions: 0 inside a prompt, 1 to go on.
    samples: list[int] = field(default_factory=list)
    #: Slots whose tenants left since the last step, and those that get one.
    leaves: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    #: Of each KV group; none at all where no table grows and nothing is copied.
    groups: list[PageChanges] = field(default_factory=list)
    #: Rows whose prompt logprobs were asked for: row -> how many alternatives.
    prompt_logprobs: dict[int, int] = field(default_factory=dict)

    #: The sequence of each row, which no runner looks at. Rows below `decodes` are decode rows.
    sequences: list[Sequence] = field(default_factory=list)
    decodes: int = 0
    #: While it is in flight: what its launch gave, for its collection. Written by the decode loop.
    handle: object = None

    #: What came out: rows that got tokens, prompt logprobs or an end, ascending. A row whose
    #: sequence had ended before the step was committed is not among them.
    advanced: list[int] = field(default_factory=list)
    #: New answer tokens of each row in `advanced`; empty for a chunk of a scored prompt.
    drawn: list[tuple[int, ...]] = field(default_factory=list)
    #: Of each row in `advanced`: "stop" (a stop token, included in the tokens), "length", or None
    #: where the sequence goes on.
    reasons: list[str | None] = field(default_factory=list)
    #: Sequences whose row failed, and why. They have ended; nothing of the row was committed.
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Query tokens of all rows."""
        return sum(self.counts)

    def add_decodes(self, decoding: abc.Iterable[Sequence]) -> None:
        """Add a row of one token for each of these that has a page for it, before all other rows.
        Runs for every token drawn: keep it lean."""
        sequences, slots, starts = self.sequences, self.slots, self.starts
        for sequence in decoding:
            position, draws_left = sequence.computed, sequence.draws_left
            if draws_left and position < sequence.capacity:
                slots.append(sequence.slot)
                starts.append(position)
                sequences.append(sequence)
                sequence.computed = position + 1
                sequence.draws_left = draws_left - 1
                sequence.in_flight += 1
        self.decodes = len(sequences)
        self.counts = [1] * self.decodes
        self.samples = [1] * self.decodes

    def add_chunk(self, sequence: Sequence, count: int) -> bool:
        """Add a row of prompt tokens, or of answer tokens to be computed again. Gives whether it
        draws, as it does after the last known token."""
        start = sequence.computed
        sequence.computed = end = start + count
        top = sequence.prompt_logprobs
        if top is not None and sequence.scored <= start < sequence.prompt_len - 1:
            self.prompt_logprobs[len(self.sequences)] = top
        draws = end == sequence.total_known
        self.slots.append(sequence.slot)
        self.starts.append(start)
        self.counts.append(count)
        self.samples.append(int(draws))
        self.sequences.append(sequence)
        sequence.in_flight += 1
        sequence.draws_left -= draws
        return draws

    def take_back(self) -> None:
        """The step is not computed: every sequence is where it was before it was scheduled."""
        for sequence, count, draws in zip(self.sequences, self.counts, self.samples, strict=True):
            sequence.in_flight -= 1
            sequence.draws_left += draws
            sequence.computed -= count
