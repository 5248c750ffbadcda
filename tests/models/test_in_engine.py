"""Families of each kind through a whole engine: sampled tokens of a mixed batch have the log
probabilities that transformers gives them, after chunked prompts and hits on prefixes beyond every
window. `test_families_in_engine.py` has every family, greedily."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest
import torch
from models.checkpoints import expected
from models.families import FAMILIES, random_model

from asyncinfer import Completion, Engine
from asyncinfer.builtin import MODEL_PATH

#: The tokenizer's.
VOCABULARY = 4096
SHARED = 64
#: Plain; windows with soft caps; windows in all layers; learned positions; latent attention; sinks;
#: layers without a rotation; a mixture of experts.
KINDS = ["llama", "gemma2", "mistral", "gpt2", "deepseek_v3", "gpt_oss", "smollm3", "qwen3_moe"]
#: More of the prompt that each request has of its own, and how many tokens it samples.
REQUESTS = [(3, 30), (17, 30), (1, 30), (40, 20)]


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind = next(iter(FAMILIES[request.param]))
    model = random_model(request.param, kind, vocab_size=VOCABULARY)
    model.save_pretrained(tmp_path)
    for file in MODEL_PATH.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path)
    tmp_path.joinpath("family").write_text(f"{request.param}/{kind}")
    return tmp_path


@pytest.fixture
def anyio_backend() -> str:
    """One is enough: streams have their own tests."""
    return "asyncio"


@pytest.mark.anyio
async def test_sampled_tokens_in_a_mixed_batch(folder: Path) -> None:
    family, kind = folder.joinpath("family").read_text().split("/")
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(3, 4000, (SHARED,), generator=generator).tolist()
    prompts = [
        shared + torch.randint(3, 4000, (own,), generator=generator).tolist() for own, _ in REQUESTS
    ]
    answers: dict[int, Completion] = {}

    async with Engine(
        str(folder), device="cpu", dtype="float32", max_step_tokens=24, kv_bytes=1 << 24
    ) as engine:

        async def ask(number: int) -> None:
            answers[number] = await engine.generate(
                prompts[number],
                max_tokens=REQUESTS[number][1],
                temperature=0.7,
                seed=number,
                logprobs=0,
                ignore_eos=True,
            )

        await ask(0)
        async with anyio.create_task_group() as tasks:
            for number in range(1, len(REQUESTS)):
                tasks.start_soon(ask, number)

    model = random_model(family, kind, vocab_size=VOCABULARY)
    sampled = 0
    for number, answer in answers.items():
        assert answer.usage.cached_tokens == (0 if number == 0 else SHARED)
        tokens = [*prompts[number], *answer.token_ids]
        chances = expected(model, torch.tensor(tokens)).log_softmax(-1)
        assert answer.logprobs is not None
        for at, scored in enumerate(answer.logprobs, start=len(prompts[number])):
            assert scored.token_id == tokens[at]
            assert scored.logprob == pytest.approx(chances[at - 1, tokens[at]].item(), abs=1e-4)
            sampled += 1
    assert sampled > 100
