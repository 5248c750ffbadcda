"""What a trained model is worth: perplexity on held-out files, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaForCausalLM

from asyncinfer.builtin.training.vocabulary import end_of_text


@dataclass(frozen=True)
class Quality:
    """Held-out figures of one model."""

    perplexity: float
    """Per token."""
    bits_per_byte: float
    tokens: int


def load(folder: Path) -> LlamaForCausalLM:
    """The exported checkpoint, its bfloat16 weights computed in float32 as a reference would."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    return model


@torch.inference_mode()
def measure(model: LlamaForCausalLM, tokenizer: Tokenizer, texts: Iterable[str]) -> Quality:
    """Perplexity over whole files, each opened by an end of text, in pieces of the full context."""
    context = int(model.config.max_position_embeddings)
    nats, tokens, size = 0.0, 0, 0
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text).ids, device=model.device)
        size += len(text.encode())
        for start in range(0, len(ids) - 1, context):
            piece = ids[start : start + context + 1]
            logits = model(input_ids=piece[None, :-1]).logits[0]
            nats += float(nn.functional.cross_entropy(logits.float(), piece[1:], reduction="sum"))
            tokens += len(piece) - 1
    return Quality(math.exp(nats / tokens), nats / math.log(2) / size, tokens)


@torch.inference_mode()
def complete(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """The prompt and its continuation."""
    random = torch.Generator().manual_seed(seed)
    end = end_of_text(tokenizer)
    ids = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        inputs = torch.tensor([ids], device=model.device)
        logits = model(input_ids=inputs).logits[0, -1].float().cpu()
        if temperature == 0.0:
            chosen = int(logits.argmax())
        else:
            chances = torch.softmax(logits / temperature, -1)
            chosen = int(torch.multinomial(chances, 1, generator=random))
        if chosen == end:
            break
        ids.append(chosen)
    return tokenizer.decode(ids)
