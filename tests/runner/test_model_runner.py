"""Steps on a tiny model, in every shape a plan can have, against one forward pass."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from support import columns

from asyncinfer.errors import RequestFailed

PROMPT = [5, 17, 3, 44, 9, 9, 21, 30, 2, 50, 11]
OTHER = [1, 2, 3]


def test_a_prompt_and_its_answer(hand: Any, greedy: Any) -> None:
    hand.join(0, PROMPT)
    hand.row(0, 0, len(PROMPT))
    tokens = hand.step().tokens
    tokens += hand.decode(0, len(PROMPT), 9)
    assert tokens == greedy(PROMPT, 10)
    assert len(set(tokens)) > 3


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 4, 3], [10, 1], [3, 5, 3]], ids=str)
def test_a_prompt_in_chunks(hand: Any, greedy: Any, chunks: list[int]) -> None:
    hand.join(0, PROMPT)
    start = 0
    for count in chunks:
        last = start + count == len(PROMPT)
        hand.row(0, start, count, samples=int(last))
        tokens = hand.step().tokens
        assert len(tokens) == last
        start += count
    assert tokens + hand.decode(0, start, 4) == greedy(PROMPT, 5)


def test_prefill_and_decode_in_one_step_and_results_in_the_order_of_the_plan(
    hand: Any, greedy: Any
) -> None:
    prompts = {slot: [(slot * 7 + i * i) % 55 for i in range(3 + 2 * slot)] for slot in range(6)}
    expected = {slot: greedy(prompt, 3) for slot, prompt in prompts.items()}
    for slot in (4, 1):
        hand.join(slot, prompts[slot])
        hand.row(slot, 0, len(prompts[slot]))
    assert hand.step().tokens == [expected[4][0], expected[1][0]]
    # Longer rows before and between the decode rows, one of them with nothing to draw.
    for slot in (5, 0, 2):
        hand.join(slot, prompts[slot])
    hand.row(5, 0, len(prompts[5]))
    hand.row(4, len(prompts[4]), 1)
    hand.row(2, 0, 4, samples=0)
    hand.row(1, len(prompts[1]), 1)
    hand.row(0, 0, len(prompts[0]))
    assert hand.step().tokens == [expected[5][0], expected[4][1], expected[1][1], expected[0][0]]
    hand.row(2, 4, len(prompts[2]) - 4)
    hand.row(0, len(prompts[0]), 1)
    hand.row(1, len(prompts[1]) + 1, 1)
    assert hand.step().tokens == [expected[2][0], expected[0][1], expected[1][2]]


def test_a_step_of_the_inside_of_a_prompt_draws_nothing(hand: Any) -> None:
    hand.join(0, PROMPT)
    hand.row(0, 0, 5, samples=0)
    assert hand.step().tokens == []


def test_a_plan_without_rows(hand: Any, greedy: Any) -> None:
    hand.join(0, OTHER)
    assert hand.step().tokens == []
    hand.row(0, 0, 3)
    assert hand.step().tokens == greedy(OTHER, 1)
    hand.leave(0)
    assert hand.step().tokens == []


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"frequency_penalty": 0.7}])
def test_two_steps_in_flight_equal_one(new_hand: Any, options: dict[str, Any]) -> None:
    from_one: list[int] = []
    from_two: list[int] = []
    for collected, in_flight in ((from_one, 1), (from_two, 2)):
        hand = new_hand()
        hand.join(0, PROMPT, seed=8, **options)
        hand.join(3, OTHER, seed=9, **options)
        hand.row(0, 0, len(PROMPT))
        hand.row(3, 0, len(OTHER))
        flights = [hand.launch()]
        for i in range(12):
            if len(flights) == in_flight:
                collected += hand.runner.collect(flights.pop(0)).tokens
            hand.row(3, len(OTHER) + i, 1)
            hand.row(0, len(PROMPT) + i, 1)
            flights.append(hand.launch())
        for flight in flights:
            collected += hand.runner.collect(flight).tokens
    assert from_one == from_two
    assert len(from_one) == 26


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "presence_penalty": 0.5}])
def test_a_join_after_a_preemption_goes_on_as_if_nothing_had_been(
    hand: Any, options: dict[str, Any]
) -> None:
    hand.join(0, PROMPT, seed=4, **options)
    hand.row(0, 0, len(PROMPT))
    undisturbed = hand.step().tokens + hand.decode(0, len(PROMPT), 9)
    hand.leave(0)
    hand.join(2, PROMPT, seed=4, **options)
    hand.row(2, 0, len(PROMPT))
    tokens = hand.step().tokens + hand.decode(2, len(PROMPT), 4)
    hand.leave(2)
    # Another sequence writes where it was; then it comes back to another slot.
    hand.join(2, OTHER * 5)
    hand.row(2, 0, 15)
    hand.step()
    known = PROMPT + tokens
    hand.join(1, known, prompt_len=len(PROMPT), seed=4, **options)
    hand.row(1, 0, 7, samples=0)
    hand.step()
    hand.row(1, 7, len(known) - 7)
    tokens += hand.step().tokens
    tokens += hand.decode(1, len(known), 4)
    assert tokens == undisturbed


def test_a_shared_prefix_and_a_copied_block(hand: Any, greedy: Any) -> None:
    hand.join(0, PROMPT)
    hand.row(0, 0, len(PROMPT))
    hand.step()
    shared = hand.tables[0]
    # Two full blocks are shared; the third is copied and its tail written over.
    target = hand.free.pop(0)
    fork = [*PROMPT[:10], 7, 8]
    hand.join(1, fork, blocks=[*shared[:2], target])
    hand.plan.groups[0].copies.append((shared[2], target))
    hand.row(1, 10, 2)
    hand.row(0, len(PROMPT), 1)
    forked, first = hand.step().tokens
    assert forked == greedy(fork, 1)[0]
    assert first == greedy(PROMPT, 2)[1]
    assert hand.decode(1, len(fork), 2) == greedy(fork, 3)[1:]
    assert hand.decode(0, len(PROMPT) + 1, 2) == greedy(PROMPT, 4)[2:]


def test_a_shorter_sequence_after_a_longer_one(hand: Any, greedy: Any) -> None:
    hand.join(0, PROMPT * 8)
    hand.row(0, 0, 88)
    hand.step()
    hand.leave(0)
    hand.join(0, OTHER)
    hand.join(1, PROMPT * 3)
    hand.row(0, 0, 3)
    hand.row(1, 0, 33)
    assert hand.step().tokens == greedy(OTHER, 1) + greedy(PROMPT * 3, 1)
    hand.row(1, 33, 1)
    hand.row(0, 3, 1)
    assert hand.step().tokens == greedy(PROMPT * 3, 2)[1:] + greedy(OTHER, 2)[1:]


def test_several_draws_of_a_row_verify_what_is_known(hand: Any, whole: Any, greedy: Any) -> None:
    hand.join(0, PROMPT)
    hand.join(1, OTHER)
    hand.row(1, 0, 3)
    hand.row(0, 0, len(PROMPT), samples=4)
    tokens = hand.step().tokens
    expected = whole(PROMPT).argmax(dim=-1).tolist()
    assert tokens == greedy(OTHER, 1) + expected[-4:]
    # Known tokens stay what they are: the answer goes on from the prompt.
    assert hand.decode(0, len(PROMPT), 2) == greedy(PROMPT, 3)[1:]


def test_logprobs_of_the_rows_that_ask(hand: Any, whole: Any) -> None:
    hand.join(0, PROMPT, logprobs=3, logit_bias={6: 100.0})
    hand.join(1, OTHER)
    hand.join(2, [*OTHER, 4], logprobs=0, temperature=1.0, seed=3)
    hand.row(0, 0, len(PROMPT), samples=2)
    hand.row(1, 0, 3)
    hand.row(2, 0, 4)
    result = hand.step()
    assert result.logprobs.keys() == {0, 2}
    exact = whole(PROMPT).double().log_softmax(dim=-1)
    entries = columns(result.logprobs[0])
    assert entries.token_ids == [6, 6]
    assert entries.logprobs == pytest.approx(exact[-2:, 6].tolist(), abs=1e-4)
    for row, top in zip(exact[-2:], entries.top, strict=True):
        best = row.topk(3)
        assert [token for token, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert entries.ranks[0] == int((exact[-2] > exact[-2, 6]).sum()) + 1
    drawn = columns(result.logprobs[2])
    assert drawn.token_ids == result.tokens[-1:]
    exact = whole([*OTHER, 4])[-1].double().log_softmax(dim=-1)
    assert drawn.logprobs == pytest.approx([exact[drawn.token_ids[0]].item()], abs=1e-4)
    assert drawn.top == [()]


@pytest.mark.parametrize("chunks", [[11], [4, 7], [1] * 11, [10, 1]], ids=str)
def test_prompt_logprobs_equal_the_whole_forward_pass(
    hand: Any, whole: Any, chunks: list[int]
) -> None:
    exact = whole(PROMPT).double().log_softmax(dim=-1)
    hand.join(3, OTHER)
    hand.join(0, PROMPT, prompt_logprobs=2)
    hand.row(3, 0, 3)
    hand.step()
    token_ids, logprobs, ranks, tops, start = [], [], [], [], 0
    for i, count in enumerate(chunks):
        hand.row(3, 3 + i, 1)
        hand.row(0, start, count, samples=int(start + count == len(PROMPT)))
        hand.plan.prompt_logprobs[1] = 2
        entries = columns(hand.step().prompt_logprobs[1])
        token_ids += entries.token_ids
        logprobs += entries.logprobs
        ranks += entries.ranks
        tops += entries.top
        start += count
    assert token_ids == PROMPT[1:]
    at = torch.arange(len(PROMPT) - 1)
    assert logprobs == pytest.approx(exact[at, PROMPT[1:]].tolist(), abs=1e-4)
    for row, token, rank, top in zip(exact, PROMPT[1:], ranks, tops, strict=False):
        assert rank == int((row > row[token]).sum()) + 1
        assert [t for t, _ in top] == row.topk(2).indices.tolist()


def test_prompt_logprobs_stop_at_the_prompt_and_come_in_slices(
    hand: Any, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    logits = hand.runner.decoder.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        asked.append(len(hidden))
        result: torch.Tensor = logits(hidden)
        return result

    monkeypatch.setattr(hand.runner.decoder, "logits", watched)
    prompt = (PROMPT * 55)[:600]
    known = [*prompt, 1, 2]  # as after a preemption
    hand.join(0, known, prompt_len=600, prompt_logprobs=0)
    hand.row(0, 0, 602)
    hand.plan.prompt_logprobs[0] = 0
    entries = columns(hand.step().prompt_logprobs[0])
    assert entries.token_ids == prompt[1:]
    assert asked == [1, 256, 256, 87]
    exact = whole(prompt).double().log_softmax(dim=-1)
    assert entries.logprobs == pytest.approx(
        exact[torch.arange(599), prompt[1:]].tolist(), abs=1e-4
    )


def test_tokens_beyond_the_tokenizers_are_never_drawn(  # fault 46
    hand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = hand.runner.decoder
    logits = decoder.logits

    def padding_wins(hidden: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = logits(hidden)
        values[:, 55:] = 1e4
        return values

    monkeypatch.setattr(decoder, "logits", padding_wins)
    hand.join(0, PROMPT, logprobs=60)
    hand.row(0, 0, len(PROMPT))
    result = hand.step()
    assert result.tokens[0] < 55
    entries = columns(result.logprobs[0])
    assert len(entries.top[0]) == 55
    assert sum(math.exp(value) for _, value in entries.top[0]) == pytest.approx(1.0, abs=1e-4)


def test_rows_with_logits_that_are_not_finite_fail_alone(  # fault 26
    hand: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = hand.runner.decoder
    logits = decoder.logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = logits(hidden)
        values[1, 30] = torch.nan
        return values

    monkeypatch.setattr(decoder, "logits", broken)
    for slot in (0, 1, 2):
        hand.join(slot, OTHER, logprobs=1)
        hand.row(slot, 0, 3)
    result = hand.step()
    assert result.failed.keys() == {1}
    assert isinstance(result.failed[1], RequestFailed)
    assert "nan" in str(result.failed[1])
    assert result.logprobs.keys() == {0, 2}
    assert [result.tokens[0], result.tokens[2]] == greedy(OTHER, 1) * 2
    assert len(result.tokens) == 3


def test_a_row_with_nothing_left_to_draw_fails(hand: Any) -> None:
    hand.join(0, OTHER, allowed_token_ids=[3], logit_bias={3: -1e4})
    hand.row(0, 0, 3)
    assert hand.step().tokens == [3]
    hand.plan.joins.clear()
    hand.join(0, OTHER, allowed_token_ids=[3])
    hand.plan.joins[0].bad_ids = ((3,),)
    hand.row(0, 0, 3)
    (failure,) = hand.step().failed.values()
    assert "barred" in str(failure)


def test_global_state_of_torch_is_left_alone(hand: Any) -> None:
    def state() -> tuple[Any, ...]:
        return (
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.get_rng_state().tolist(),
        )

    before = state()
    hand.join(0, PROMPT, temperature=1.0)
    hand.row(0, 0, len(PROMPT))
    hand.step()
    assert state() == before


def test_the_hosts_default_dtype_changes_nothing(new_hand: Any) -> None:
    def run() -> tuple[Any, ...]:
        fresh = new_hand()
        fresh.join(0, PROMPT, temperature=1.0, seed=5, top_p=0.9, logprobs=2, typical_p=0.9)
        fresh.row(0, 0, len(PROMPT))
        result = fresh.step()
        tokens = result.tokens + fresh.decode(0, len(PROMPT), 5)
        return tokens, result.logprobs

    expected = run()
    torch.set_default_dtype(torch.float64)
    try:
        assert run() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_close_drops_the_cache_and_the_weights(new_hand: Any) -> None:
    hand = new_hand()
    hand.join(0, PROMPT)
    hand.row(0, 0, len(PROMPT))
    runner = hand.runner
    flight = hand.launch()
    storage = weakref.ref(hand.kv.storage)
    runner.collect(flight)
    del hand
    assert storage() is not None
    runner.close()
    assert storage() is None
