"""Every family on a GPU: the answers of a CPU in float32, alone, after a prefix hit and beside
others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import randomised
from models.held import Held
from models.test_families_in_engine import CONFIGS

from asyncinfer.models import load_model
from asyncinfer.testing import InlineEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_context": 96,
    "max_step_tokens": 23,
    "max_running": 8,
    "kv_bytes": 1 << 24,
}
#: Logprobs as near as this are those of the same number.
TIE = 2e-3


def answers(folder: Path, device: str) -> list[list[tuple[int, float]]]:
    """Tokens and their logprobs."""
    numbers = torch.Generator().manual_seed(5)
    decoder = load_model(folder, device, torch.float32, max_context=96)
    engine = InlineEngine(Held(decoder), **OPTIONS, device=device)

    def prompt(count: int) -> list[int]:
        return torch.randint(3, 190, (count,), generator=numbers).tolist()

    def run(*prompts: list[int]) -> list[list[tuple[int, float]]]:
        streams = [
            engine.submit(each, max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=0)
            for each in prompts
        ]
        engine.run()
        for stream in streams:
            stream.read()
            assert stream.error is None
        return [
            [(each.token_id, each.logprob) for chunk in stream.chunks for each in chunk.logprobs]
            for stream in streams
        ]

    first = prompt(45)
    found = run(first)
    found += run(first, *(prompt(9 + 3 * number) for number in range(5)))
    assert engine.stats().cached_tokens > 0
    assert engine.stats().fallbacks == ()
    return found


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_the_answers_are_those_of_a_cpu(kind: str, tmp_path: Path) -> None:
    randomised(CONFIGS[kind]).save_pretrained(tmp_path)
    right, found = answers(tmp_path, "cpu"), answers(tmp_path, "cuda")
    for one, other in zip(right, found, strict=True):
        for (token, logprob), (drawn, chance) in zip(one, other, strict=True):
            assert chance == pytest.approx(logprob, abs=TIE)
            if token != drawn:
                break  # Two tokens were as likely, and what follows differs.
