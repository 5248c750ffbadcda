"""Every family in two sizes of heads, that of its best-known checkpoint and another; together they
have heads of 64, 80, 96, 128 and 256, odd ratios of queries to keys, tied and untied. Logits equal
transformers' across chunks, decode, a shared prefix and past the window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.checkpoints import Sequences, expected
from models.families import FAMILIES, random_model

from asyncinfer.models import load_model

#: Size of a head -> heads of queries and of keys, and whether the head is the embedding.
SHAPES = {
    64: (7, 1, True),
    80: (6, 2, False),
    96: (3, 1, True),
    128: (5, 1, False),
    256: (3, 1, True),
}
#: The size of a head in the best-known checkpoint, where that is not 128.
BEST_KNOWN = {
    "gemma": 256,
    "gemma2": 256,
    "gemma3_text": 256,
    "gpt2": 64,
    "gpt_neox": 80,
    "gpt_oss": 64,
    "granite": 64,
    "granitemoe": 64,
    "phi": 80,
    "phi3": 96,
}
#: Their heads are a key of their own; those of the others are a part of the hidden size.
OWN_HEAD_DIM = (
    "afmoe",
    "cwm",
    "dots1",
    "ernie4_5",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "llama",
    "minimax_m2",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "nemotron",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "solar_open",
)


def sizes(number: int, family: str) -> tuple[int, int]:
    """The sizes of a family's heads. The second one goes round with the families' numbers."""
    known = BEST_KNOWN.get(family, 128)
    others = [size for size in SHAPES if size != known]
    return known, others[number % len(others)]


CASES = [
    (family, size)
    for number, family in enumerate(sorted(FAMILIES))
    for size in sizes(number, family)
]


def test_every_size_is_there() -> None:
    for size in SHAPES:
        assert sum(size == chosen for _, chosen in CASES) >= 5


def shape(family: str, head_dim: int) -> dict[str, Any]:
    heads, kv_heads, tied = SHAPES[head_dim]
    changes: dict[str, Any] = {"tie_word_embeddings": tied}
    if family == "gpt2":
        return {**changes, "n_head": heads, "n_embd": heads * head_dim}
    changes |= {"num_attention_heads": heads, "hidden_size": heads * head_dim}
    if family.startswith("deepseek") or family in ("mistral4", "glm4_moe_lite", "youtu"):
        # The cache's own head is the latent vector and what is rotated.
        sizes = {"qk_nope_head_dim": head_dim, "v_head_dim": head_dim, "kv_lora_rank": head_dim - 8}
        return {**changes, **sizes, "num_key_value_heads": heads, "hidden_size": 16 * heads}
    if family in OWN_HEAD_DIM:
        changes |= {"head_dim": head_dim, "hidden_size": 16 * heads}
    if family != "gpt_neox":
        changes["num_key_value_heads"] = kv_heads
    return changes


@pytest.mark.parametrize(("family", "head_dim"), CASES)
def test_logits(family: str, head_dim: int, tmp_path: Path) -> None:
    model = random_model(family, next(iter(FAMILIES[family])), **shape(family, head_dim))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # As large as those of the other tests are for narrow layers, not more.
                parameter.mul_(min(1.0, (64 / parameter.shape[-1]) ** 0.5))
    model.save_pretrained(tmp_path)
    decoder = load_model(tmp_path, "cpu", torch.float32, max_context=256)
    config, (heads, kv_heads, tied) = decoder.config, SHAPES[head_dim]
    assert (config.num_heads, config.tied_head) == (heads, tied)
    if config.latent is None:
        multi_head = family in ("gpt2", "gpt_neox")
        assert config.num_kv_heads == (heads if multi_head else kv_heads)
    assert config.head_dim == head_dim

    generator = torch.Generator().manual_seed(head_dim)
    ids = [torch.randint(0, 199, (length,), generator=generator) for length in (70, 45)]
    ids[1][:32] = ids[0][:32]
    run = Sequences(decoder, ids)
    run.step(s0=33)
    run.step(s0=1)
    run.share(1, 0, 32)
    run.step(s0=1, s1=12)
    run.step(s0=35, s1=1)
    for sequence, got, hit in zip(ids, run.logits, (0, 32), strict=True):
        right = expected(model, sequence)
        assert right.std() > 0.1
        # Granite multiplies embeddings by 12: transformers' own are 1e-4 off those in float64.
        atol = 2e-4 if family.startswith("granite") else 1e-4
        torch.testing.assert_close(got[hit:], right[hit:], rtol=1e-5, atol=atol)
