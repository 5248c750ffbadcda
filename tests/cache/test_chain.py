"""Chain keys."""

from __future__ import annotations

import pytest

from asyncinfer.cache import BlockHasher, chain_keys
from asyncinfer.cache.chain import PIECE

SECRET = b"0123456789abcdef"


def test_a_key_names_its_block_and_everything_before_it() -> None:
    tokens = list(range(100, 112))
    keys = chain_keys(tokens, 4, SECRET)
    assert len(keys) == len(set(keys)) == 3
    assert chain_keys(tokens[:8], 4, SECRET) == keys[:2]
    changed = chain_keys([99, *tokens[1:]], 4, SECRET)
    assert not set(changed) & set(keys)
    swapped = chain_keys(tokens[4:8] + tokens[:4], 4, SECRET)
    assert not set(swapped) & set(keys)


@pytest.mark.parametrize("length", [0, 3, 4, 5, 7, 8])
def test_only_full_blocks_have_keys(length: int) -> None:
    assert len(chain_keys(list(range(length)), 4, SECRET)) == length // 4


def test_secret_scope_and_adapter_separate_keys() -> None:
    tokens = list(range(4))
    variants = [
        chain_keys(tokens, 4, SECRET),
        chain_keys(tokens, 4, b"another secret"),
        chain_keys(tokens, 4, SECRET, scope="a"),
        chain_keys(tokens, 4, SECRET, adapter="a"),
        chain_keys(tokens, 4, SECRET, scope="ab", adapter="c"),
        chain_keys(tokens, 4, SECRET, scope="a", adapter="bc"),
        chain_keys(tokens, 4, SECRET, scope="\ud800"),
    ]
    assert len({keys[0] for keys in variants}) == len(variants)


def test_extending_a_chain_gives_the_keys_of_the_whole() -> None:
    hasher = BlockHasher(2, SECRET)
    tokens = [5, 6, 7, 8]
    keys = hasher.keys(tokens, "scope")
    assert hasher.next(hasher.root("scope", ""), _packed([5, 6])) == keys[0]
    assert hasher.next(keys[0], _packed([7, 8])) == keys[1]


def test_long_prompts_are_hashed_with_pauses() -> None:
    hasher, pauses = BlockHasher(2, SECRET), []
    tokens = list(range(2 * (2 * PIECE + 1)))
    keys = hasher.keys(tokens, pause=lambda: pauses.append(None))
    assert len(pauses) == 2
    assert len(keys) == 2 * PIECE + 1
    key = hasher.root("", "")
    for j in range(len(keys)):
        key = hasher.next(key, _packed(tokens[2 * j : 2 * j + 2]))
        assert keys[j] == key


def _packed(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)
