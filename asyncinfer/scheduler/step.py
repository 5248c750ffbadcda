"""`Step`: one step, from its schedule to its delivery.

It is plain Python (no tensors), laid out as parallel lists: row `r` is
`slots[r], starts[r], counts[r], samples[r]`. A row may hold any number of query tokens and draw
any number of tokens, so that prefill chunks, decode and verification of speculated tokens are
one shape.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from asyncinfer.grammar import Matcher
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler.sequence import ChosenSampler, Sequence

__all__ = ["ForcedTokens", "Join", "PageChanges", "Step"]


@dataclass(slots=True)
class Join:
    """A slot gets a new sequence before the step runs (also after a preemption)."""

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
    #: Whether a mask restricts what is drawn: see `Step.matchers`.
    masked: bool = False
    #: Above 0: each draw comes with so many tokens that may follow, as logprobs of the tokens that
    #: are not barred.
    candidates: int = 0
    #: Slot of its LoRA adapter, -1 without one.
    adapter: int = -1
    #: It has a guide or is one; both join in one step. Only runner checks read this.
    paired: bool = False


@dataclass(slots=True)
class ForcedTokens:
    """Tokens that a slot's sequence continues with, though the runner did not draw them."""

    slot: int
    #: Position of the first of them in the sequence.
    start: int
    token_ids: abc.Sequence[int]


@dataclass(slots=True)
class PageChanges:
    """What changes in the pages of one KV group before a step is computed. Pages that are given
    back are not listed, since no row reads those entries of the table any more."""

    #: `(slot, index, page)`: block table entries added since the last step.
    grown: list[tuple[int, int, int]] = field(default_factory=list)
    #: `(source, target)` pages to copy whole before any row is computed (copy-on-write).
    copies: list[tuple[int, int]] = field(default_factory=list)
    #: For a state group, `(slot, tokens)`: the slot's last draft was partly wrong, and the state
    #: goes back to what it was after so many tokens of the sequence. Before any copy.
    rewound: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """The scheduler writes all of it but `handle` and `queued`. A runner applies, in this order:
    `leaves`; `joins` and `forced`, which never share a slot; then for each group it grows the
    tables, rewinds the states and copies the pages. Then it computes the rows."""

    number: int
    #: The rows: the slot of each.
    slots: list[int] = field(default_factory=list)
    #: Position of each row's first query token (= tokens already in its KV cache).
    starts: list[int] = field(default_factory=list)
    #: Query tokens of each row.
    counts: list[int] = field(default_factory=list)
    #: Tokens each row draws, at its last positions: 0 inside a prompt, 1 to go on, and one more for
    #: each token of its draft.
    samples: list[int] = field(default_factory=list)
    #: Slots whose sequences left since the last step, and those that get one.
    leaves: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    #: Tokens that were appended since the last step.
    forced: list[ForcedTokens] = field(default_factory=list)
    #: Changes of each KV group; empty where no table grows and nothing is copied.
    groups: list[PageChanges] = field(default_factory=list)
    #: Rows that end with drafted tokens: row -> its draft, which follows all known tokens. The row
    #: draws at the position of each drafted token, and at the one after them.
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: Rows whose prompt logprobs were asked for: row -> how many alternatives.
    prompt_logprobs: dict[int, int] = field(default_factory=dict)
    #: Rows of which hidden states are asked for: row -> "last" for that of its last token, "mean"
    #: for the sum over all.
    poolings: dict[int, str] = field(default_factory=dict)
    #: Rows that draw with a guide: row -> the guide's row, which is the next one and draws the same
    #: token; and the scale.
    guided: dict[int, tuple[int, float]] = field(default_factory=dict)
    #: Rows whose following tokens should be predicted after their draws: row -> how many at most.
    predicts: dict[int, int] = field(default_factory=dict)
    #: Rows whose draw a mask restricts: row -> what gives the mask.
    matchers: dict[int, Matcher] = field(default_factory=dict)

    #: The sequence of each row, which no runner looks at. Rows below `decodes` are decode rows.
    sequences: list[Sequence] = field(default_factory=list)
    decodes: int = 0
    #: When it was scheduled, in seconds of the scheduler's time.
    began: float = 0.0
    #: Rows below this one go on with an answer: decode rows, and those of stepwise sequences.
    answers: int = 0
    #: Whether a draft model read prompts before this step, which took time.
    read_prompts: bool = False
    #: What `StepRunner.launch` returned, for `collect`; None unless the step is in flight. The
    #: decode loop writes it.
    handle: object = None
    #: How many steps the runner wants in flight now, where it computes this one while the decode
    #: thread goes on, though it computes others within `launch`; else 0. The runner writes it.
    queued: int = 0

    #: What came out of each row, once the step is committed: new answer tokens, none inside a
    #: prompt. None where nothing was committed, since the row failed or its sequence had ended.
    drawn: list[tuple[int, ...] | None] = field(default_factory=list)
    #: Why the row's sequence ended: "stop" (a stop token, included in the tokens), "complete"
    #: (nothing more fits its grammar, and the last token is text), "length", or None where it did
    #: not end with this row.
    reasons: list[str | None] = field(default_factory=list)
    #: Sequences whose row failed, and why. They have ended; nothing of the row was committed.
    failed: list[tuple[Sequence, Exception]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Query tokens of all rows."""
        return sum(self.counts)

    @property
    def only_answers(self) -> bool:
        """Whether no tokens of a prompt are computed, so that its time is that of decoding."""
        return self.answers == len(self.sequences) and not self.read_prompts

    def first_draw(self, row: int) -> int:
        """Position of the first token that the row draws."""
        return self.starts[row] + self.counts[row] - self.samples[row] + 1

    def add_decodes(self, decoding: abc.Iterable[Sequence]) -> None:
        """Add a row of one token for each of these that has a page for it, before all other rows.
        Runs for every token drawn: keep it lean."""
        rows = [r for r in decoding if r.draws_left and r.computed < r.capacity]
        self.sequences = rows
        self.slots = [row.slot for row in rows]
        self.starts = [row.computed for row in rows]
        for row in rows:
            row.computed += 1
            row.draws_left -= 1
        self.decodes = len(rows)
        self.counts = [1] * self.decodes
        self.samples = [1] * self.decodes

    def add_chunk(self, sequence: Sequence, count: int, draft: abc.Sequence[int] = ()) -> bool:
        """Add a row of prompt tokens, or of answer tokens that are computed again. Returns whether
        it draws: only after the last known token, and if an answer is wanted. Only then it may have
        a draft."""
        start = sequence.computed
        sequence.computed = end = start + count
        top = sequence.prompt_logprobs
        if top is not None and sequence.scored <= start < sequence.prompt_len - 1:
            self.prompt_logprobs[len(self.sequences)] = top
        draws = end == sequence.total_known and not sequence.prompt_only
        if sequence.pooling is not None and start < sequence.prompt_len:
            self.poolings[len(self.sequences)] = sequence.pooling
        self.slots.append(sequence.slot)
        self.starts.append(start)
        if draws and sequence.matcher is not None:
            self.matchers[len(self.sequences)] = sequence.matcher
        if draws and sequence.drafter is not None and (most := sequence.drafter.predicts):
            self.predicts[len(self.sequences)] = most
        drafted = len(draft)
        if drafted:
            assert draws, "a draft comes after all tokens known"
            self.drafts[len(self.sequences)] = tuple(draft)
            sequence.drafted = drafted
            sequence.computed += drafted
        self.counts.append(count + drafted)
        self.samples.append(draws + drafted)
        self.sequences.append(sequence)
        sequence.draws_left -= draws + drafted
        return draws

    def take_back(self) -> None:
        """The step is not computed: every sequence is where it was before it was scheduled."""
        for sequence, count, draws in zip(self.sequences, self.counts, self.samples, strict=True):
            sequence.draws_left += draws
            sequence.computed -= count
            sequence.drafted = 0
