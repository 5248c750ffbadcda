"""How drafts are made, and how long they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncinfer.params import SamplingParams
from asyncinfer.protocols import DraftRequest
from asyncinfer.speculation import (
    DraftCost,
    Drafter,
    PackedTokens,
    PromptLookup,
    Speculator,
    StepCosts,
)
from asyncinfer.speculation.acceptance import Acceptance
from asyncinfer.speculation.drafter import AnswerView
from asyncinfer.speculation.prediction import Prediction
from asyncinfer.speculation.suffix_table import SuffixTable

tokens = st.lists(st.sampled_from((0, 1, 256, 65_536, 16_777_216)), max_size=12)


@given(tokens, st.lists(st.sampled_from((0, 1, 256, 65_536)), min_size=1, max_size=3))
def test_runs_are_found_where_they_are(text: list[int], run: list[int]) -> None:
    packed = PackedTokens(text[:3])
    packed.extend(text[3:])
    places = [i for i in range(len(text)) if text[i : i + len(run)] == run]
    assert packed.first(run, 0, len(text)) == (places[0] if places else -1)
    assert packed.last(run, 0, len(text)) == (places[-1] if places else -1)
    assert packed.slice(0, len(text)) == text


@pytest.mark.parametrize("count", [3, 5000])
def test_bytes_that_match_within_tokens_cost_few_searches(count: int) -> None:
    """Each token of the text has the bytes of the run, shifted: a million took 0.2 s a search."""
    text, run, calls = [256] * count, [1, 1, 1, 1], 0
    packed = PackedTokens([*text, *run, *text, *run, *text])

    def counted(frame: object, event: str, called: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    sys.setprofile(counted)
    try:
        found = packed.first(run, 0, len(packed)), packed.last(run, 0, len(packed))
        none = packed.first([1, 2], 0, len(packed)), packed.last(run, 0, count)
    finally:
        sys.setprofile(None)
    assert found == (count, 2 * count + 4)
    assert none == (-1, -1)
    assert calls < 500


def lookup(known: list[int], most: int = 4, **options: int) -> list[int]:
    drafter = Drafter(SamplingParams(), 1, 0)
    drafter.known, drafter.wanted = known, most
    return [*PromptLookup(**options).propose([AnswerView(drafter)])[0]]


def test_prompt_lookup_goes_on_as_the_text_did() -> None:
    assert lookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6, 9]
    # The latest place counts.
    assert lookup([1, 2, 3, 4, 7, 1, 2, 3, 5, 8, 1, 2, 3])[:2] == [5, 8]
    # And the longer run before the later place.
    assert lookup([5, 6, 1, 2, 3, 4, 0, 0, 1, 2, 3, 7, 5, 6, 1, 2, 3], longest=5)[0] == 4
    assert lookup([1, 2, 3]) == []
    assert lookup([1, 2, 3, 4, 5, 6]) == []
    # A loop goes on.
    assert lookup([1, 2, 1, 2, 1, 2], most=5) == [1, 2, 1, 2, 1]


def asked(scope: str, known: list[int], most: int = 4) -> AnswerView:
    drafter = Drafter(SamplingParams(), 1, 0, scope=scope)
    drafter.known, drafter.wanted = known, most
    return AnswerView(drafter)


def test_a_suffix_table_goes_on_as_an_earlier_answer_did() -> None:
    table = SuffixTable()
    first = asked("ours", [9, 9, 1, 2, 3, 4, 5, 6])
    assert table.propose([first]) == [[]]
    table.end(first)
    assert table.propose([asked("ours", [7, 1, 2, 3])]) == [[4, 5, 6]]
    # The last time counts, and the longer run before that.
    table.end(asked("ours", [1, 2, 3, 8, 8]))
    assert table.propose([asked("ours", [7, 1, 2, 3], 1)]) == [[8]]
    table.end(asked("ours", [0, 0, 5, 1, 2, 3, 4]))
    table.end(asked("ours", [1, 2, 3, 8]))
    assert table.propose([asked("ours", [0, 0, 5, 1, 2, 3], 1)]) == [[4]]


def test_a_suffix_table_keeps_scopes_apart() -> None:
    table = SuffixTable()
    table.end(asked("theirs", [1, 2, 3, 4, 5, 6, 7, 8]))
    assert table.propose([asked("ours", [1, 2, 3, 4, 5, 6])]) == [[]]
    assert table.propose([asked("theirs", [1, 2, 3])]) == [[4, 5, 6, 7]]


def test_a_suffix_table_takes_a_scope_that_is_no_text() -> None:
    table = SuffixTable()
    table.end(asked("\ud800", [1, 2, 3, 4, 5]))
    assert table.propose([asked("\ud801", [1, 2, 3])]) == [[]]
    assert table.propose([asked("\ud800", [1, 2, 3])]) == [[4, 5]]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=60), st.integers(0, 60))
def test_tokens_learned_together_are_those_learned_one_by_one(text: list[int], at: int) -> None:
    # A secret of the process says which runs share a place, and the last to come keeps it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncinfer.speculation.suffix_table.token_bytes", bytes)
        slow, fast = SuffixTable(1 << 20), SuffixTable(1 << 20)
    drafter = Drafter(SamplingParams(), 1, 0)
    grows = AnswerView(drafter)
    for end in range(len(text) + 1):
        drafter.known, drafter.wanted = text[:end], 1
        slow.propose([grows])
    fast.propose([asked("", text)])
    probe = text[:at]
    assert slow.propose([asked("", probe, 8)]) == fast.propose([asked("", probe, 8)])


def test_a_suffix_table_takes_no_more_memory_and_learns_the_end_of_a_long_text() -> None:
    table = SuffixTable(1 << 14)
    before = table.nbytes
    text = [7 * i % 50_021 for i in range(20_000)]
    table.end(asked("", text))
    assert table.nbytes == before
    # Some runs share a place of so small a table; which ones do depends on a secret of the process.
    ends = range(len(text) - 1_000, len(text), 10)
    found = [table.propose([asked("", text[end - 12 : end])])[0][:1] == [text[end]] for end in ends]
    assert sum(found) >= 80
    assert table.propose([asked("", text[:10])]) == [[]]


def test_a_prediction_is_followed_until_it_differs_and_found_again() -> None:
    expected = list(range(100, 140))
    prediction = Prediction(PackedTokens(expected))
    assert prediction.following([], 3) == [100, 101, 102]
    assert prediction.following([100, 101], 3) == [102, 103, 104]
    # Something else instead of 102, and then the expected text again.
    assert prediction.following([100, 101, 7], 3) == []
    assert prediction.following([100, 101, 7, 103], 3) == []
    assert prediction.following([100, 101, 7, 103, 104], 3) == [105, 106, 107]
    assert prediction.following([100, 101, 7, 103, 104, *range(105, 140)], 3) == []


def test_lengths_follow_what_was_right() -> None:
    acceptance, length = Acceptance(0.6, 32), 100
    lengths = []
    for _ in range(8):
        lengths.append(acceptance.wanted(length, DraftCost(0.1)))
        length += lengths[-1] + 1
        acceptance.verified(length, lengths[-1], lengths[-1], DraftCost(0.1))
    assert lengths[0] < 8
    assert lengths == sorted(lengths)
    assert lengths[-1] > 20


def test_what_does_not_pay_rests_for_longer_and_longer() -> None:
    acceptance, tried = Acceptance(0.6, 32), []
    for length in range(2000):
        wanted = acceptance.wanted(length, DraftCost(0.3))
        if wanted:
            tried.append(length)
            acceptance.verified(length, wanted, 0, DraftCost(0.3))
    rests = [b - a for a, b in pairwise(tried)]
    assert rests[-1] >= 500
    assert len(tried) < 16


def test_a_right_draft_is_followed_by_another_though_the_share_is_still_low() -> None:
    acceptance, cost = Acceptance(0.3, 32), DraftCost(0.6)
    assert acceptance.wanted(100, cost) == 2
    acceptance.verified(103, 2, 2, cost)
    assert acceptance.wanted(103, cost) == 2
    acceptance.verified(104, 2, 0, cost)
    assert acceptance.wanted(104, cost) == 0


def test_who_finds_nothing_looks_at_every_eighth_token() -> None:
    drafter = Drafter(SamplingParams(), 0, 0, prediction=PackedTokens(range(100, 160)))
    speculator, looked, drafted = Speculator(), [], []
    for length in range(1, 40):
        # Another text at first, then what was expected.
        drafter.known = [5] * min(length, 24) + list(range(110, 110 + length - 24))
        before = drafter.resting_until
        speculator.draft([drafter], 1, 1)
        if before <= length:
            looked.append(length)
        if drafter.draft:
            drafted.append(length)
            assert drafter.draft[0] == drafter.known[-1] + 1
    # Three times without a pause, and again from where it found something.
    assert looked == [1, 2, 3, 4, 12, 20, *range(28, 40)]
    assert drafted == [*range(28, 40)]


def test_no_draft_where_a_token_costs_a_token() -> None:
    assert Acceptance(0.9, 32).wanted(10, DraftCost(0.95)) == 0
    # Nor where a draft costs more than it can bring.
    assert Acceptance(0.6, 32).wanted(10, DraftCost(0.01, 1.1)) == 9
    assert Acceptance(0.6, 32).wanted(10, DraftCost(0.01, 26.0)) == 0
    # A short one tells whether a method is better than it is taken to be.
    assert Acceptance(0.6, 32).wanted(10, DraftCost(0.01, 1.6)) == 2


def test_costs_are_learned() -> None:
    costs = StepCosts()
    assert 0.0 < costs.cost(1).token < 0.2
    for tokens in (9, 5, 17, 33) * 6:
        costs.add(1, 0.010, False)
        costs.add(tokens, 0.025 + 0.001 * tokens, True)
    cost = costs.cost(1)
    assert abs(cost.token - 0.1) < 0.01
    assert abs(cost.draft - 1.6) < 0.1
    assert cost.of(3) == cost.draft + 3 * cost.token
    for tokens in (1, 9, 16, 5) * 60:
        # Every token takes as long as every other.
        costs.add(tokens, 0.01 * tokens, tokens > 1)
    assert costs.cost(1).token > 0.9


def test_a_long_draft_is_no_outlier() -> None:
    """Times of SmolLM2 on two cores: a token of a full step costs what a row of it does."""
    costs = StepCosts()
    for _ in range(32):
        costs.add(1, 0.016, False)
        costs.add(16, 0.070, False)
    for tokens, seconds in ((28, 0.108), (3, 0.025), (96, 0.405), (33, 0.135), (17, 0.070)):
        costs.add(tokens, seconds, True)
    assert costs.cost(16).token > 0.85
    assert 0.2 < costs.cost(1).token < 0.3
    # A step that took far longer than so many tokens do says nothing.
    costs.add(33, 11.0, True)
    assert costs.cost(1).token < 1.0


def test_nothing_is_tried_where_even_right_drafts_would_not_pay() -> None:
    speculator, drafted = Speculator(), []
    for _ in range(8):
        speculator.costs.add(1, 0.01, False)
        speculator.costs.add(16, 0.16, False)
        speculator.costs.add(17, 0.17, True)
        speculator.costs.add(32, 0.32, True)
    drafters = [
        Drafter(SamplingParams(), 0, 0, prediction=PackedTokens(range(100, 900))) for _ in range(16)
    ]
    for length in range(1, 700):
        for drafter in drafters:
            drafter.known = list(range(100, 100 + length))
        speculator.draft(drafters, 16, 16)
        drafts = [drafter for drafter in drafters if drafter.draft]
        drafted += [(length, len(drafter.draft)) for drafter in drafts]
        speculator.costs.add(16 + 2 * len(drafts), 0.16 + 0.02 * len(drafts), bool(drafts))
        for drafter in drafts:
            speculator.verified(drafter, 2, 2)
    # One short draft of one answer in some 256 steps tells that it has not become cheaper.
    assert 1 <= len(drafted) <= 2
    assert all(tokens == 2 for _, tokens in drafted)


def test_a_draft_after_a_wrong_one_is_short_and_the_next_ones_longer() -> None:
    acceptance, cost = Acceptance(0.9, 32), DraftCost(0.02)
    acceptance.verified(40, 32, 32, cost)
    assert acceptance.wanted(40, cost) == 32
    acceptance.verified(60, 32, 19, cost)
    assert acceptance.wanted(60, cost) == 8
    acceptance.verified(69, 8, 8, cost)
    assert acceptance.wanted(69, cost) == 32


def test_an_answer_begins_with_what_others_showed() -> None:
    speculator = Speculator()
    speculator.costs.add(1, 0.01, False)
    first, later = (
        Drafter(SamplingParams(), 0, 0, prediction=PackedTokens(range(50))) for _ in range(2)
    )
    for length in range(20):
        first.known = list(range(length + 1))
        speculator.draft([first], 1, 1)
        if first.draft:
            speculator.verified(first, len(first.draft), 0)
    begun = len(first.methods)
    later.known = [0]
    fresh = Drafter(SamplingParams(), 0, 0, prediction=PackedTokens(range(50)))
    fresh.known = [0]
    Speculator().draft([fresh], 1, 1)
    speculator.draft([later], 1, 1)
    assert begun == 1
    assert 0 < len(later.draft) < len(fresh.draft)


class Reading:
    """A model that reads a prompt for every draft."""

    name, read_prompts = "reading", True
    failed: frozenset[DraftRequest] = frozenset()

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[7] for _ in requests]

    def end(self, request: DraftRequest) -> None:
        return None

    def close(self) -> None:
        return None


def test_only_the_drafts_that_a_model_read_prompts_for_took_longer() -> None:
    speculator = Speculator(model=Reading())
    for _ in range(4):
        speculator.costs.add(1, 0.01, False)
    asked = Drafter(SamplingParams(), 1, 0)
    expected = Drafter(SamplingParams(), 1, 0, prediction=PackedTokens([8, 9]))
    asked.known = expected.known = [3]
    assert speculator.draft([asked, expected], 1, 1)
    assert (asked.draft, expected.draft) == ([7], [8, 9])
    # Nobody asks the model.
    assert not speculator.draft([expected], 1, 1)
    assert expected.draft == [8, 9]
