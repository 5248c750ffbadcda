"""A random Llama on disk, in the Hugging Face format: the shape benchmarks compare engines on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

__all__ = [
    "LLAMA_125M",
    "LLAMA_TINY",
    "LlamaShape",
    "byte_and_word_tokenizer",
    "write_random_llama",
]

STD: Final = 0.02
SEED: Final = 125


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Of a Llama with an untied head and no biases."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    context: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        return sum(rows * columns for _, (rows, columns) in _matrices(self)) + sum(
            self.hidden for _ in _norms(self)
        )


LLAMA_125M: Final = LlamaShape(
    layers=12, hidden=768, heads=12, kv_heads=4, intermediate=2048, vocab=32_000
)
#: For smoke runs.
LLAMA_TINY: Final = LlamaShape(
    layers=2, hidden=64, heads=4, kv_heads=2, intermediate=128, vocab=512
)


def write_random_llama(shape: LlamaShape, folder: Path) -> None:
    """Write config.json, model.safetensors (float32, normal with std 0.02, norms 1) and a
    tokenizer.json whose tokens are whole strings, with a fixed seed."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": STD,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    generator = torch.Generator().manual_seed(SEED)
    tensors = {
        name: torch.empty(size).normal_(0.0, STD, generator=generator)
        for name, size in _matrices(shape)
    }
    tensors |= {name: torch.ones(shape.hidden) for name in _norms(shape)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    byte_and_word_tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))


def _matrices(shape: LlamaShape) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, inner = shape.hidden, shape.intermediate
    kv = shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "lm_head.weight", (shape.vocab, hidden)


def _norms(shape: LlamaShape) -> Iterator[str]:
    for layer in range(shape.layers):
        yield f"model.layers.{layer}.input_layernorm.weight"
        yield f"model.layers.{layer}.post_attention_layernorm.weight"
    yield "model.norm.weight"


def byte_and_word_tokenizer(size: int) -> tokenizers.Tokenizer:
    """Byte-level, as those of today's models: every byte, then short words that no merge makes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (
        "".join(letters)
        for length in itertools.count(2)
        for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=length)
    )
    tokens = itertools.islice(itertools.chain(alphabet, words), size)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend
