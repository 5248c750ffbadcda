"""What a measurement may choose: every candidate fits every GPU and computes the same."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernels.compiled import SHARED, Launch, recorded
from kernels.interpreted import interpreted
from kernels.test_targets import CAPABILITIES, check, meta

from asyncinfer.kernels import reference, triton
from asyncinfer.kernels.choices import use_choices, with_choices
from asyncinfer.kernels.linear_tiles import Tiles, tile_candidates, tile_key
from asyncinfer.kernels.triton import attention_tiling as tiling

BF16, INT32 = torch.bfloat16, torch.int32


def candidates(capability: int) -> Iterator[Launch]:
    """Launches of every candidate, at a large model's shapes."""
    shared = SHARED[capability]
    with recorded() as found:
        for tokens in (1, 4, 16, 64):
            for each in tile_candidates(4096, 4096, tokens, 2.0):
                with with_choices({tile_key(4096, 4096, tokens, 2.0): each}):
                    triton.linear_small(meta(tokens, 4096), meta(4096, 4096))
        cache = meta(100, 8, 16, 128)
        rest = meta(32, 20, dtype=INT32), meta(32, dtype=INT32), meta(33, dtype=INT32), 0.1
        decode, prefill = tiling.decode_key(4, 128, BF16, BF16), tiling.prefill_key(128, BF16, BF16)
        tried = {
            decode: tiling.decode_candidates(4, 128, BF16, BF16, shared),
            prefill: tiling.prefill_candidates(128, BF16, BF16, shared),
        }
        for key, tilings in tried.items():
            for tile in tilings:
                with with_choices({key: tile}):
                    triton.paged_attention(
                        meta(64, 32, 128), cache, cache, *rest, decode_rows=32 * (key is decode)
                    )
    yield from found


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_candidates_fit(capability: int) -> None:
    """Which target compiles which is a rotation: a candidate is compiled once."""
    turn = CAPABILITIES.index(capability)
    tried = list(candidates(capability))
    assert len(tried) > 18
    for launch in tried[turn :: len(CAPABILITIES)]:
        check(launch, launch.compile(capability))


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_candidates_compute_the_same(tokens: int, seed: int) -> None:
    torch.manual_seed(seed)
    bucket = {1: 1, 3: 4, 20: 32}[tokens]
    x, weight = torch.randn(tokens, 1024).half(), torch.randn(48, 1024).mul_(0.03).half()
    right = reference.linear_small(x.float(), weight.float())
    key = tile_key(48, 1024, bucket, 2.0)
    tried = tile_candidates(48, 1024, bucket, 2.0)
    assert len(tried) > 2
    with interpreted():
        for each in tried:
            use_choices({key: each})
            found = triton.linear_small(x, weight).float()
            torch.testing.assert_close(found, right, rtol=4e-3, atol=4e-3)
    use_choices({})


def test_candidates_begin_with_what_was_derived_and_differ() -> None:
    for outputs, inputs in ((4096, 14336), (512, 256), (1024, 2048), (151_936, 2560)):
        for bucket in (1, 2, 4, 16, 32, 64):
            for itemsize in (2.0, 1.0, 0.5):
                tried = tile_candidates(outputs, inputs, bucket, itemsize)
                assert len(set(tried)) == len(tried) >= 2
                assert all(isinstance(each, Tiles) and each.rows >= 1 for each in tried)
                assert all(inputs // each.splits >= 256 or each.splits == 1 for each in tried)
