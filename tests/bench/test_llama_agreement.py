"""What `benchmarks.llama_agreement` records of a small file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
from benchmarks.llama_agreement import compare, write_floats
from models.families import random_model
from models.gguf_files import TOKENS, write_gguf

from asyncinfer import Engine
from asyncinfer.bench.peers.llama_cpp import LlamaPeer
from asyncinfer.weights.gguf import read_header

PROMPT = "!! hello"


class Peer:
    """An engine that finds all tokens equally likely, and always gives the same answer."""

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer

    def tokenize(self, text: str) -> list[int]:
        return []

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return [self.answer for _ in prompts]

    def logits(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        return np.zeros((len(tokens), TOKENS), np.float32)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_differences_are_found_and_measured(tmp_path: Path) -> None:
    path = write_gguf(random_model("llama", "plain"), tmp_path / "model.gguf")
    other = cast(LlamaPeer, Peer([5, 6, 7]))
    found = await compare(path, other, "a file", [PROMPT], 3)
    assert (found.tokenised_alike, found.answered_alike, found.tokens) == (0, 0, 3)
    assert found.tokens - found.tokens_alike == len(found.differences) > 0
    first = found.differences[0]
    assert (first.prompt, first.there) == (0, 0.0)
    assert first.here > 0
    # The engine's own first choice is no difference, whatever the other one's logprob of it is.
    mine = await answer(path)
    alike = await compare(path, cast(LlamaPeer, Peer(mine)), "a file", [PROMPT], 3)
    assert (alike.answered_alike, alike.tokens_alike, alike.differences) == (1, 3, ())
    assert 0 < alike.logprob_rms < math.log(TOKENS)


async def answer(path: Path) -> list[int]:
    async with Engine(path, dtype="float32", max_context=64) as engine:
        done = await engine.generate(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True)
    return list(done.token_ids)


def test_a_copy_in_floats_has_the_same_numbers_and_metadata(tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q4_1
    path = write_gguf(random_model("llama", "plain"), tmp_path / "model.gguf", kind)
    write_floats(path, tmp_path / "floats.gguf")
    before, after = read_header(path), read_header(tmp_path / "floats.gguf")
    assert repr(before.metadata) == repr(after.metadata)
    pairs = zip(
        gguf.GGUFReader(path).tensors,
        gguf.GGUFReader(tmp_path / "floats.gguf").tensors,
        strict=True,
    )
    for one, other in pairs:
        assert (one.name, one.shape.tolist()) == (other.name, other.shape.tolist())
        right = gguf.dequantize(one.data, one.tensor_type)
        np.testing.assert_array_equal(right.reshape(other.data.shape), other.data)
