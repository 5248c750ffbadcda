"""Models in bfloat16 on a CPU, with its own instructions for it and without any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models.checkpoints import Sequences
from models.families import random_model

from asyncinfer.kernels import onednn
from asyncinfer.models import Decoder, load_model


def logits(made: Decoder) -> torch.Tensor:
    """Of a prompt in two chunks, of decode steps, and of drafts."""
    generator = torch.Generator().manual_seed(5)
    run = Sequences(made, [torch.randint(0, 199, (n,), generator=generator) for n in (58, 12)])
    for counts in ((40, 8), (13, 1), (1, 1), (4, 2)):
        run.step(s0=counts[0], s1=counts[1])
    return torch.cat(run.logits).float()


#: Heads of several widths, windows with a soft cap and with sinks, latents, and experts.
FAMILIES = ["llama", "gemma2", "gpt_oss", "deepseek_v2", "qwen3_moe"]


@pytest.mark.parametrize("instructions", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_near_those_of_float32(
    family: str, instructions: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(family, "plain").bfloat16().save_pretrained(tmp_path)
    right = logits(load_model(tmp_path, "cpu", max_context=64, dtype=torch.float32))
    if not instructions:
        monkeypatch.setattr(onednn, "available", lambda dtype: dtype is torch.float32)
    found = logits(load_model(tmp_path, "cpu", max_context=64, dtype=torch.bfloat16))
    # Of most tokens: two dtypes may choose different experts for one, and so for some that see it.
    near = ((found - right).abs().mean(dim=-1) / right.abs().mean(dim=-1)).median()
    assert near < 0.1, f"{near:.3f}"
