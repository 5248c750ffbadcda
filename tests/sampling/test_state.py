"""The sampler's promises: batches, slots, bars, extremes, costs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sampling import reference
from torch.utils._python_dispatch import TorchDispatchMode

from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Join

VOCAB = 97
NUMBERS = np.random.default_rng(11)
LOGITS = (NUMBERS.normal(size=(64, VOCAB)) * 3).astype(np.float32)

#: What a row may ask for; row `r` of the tests asks for kind `r % len(KINDS)`.
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.05, "temperature": 2.0},
    {"typical_p": 0.5},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.0},
    {"frequency_penalty": -0.5, "top_k": 20, "top_p": 0.8},
    {"logit_bias": {1: 3.0, 2: -3.0}},
    {"allowed_token_ids": range(10, 60), "top_p": 0.99},
    {"bad_ids": [(3,), (7, 8), (9, 7, 4)]},
    {"min_tokens": 50, "stop_ids": [0, 5], "top_p": 0.5},
    {"logprobs": 3, "temperature": 0.3},
]


def fill(sampling: Any, slot: int, number: int) -> None:
    """Request `number` into `slot`: its tokens, options and seed hang on the number only."""
    numbers = np.random.default_rng(number)
    prompt = numbers.integers(0, VOCAB, 1 + number % 9).tolist()
    answer = [*numbers.integers(0, VOCAB, number % 13).tolist(), 9, 7]
    sampling.put(slot, seed=number**9, prompt=prompt, answer=answer, **KINDS[number % len(KINDS)])


def test_seeded_draws_are_equal_alone_in_a_batch_and_in_any_slot(bench: Any) -> None:
    together = bench(VOCAB, 64)
    for number in range(64):
        fill(together, number, number)
    expected = together.draw(LOGITS, range(64))
    assert together.draw(LOGITS, range(64)) == expected

    for number in range(64):
        alone = bench(VOCAB, 1)
        fill(alone, 0, number)
        assert alone.draw(LOGITS[number : number + 1], [0]) == [expected[number]]

    order = NUMBERS.permutation(64)
    shuffled = bench(VOCAB, 64)
    for slot, number in enumerate(order.tolist()):
        fill(shuffled, slot, number)
    assert shuffled.draw(LOGITS[order], range(64)) == [expected[n] for n in order]
    some = order[:17]
    assert together.draw(LOGITS[some], some) == [expected[n] for n in some]


def test_a_slot_forgets_its_last_tenant(bench: Any) -> None:
    sampling, fresh = bench(VOCAB, 1), bench(VOCAB, 1)
    for number in range(3 * len(KINDS)):
        fill(sampling, 0, number)
        sampling.draw(LOGITS[:1], [0])
    sampling.state.leave(0)
    sampling.state.leave(0)
    kept = sampling.state._processors
    lists = (kept._biases._lists, kept._allowed._lists, kept._stops._lists)
    assert not any([*lists, kept._bad_words._words])
    fill(sampling, 0, 14)
    fill(fresh, 0, 14)
    assert sampling.draw(LOGITS[:1], [0]) == fresh.draw(LOGITS[:1], [0])
    assert sampling.state._table[0] == fresh.state._table[0]


def test_rows_that_ask_for_nothing_keep_their_logits_bit_for_bit(bench: Any) -> None:
    sampling = bench(VOCAB, 64)
    for number in range(64):
        fill(sampling, number, number)
    logits = torch.tensor(LOGITS)
    sampling.state.sample(logits, np.arange(64), sampling.lengths)
    changing = {6, 7, 8, 9, 10, 11, 12}
    for number in range(64):
        if number % len(KINDS) not in changing:
            assert torch.equal(logits[number], torch.tensor(LOGITS[number]))


class Operations(TorchDispatchMode):
    """Records the names of the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations(sampling: Any, rows: int) -> list[str]:
    logits = torch.tensor(LOGITS[:rows])
    with Operations() as seen:
        sampling.state.sample(logits, np.arange(rows), sampling.lengths[:rows])
    return seen.names


def test_a_greedy_batch_is_one_maximum(bench: Any) -> None:
    sampling = bench(VOCAB, 8)
    for slot in range(8):
        sampling.put(slot, temperature=0.0, top_p=0.3, top_k=3, min_p=0.5)
    assert operations(sampling, 8) == ["max"]


def test_the_number_of_operations_does_not_grow_with_the_batch(bench: Any) -> None:
    small, large = bench(VOCAB, 2 * len(KINDS)), bench(VOCAB, 4 * len(KINDS))
    for number in range(4 * len(KINDS)):
        if number < 2 * len(KINDS):
            fill(small, number, number)
        fill(large, number, number)
    assert operations(small, 2 * len(KINDS)) == operations(large, 4 * len(KINDS))


def test_options_nobody_uses_run_nothing(bench: Any) -> None:
    sampling = bench(VOCAB, 8)
    for slot in range(8):
        sampling.put(slot)
    plain = operations(sampling, 8)
    assert not {"topk", "sort", "index", "index_put_", "cumsum", "div_", "scatter_"} & set(plain)


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 9e-6])
def test_a_tiny_temperature_is_greedy_and_ties_go_to_the_lowest_id(  # fault 36
    bench: Any, temperature: float
) -> None:
    sampling = bench(5, 1)
    sampling.put(0, temperature=temperature, seed=3)
    rows = [[0, 1e4, -1e4, 1e4, 3], [0, 0, 0, 0, 0], [-3e38, -3e38, 3e38, 0, 0]]
    assert sampling.draw(rows, [0, 0, 0], [1, 2, 3]) == [1, 0, 2]


@pytest.mark.parametrize("options", [*KINDS[2:6], {"temperature": 1e-5}, {"temperature": 1e6}])
def test_extreme_logits_do_not_overflow(bench: Any, options: dict[str, Any]) -> None:
    sampling = bench(4, 1)
    sampling.put(0, seed=1, **options)
    low = -math.inf
    rows = [[1e4, -1e4, low, -3e38], [3e38, -3e38, low, low], [low, low, low, -3e38]]
    sampled = sampling.state.sample(torch.tensor(rows), np.zeros(3, np.int64), np.arange(3) + 1)
    assert sampled.peak.tolist() == pytest.approx([1e4, 3e38, -3e38])
    allowed = [{0, 1, 3} if options.get("temperature") == 1e6 else {0}, {0, 1}, {3}]
    for token, choices in zip(sampled.tokens.tolist(), allowed, strict=True):
        assert token in choices


@pytest.mark.parametrize("options", KINDS)
def test_a_vocabulary_of_one(bench: Any, options: dict[str, Any]) -> None:
    sampling = bench(1, 1)
    fitting = {k: v for k, v in options.items() if k not in {"logit_bias", "allowed_token_ids"}}
    fitting |= {"bad_ids": []} if "bad_ids" in fitting else {}
    sampling.put(0, seed=1, **fitting)
    assert sampling.draw([[0.5]], [0]) == [0]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_cannot_be_drawn_are_marked_and_leave_others_alone(  # fault 26
    bench: Any, options: dict[str, Any], value: float
) -> None:
    sampling = bench(VOCAB, 3)
    for slot in range(3):
        sampling.put(slot, seed=slot, **options)
    expected = sampling.draw(LOGITS[:3], range(3))
    logits = torch.tensor(LOGITS[:3])
    logits[1] = value if value < 0 else torch.where(torch.arange(VOCAB) == 20, value, logits[1])
    sampled = sampling.state.sample(logits, np.arange(3), sampling.lengths)
    assert sampled.peak.isfinite().tolist() == [True, False, True]
    drawn = sampled.tokens.tolist()
    assert [drawn[0], drawn[2]] == [expected[0], expected[2]]
    assert 0 <= drawn[1] < VOCAB


def test_a_row_with_every_token_barred_is_marked(bench: Any) -> None:
    sampling = bench(3, 2)
    sampling.put(0, allowed_token_ids=[1, 2], min_tokens=2, stop_ids=[1], bad_ids=[(2,)])
    sampling.put(1, allowed_token_ids=[1, 2], min_tokens=2, stop_ids=[1])
    sampled = sampling.state.sample(torch.zeros(2, 3), np.arange(2), sampling.lengths)
    assert sampled.peak.tolist() == [-math.inf, 0.0]
    assert sampled.tokens[1] == 2


def test_stop_tokens_are_barred_up_to_min_tokens(bench: Any) -> None:
    sampling = bench(3, 1)
    sampling.put(0, temperature=0.0, prompt=[2, 2], min_tokens=3, stop_ids=[0, 77])
    row = [[9.0, 1.0, 0.0]]
    assert [sampling.draw(row, [0], [p])[0] for p in (2, 3, 4, 5)] == [1, 1, 1, 0]


def test_bad_words_match_the_answer_only(bench: Any) -> None:
    sampling = bench(6, 1)
    row = [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]

    def drawn(prompt: list[int], answer: list[int]) -> int:
        words = [(1, 2, 5), (5,), (2, 5), (3, 4), ()]
        sampling.put(0, temperature=0.0, prompt=prompt, answer=answer, bad_ids=words)
        token: int = sampling.draw(row, [0])[0]
        return token

    assert drawn([1, 3], []) == 4
    assert drawn([1], [3]) == 3
    assert drawn([3], [1, 2]) == 4
    sampling.put(0, temperature=0.0, prompt=[1], answer=[1, 2], bad_ids=[(1, 2, 5), (1, 1, 5)])
    assert sampling.draw(row, [0]) == [4]
    sampling.put(0, temperature=0.0, prompt=[1], answer=[2], bad_ids=[(1, 2, 5), (99, 5), (2, 99)])
    assert sampling.draw(row, [0]) == [5]


def test_penalties_leave_padding_and_the_next_step_alone(bench: Any) -> None:
    sampling = bench(6, 3)
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.25, "repetition_penalty": 2.0}
    texts: list[tuple[list[int], list[int]]] = [
        ([3, 3], []), ([1], [1, 4, 1, 1, 2]), ([2, 5, 0, 1, 4, 3, 3, 3], [5])
    ]  # fmt: skip
    for slot, (prompt, answer) in enumerate(texts):
        params = sampling.put(slot, prompt=prompt, answer=answer, **penalties)
    logits = NUMBERS.normal(size=(3, 6)).astype(np.float32)
    expected = [
        reference.changed_logits(row.tolist(), params, *text)
        for row, text in zip(logits, texts, strict=True)
    ]
    for order in ([0, 1, 2], [2, 0], [1], [0, 1, 2]):
        changed = torch.tensor(logits[order])
        sampling.state.sample(changed, np.array(order), sampling.lengths[order])
        np.testing.assert_allclose(changed, np.array(expected)[order], rtol=1e-6)


def test_a_batch_larger_than_one_part_draws_the_same(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = bench(VOCAB, 64)
    for number in range(64):
        fill(sampling, number, number)
    whole = sampling.draw(LOGITS, range(64))
    monkeypatch.setattr("asyncinfer.sampling.state.MOST_ENTRIES", 5 * VOCAB)
    assert sampling.draw(LOGITS, range(64)) == whole


def test_several_draws_of_one_slot_each_see_what_came_before(bench: Any) -> None:
    # As when speculated tokens are verified: positions 3, 4 and 5 of the same sequence.
    sampling = bench(6, 1)
    tokens, options = [1, 4, 4, 2, 0], {"frequency_penalty": 0.5, "repetition_penalty": 1.5}
    params = sampling.put(0, prompt=tokens[:2], answer=tokens[2:], **options)
    logits = NUMBERS.normal(size=(3, 6)).astype(np.float32)
    changed = torch.tensor(logits)
    sampling.state.sample(changed, np.zeros(3, np.int64), np.array([3, 4, 5]))
    expected = [
        reference.changed_logits(row.tolist(), params, tokens[:2], tokens[2:end])
        for row, end in zip(logits, (3, 4, 5), strict=True)
    ]
    np.testing.assert_allclose(changed, expected, rtol=1e-6)


def test_seeds_of_64_bits_and_negative_ones(bench: Any) -> None:
    sampling = bench(VOCAB, 4)
    for slot, seed in enumerate([-1, 2**64 - 1, 2**63, -(2**63)]):
        sampling.put(slot, seed=seed)
    drawn = sampling.draw(np.repeat(LOGITS[:1], 4, axis=0), range(4))
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    probs = reference.probabilities(LOGITS[0].tolist(), SamplingParams())
    assert drawn[0] == reference.draw(probs, -1, 1)


@pytest.mark.parametrize("before", [{"candidates": 3}, {"logprob_token_ids": [4, 5]}])
def test_alternatives_of_a_slot_are_not_those_that_its_last_request_asked_for(
    bench: Any, before: dict[str, Any]
) -> None:
    sampling = bench(VOCAB, 2)
    candidates = before.get("candidates", 0)
    params = SamplingParams(**{k: v for k, v in before.items() if k != "candidates"})
    for slot in range(2):
        sampling.state.join(slot, Join(slot, [0], 1, [], params, 0, candidates=candidates))
    sampling.put(1, logprobs=3, logit_bias={7: 50.0})
    sampled = sampling.state.sample(
        torch.from_numpy(LOGITS[:2]).clone(), np.arange(2), np.ones(2, int)
    )
    likeliest = torch.from_numpy(LOGITS[1]).topk(3).indices.tolist()
    assert sampled.scores[3][1, :3].tolist() == likeliest
