"""Forward passes in tiles: how large they are, and what falls back to single tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncinfer.attention import KVCache
from asyncinfer.models import Decoder
from asyncinfer.models.parts import ExpertsConfig
from asyncinfer.runner.tiles import TILE, TiledDecoder

PROMPTS = {0: [5, 17, 3, 44, 9, 9, 21, 30, 2, 50, 11], 1: [1, 2, 3], 2: list(range(40)), 3: [8]}


class Rewriting:
    """A decoder that is called through a function, told the shapes it sees."""

    def __init__(self, decoder: Decoder, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.config, self.device, self.dtype = decoder.config, decoder.device, decoder.dtype
        self.predictor = decoder.predictor
        self.shapes: set[tuple[int, ...]] = set()
        #: Keys of a part, where attention is shared out.
        self.chunks: set[int] = set()
        self._decoder, self._change = decoder, change

    def forward(self, tokens: torch.Tensor, *arguments: Any) -> torch.Tensor:
        self.shapes.add(tuple(tokens.shape))
        self.chunks.update(batch.chunk for batch in arguments[2])
        return self._change(self._decoder.forward(tokens, *arguments))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.shapes.add((len(hidden),))
        return self._decoder.logits(hidden)


def tiled(decoder: Any) -> TiledDecoder:
    kv = KVCache.allocate(decoder.config, 3, 4, decoder.dtype, "cpu")
    return TiledDecoder(decoder, [kv], 640)


def by_place(hidden: torch.Tensor) -> torch.Tensor:
    return hidden + torch.arange(len(hidden))[:, None] * 1e-6


def test_one_size_of_tile_for_everything(decoder: Decoder, make_hand: Any, greedy: Any) -> None:
    seen = Rewriting(decoder, lambda hidden: hidden)
    hand = make_hand(deterministic=True, decoder=seen)
    assert hand.runner.executor.tiles.size == TILE
    seen.shapes.clear()
    for slot, prompt in PROMPTS.items():
        hand.join(slot, prompt, prompt_logprobs=1)
        hand.row(slot, 0, len(prompt))
    hand.plan.prompt_logprobs[2] = 1
    result = hand.step()
    assert result.tokens == [greedy(prompt, 1)[0] for prompt in PROMPTS.values()]
    assert len(result.prompt_logprobs[2]) == 39
    assert hand.decode(1, 3, 5) == greedy(PROMPTS[1], 6)[1:]
    assert seen.shapes == {(TILE,)}


def test_keys_are_parted_by_the_longest_context_alone(decoder: Decoder) -> None:
    for longest, chunk in ((640, 256), (131_072, 2048)):
        seen = Rewriting(decoder, lambda hidden: hidden)
        fake: Any = seen
        TiledDecoder(fake, [KVCache.allocate(decoder.config, 3, 4, torch.float32, "cpu")], longest)
        assert seen.chunks == {chunk}


def test_a_library_that_minds_the_place_gets_single_tokens(decoder: Decoder) -> None:
    assert tiled(Rewriting(decoder, lambda hidden: hidden)).size == TILE
    assert tiled(Rewriting(decoder, by_place)).size == 1


@pytest.mark.parametrize("number", [1, TILE])
def test_so_does_one_that_minds_the_neighbours(decoder: Decoder, number: int) -> None:
    """Each token gets a trace of another one's."""
    mixing = Rewriting(decoder, lambda hidden: hidden + hidden.roll(number % 5, 0) * 1e-5)
    assert tiled(mixing).size == 1


def test_experts_get_single_tokens(decoder: Decoder) -> None:
    seen = Rewriting(decoder, lambda hidden: hidden)
    experts = ExpertsConfig(count=4, active=2, intermediate_size=8)
    seen.config = dataclasses.replace(decoder.config, experts=experts)
    assert tiled(seen).size == 1
    assert not seen.shapes


def test_single_tokens_give_the_same_answers(decoder: Decoder, make_hand: Any, greedy: Any) -> None:
    hand = make_hand(deterministic=True, decoder=Rewriting(decoder, by_place))
    assert hand.runner.executor.tiles.size == 1
    for slot, prompt in PROMPTS.items():
        hand.join(slot, prompt)
        hand.row(slot, 0, len(prompt))
    assert hand.step().tokens == [greedy(prompt, 1)[0] for prompt in PROMPTS.values()]
    assert hand.decode(2, 40, 4) == greedy(PROMPTS[2], 5)[1:]


def test_the_cache_of_the_trial_is_not_the_engines(decoder: Decoder) -> None:
    kv = KVCache.allocate(decoder.config, 3, 4, decoder.dtype, "cpu")
    kv.storage.fill_(7.0)
    TiledDecoder(decoder, [kv], 640)
    assert kv.storage.eq(7.0).all()
