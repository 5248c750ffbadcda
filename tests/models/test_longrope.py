"""LongRoPE: which of its two sets of factors an engine takes, and that it is transformers' for
sequences on that side of the trained context."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from models.checkpoints import Sequences, expected
from models.families import random_model
from transformers import PreTrainedModel

from asyncinfer import Engine
from asyncinfer.attention import KVCache
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.models import load_model, read_config

#: Of the random model, whose own context is 1,024.
TRAINED = 256
VOCABULARY = 4096


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return random_model("phi3", "longrope", vocab_size=VOCABULARY)


@pytest.fixture
def folder(model: PreTrainedModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    for file in MODEL_PATH.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path)
    return tmp_path


def tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 4000, (count,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("length", "context"),
    [(TRAINED, TRAINED), (TRAINED + 1, TRAINED + 1), (400, 1024), (400, None)],
)
def test_each_side_of_the_trained_context(
    model: PreTrainedModel, folder: Path, length: int, context: int | None
) -> None:
    """The first set goes to the very end of the trained context."""
    ids = tokens(length)
    decoder = load_model(folder, "cpu", torch.float32, max_context=context)
    run = Sequences(decoder, [ids])
    run.step(s0=100)
    run.step(s0=length - 101)
    run.step(s0=1)
    torch.testing.assert_close(run.logits[0], expected(model, ids), rtol=0, atol=1e-4)
    (note,) = decoder.notes
    assert f"the {'short' if length == TRAINED else 'long'} factors" in note
    # Else the comparison would prove nothing.
    other = 1024 if length == TRAINED else TRAINED
    wrong = Sequences(load_model(folder, "cpu", torch.float32, max_context=other), [ids[:200]])
    wrong.step(s0=200)
    assert (wrong.logits[0] - run.logits[0][:200]).abs().max() > 1e-2


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("blocks", [10, 40])
async def test_a_context_that_shrinks_to_what_fits(
    model: PreTrainedModel, folder: Path, blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """10 blocks of 16 are within the trained context, 40 are not."""
    caplog.set_level(logging.INFO, "asyncinfer")
    block = KVCache.bytes_per_block(read_config(folder), 16, torch.float32)
    length = 150 if blocks == 10 else 300
    prompt = tokens(length).tolist()
    async with Engine(
        folder, device="cpu", dtype="float32", kv_bytes=blocks * block, max_step_tokens=64
    ) as engine:
        done = await engine.generate(prompt, max_tokens=3, temperature=0.0, prompt_logprobs=0)
    chances = expected(model, torch.tensor(prompt)).log_softmax(-1)
    assert done.prompt_logprobs is not None
    for at, scored in enumerate(done.prompt_logprobs):
        if scored is not None:
            right = chances[at - 1, prompt[at]].item()
            assert scored.logprob == pytest.approx(right, abs=1e-4)
    (loaded,) = [r.asyncinfer for r in caplog.records if r.msg.startswith("engine_loaded")]
    (note,) = loaded["notes"]
    context = 16 * blocks
    which = "short" if context <= TRAINED else "long"
    assert note.startswith(f"LongRoPE: the {which} factors, for max_context={context} is ")
