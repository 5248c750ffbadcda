"""Logits equal to transformers' within 1e-4 in float32, however the tokens are cut into steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from models.checkpoints import KINDS, Sequences, expected, load, random_llama, save
from transformers import DynamicCache, LlamaForCausalLM

from asyncinfer.builtin import DRAFT_PATH, MODEL_PATH
from asyncinfer.models import Decoder, load_model

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


@pytest.fixture(params=sorted(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LlamaForCausalLM, Decoder]:
    model = random_llama(**KINDS[request.param])
    return model, load(model, tmp_path)


def tokens(model: LlamaForCausalLM, *lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = model.config.vocab_size
    return [torch.randint(0, size, (length,), generator=generator) for length in lengths]


def test_logits(pair: tuple[LlamaForCausalLM, Decoder]) -> None:
    """Prefill alone; then decode, chunks and prefill mixed; twice the same answer as transformers.

    The sequences end on, before and behind the borders of blocks of 16 and of tiles of 128."""
    model, decoder = pair
    ids = tokens(model, 150, 33, 16, 47)
    right = [expected(model, sequence) for sequence in ids]
    assert right[0].std() > 0.5

    whole = Sequences(decoder, ids)
    whole.step(s0=150, s1=33, s2=16, s3=47)

    mixed = Sequences(decoder, ids)
    mixed.step(s0=15, s2=15)
    mixed.step(s0=1, s2=1, s1=32)
    mixed.step(s0=1, s1=1, s3=17)
    for _ in range(15):
        mixed.step(s0=1, s3=1)
    mixed.step(s0=118, s3=15)
    for got in (whole, mixed):
        assert got.done == [150, 33, 16, 47]
        for logits, exact in zip(got.logits, right, strict=True):
            torch.testing.assert_close(logits, exact, **TOLERANCE)


def test_random_steps(tmp_path: Path) -> None:
    """Any cut of any mix gives the same logits, whatever the block size."""
    model = random_llama(hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=24)
    decoder = load(model, tmp_path)
    ids = tokens(model, 90, 41, 8, 120, 1)
    right = [expected(model, sequence) for sequence in ids]
    rng = random.Random(5)
    for block_size in (1, 5, 16, 64):
        run = Sequences(decoder, ids, block_size)
        while any(done < len(sequence) for done, sequence in zip(run.done, ids, strict=True)):
            left = {row: len(ids[row]) - done for row, done in enumerate(run.done)}
            chosen = [row for row, count in left.items() if count and rng.random() < 0.7]
            counts = {row: min(left[row], rng.choice((1, 1, 1, 2, 7, 30))) for row in chosen}
            if counts:
                run.step(**{f"s{row}": count for row, count in counts.items()})
        for logits, exact in zip(run.logits, right, strict=True):
            torch.testing.assert_close(logits, exact, **TOLERANCE)


def test_long_prompt_in_tiles(tmp_path: Path) -> None:
    model = random_llama(max_position_embeddings=2048)
    (ids,) = tokens(model, 1100)
    run = Sequences(load(model, tmp_path), [ids])
    run.step(s0=700)
    run.step(s0=400)
    torch.testing.assert_close(run.logits[0], expected(model, ids), **TOLERANCE)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_beyond_the_trained_context(kind: str, tmp_path: Path) -> None:
    model = random_llama(**{**KINDS[kind], "max_position_embeddings": 96})
    (ids,) = tokens(model, 300)
    run = Sequences(load(model, tmp_path, max_context=300), [ids])
    run.step(s0=200)
    run.step(s0=100)
    torch.testing.assert_close(run.logits[0], expected(model, ids), **TOLERANCE)


def test_dynamic_rope_beyond_the_trained_context(tmp_path: Path) -> None:
    """As transformers fed through its cache: a prompt within the context, then token by token. The
    same in one chunk, because a token's keys do not depend on what follows it."""
    model = random_llama(**{**KINDS["dynamic"], "max_position_embeddings": 64})
    (ids,) = tokens(model, 100)
    cache = DynamicCache()
    with torch.inference_mode():
        chunks = [ids[:64], *ids[64:].split(1)]
        right = torch.cat([model(part[None], past_key_values=cache).logits[0] for part in chunks])
    decoder = load(model, tmp_path)
    stepwise, whole = Sequences(decoder, [ids]), Sequences(decoder, [ids])
    stepwise.step(s0=64)
    for _ in range(36):
        stepwise.step(s0=1)
    whole.step(s0=100)
    torch.testing.assert_close(stepwise.logits[0], right, **TOLERANCE)
    torch.testing.assert_close(whole.logits[0], right, **TOLERANCE)


def test_old_spelling_of_rope_scaling(tmp_path: Path) -> None:
    model = random_llama(**KINDS["linear"])
    decoder = load(
        model,
        tmp_path,
        rope_parameters=None,
        rope_theta=10_000.0,
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    (ids,) = tokens(model, 50)
    run = Sequences(decoder, [ids])
    run.step(s0=50)
    torch.testing.assert_close(run.logits[0], expected(model, ids), **TOLERANCE)


def test_bfloat16_is_near(tmp_path: Path) -> None:
    model = random_llama()
    decoder = load_model(save(model, tmp_path), "cpu", torch.bfloat16)
    (ids,) = tokens(model, 40)
    run = Sequences(decoder, [ids])
    run.step(s0=30)
    for _ in range(10):
        run.step(s0=1)
    right = expected(model, ids)
    assert (run.logits[0] - right).norm() / right.norm() < 0.05
    assert decoder.dtype is torch.bfloat16


@pytest.mark.parametrize("folder", [MODEL_PATH, DRAFT_PATH], ids=["model", "draft"])
def test_shipped_models(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    (ids,) = tokens(model, 300)
    run = Sequences(load_model(folder, "cpu", torch.float32), [ids])
    run.step(s0=200)
    run.step(s0=99)
    run.step(s0=1)
    torch.testing.assert_close(run.logits[0], expected(model, ids), **TOLERANCE)


def test_no_global_state_is_changed(tmp_path: Path) -> None:
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    model = random_llama()
    decoder = load(model, tmp_path)
    (ids,) = tokens(model, 20)
    Sequences(decoder, [ids]).step(s0=20)
    after = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    assert before == after
