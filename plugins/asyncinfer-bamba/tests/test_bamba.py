"""Bamba computes what transformers computes, and its states go through the engine's cache."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from asyncinfer_bamba import Bamba
from transformers import BambaConfig, BambaForCausalLM

from asyncinfer import Engine
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.models import examine
from asyncinfer.testing import check_family

SMALL = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_layer_indices": [1],
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    # With less transformers' own float32 logits are off: outputs of small heads may be near zero.
    "rms_norm_eps": 1e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
ODD = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "attn_layer_indices": [0, 2],
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_conv": 3,
    "mamba_proj_bias": True,
    "attention_bias": True,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("changes", [{}, ODD], ids=["plain", "odd"])
def test_it_computes_what_transformers_computes(changes: dict[str, object]) -> None:
    check_family(Bamba, BambaConfig(**SMALL | changes))


def test_states_are_restored(tmp_path: Path) -> None:
    """The family is found by its name, and answers are equal alone, after a hit and forked."""
    torch.manual_seed(0)
    model = BambaForCausalLM(BambaConfig(**SMALL | {"vocab_size": 4096})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.15)
    model.save_pretrained(tmp_path)
    for file in MODEL_PATH.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path)
    assert not examine(tmp_path).problems
    prompt = torch.randint(3, 4000, (60,)).tolist()

    async def answers() -> list[list[int]]:
        found = []
        async with Engine(
            str(tmp_path), device="cpu", dtype="float32", max_step_tokens=23
        ) as engine:
            for n in (1, 1, 3):
                done = await engine.generate(
                    prompt, n=n, max_tokens=12, temperature=0.0, ignore_eos=True
                )
                found += [list(choice.token_ids) for choice in done.choices]
                hits = engine.stats().cached_tokens
                assert (hits == 0) == (len(found) == 1)
            assert engine.stats().state_pages_total > 0
        return found

    first, *others = asyncio.run(answers())
    assert others == [first] * 4
    with torch.inference_mode():
        right = model(torch.tensor([[*prompt, *first]])).logits[0]
    for at, token in enumerate(first, len(prompt) - 1):
        assert right[at].max() - right[at, token] < 3e-4
