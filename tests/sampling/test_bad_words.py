"""Words of every length at once, against a plain comparison."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from asyncinfer.sampling import TokenHistory
from asyncinfer.sampling.bad_words import BadWords, arrange
from asyncinfer.sampling.token_lists import TokenLists

VOCAB = 7
CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(8))
def test_the_last_token_of_every_word_that_would_be_completed_is_barred(seed: int) -> None:
    random = np.random.default_rng(seed)
    slots = 4
    history = TokenHistory(slots, CPU)
    words = BadWords(history)
    tokens = random.integers(0, 3, (slots, 40)).tolist()
    prompt_lens, positions = random.integers(1, 20, slots), random.integers(20, 40, slots)
    lists: list[tuple[tuple[int, ...], ...]] = []
    for slot in range(slots):
        history.join(slot, tokens[slot])
        position = int(positions[slot])
        lists.append(
            tuple(
                (*tokens[slot][max(0, position - length) : position], int(random.integers(VOCAB)))
                if random.random() < 0.5
                else tuple(random.integers(0, 3, length + 1).tolist())
                for length in random.integers(1, 34, 30).tolist()
            )
        )
        words.put(slot, arrange(lists[slot], VOCAB))
    order = random.permutation(slots)[:3]
    for _ in range(2):
        logits = torch.zeros(slots, VOCAB)
        rows = np.arange(3)
        words.bar(logits, order, rows, prompt_lens[order], positions[order])
        for row, slot in enumerate(order.tolist()):
            answer = tokens[slot][int(prompt_lens[slot]) : int(positions[slot])]
            expected = {
                word[-1]
                for word in lists[slot]
                if len(word) - 1 <= len(answer)
                and answer[len(answer) - len(word) + 1 :] == list(word[:-1])
            }
            assert set(logits[row].isneginf().nonzero()[:, 0].tolist()) == expected
    assert not logits[3].any()


def test_words_are_arranged_without_padding_the_short_to_the_long() -> None:
    words = arrange((tuple(range(200)), *((i, 1) for i in range(1000)), (5,), (9999,), ()), 2000)
    assert words.single == (5,)
    assert {width: len(last) for width, (_, last) in words.tables.items()} == {256: 1, 1: 1000}
    assert sum(prefixes.size for prefixes, _ in words.tables.values()) < 2 * (200 + 1000)


def test_answers_to_one_prompt_share_what_was_arranged() -> None:
    bad = tuple((i, i + 1, i + 2) for i in range(500))
    assert arrange(bad, 600) is arrange(tuple(bad), 600)
    assert not arrange(bad, 100).tables[2][1].max() > 99


def test_answers_to_one_prompt_share_the_tokens_that_are_allowed() -> None:
    """Two milliseconds of the decode thread for each answer, with the longest list."""
    lists, ids = TokenLists(CPU), tuple(range(65_536))
    tracemalloc.start()
    for slot in range(64):
        lists.put_ids(slot, ids)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 2 * 65_536 * 12
    rows, tokens, _ = lists.entries(np.array([3, 9]), np.array([0, 1]))
    assert tokens.tolist() == [*ids, *ids]
    assert rows.tolist() == [0] * 65_536 + [1] * 65_536
