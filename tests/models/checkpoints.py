"""Random Llama checkpoints of every kind, and sequences run through a `Decoder`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attention.batches import batch_of, scattered_tables
from attention.rounding import poison
from attention.sequences import give_room
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import KVCache, KVFormat
from asyncinfer.attention.formats import PLAIN
from asyncinfer.layers import LoraRows
from asyncinfer.models import Decoder, load_model

BASE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "seven-to-one": {"hidden_size": 112, "num_attention_heads": 14, "num_key_value_heads": 2},
    "three-to-one": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    "head-dim-64": {"head_dim": 64},
    "head-dim-80": {"head_dim": 80, "num_key_value_heads": 1},
    "head-dim-96": {"head_dim": 96},
    "head-dim-128": {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "attention-bias": {"attention_bias": True},
    "mlp-bias": {"mlp_bias": True},
    "both-biases-tied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "big-vocabulary": {"vocab_size": 5_003},
    "eps": {"rms_norm_eps": 1e-2},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "linear": rope(rope_type="linear", factor=4.0),
    "dynamic": rope(rope_type="dynamic", factor=2.0),
    "llama3": rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "yarn": rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    "yarn, scales of 0": rope(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=64,
        mscale=0.7,
        mscale_all_dim=0,
    ),
}


def random_llama(**changes: Any) -> LlamaForCausalLM:
    """A transformers model with weights large enough that every part of it shows in the logits."""
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, **changes})).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.15, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)
    return model


def save(model: LlamaForCausalLM, folder: Path, **config: Any) -> Path:
    """Write the model as a checkpoint; `config` changes what `config.json` says."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], **config}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


class Sequences:
    """Sequences of tokens run through a decoder in whatever steps, on pages scattered over a cache
    that is poisoned wherever nobody wrote."""

    def __init__(
        self,
        decoder: Decoder,
        token_ids: list[torch.Tensor],
        block_size: int = 16,
        format: KVFormat = PLAIN,
    ) -> None:
        self.decoder = decoder
        self.token_ids = token_ids
        self.size = block_size
        lengths = [len(ids) for ids in token_ids]
        blocks = sum(-(-length // block_size) for length in lengths) + 3
        self.tables = scattered_tables(lengths, blocks, block_size)
        self.kv = KVCache.allocate(
            decoder.config, blocks, block_size, decoder.dtype, decoder.device, format=format
        )
        poison(self.kv)
        give_room(self.kv, 1 << 28)
        self.done = [0] * len(lengths)
        #: The slot of each sequence's adapter in the pool, -1 for none.
        self.adapters = [-1] * len(lengths)
        self.pool: AdapterPool | None = None
        #: Whether they are computed as on a GPU.
        self.lora_on_device = False
        self.logits = [
            torch.full((len(i), decoder.config.vocab_size), torch.nan) for i in token_ids
        ]

    def share(self, row: int, other: int, tokens: int) -> None:
        """A prefix hit: sequence `row` begins with the whole blocks in which sequence `other` has
        these tokens, which are its own too."""
        assert tokens % self.size == 0
        assert tokens <= self.done[other]
        assert not self.done[row]
        assert torch.equal(self.token_ids[row][:tokens], self.token_ids[other][:tokens])
        blocks = tokens // self.size
        self.tables[row][:blocks] = self.tables[other][:blocks]
        self.done[row] = tokens

    def step(self, **counts: int) -> None:
        """`step(s0=5, s2=1)`: feed 5 tokens of sequence 0 and 1 of sequence 2."""
        rows = sorted(
            ((int(name[1:]), count) for name, count in counts.items()), key=lambda row: row[1] > 1
        )
        positions, batch = batch_of(
            [(self.done[row], count) for row, count in rows],
            [self.tables[row] for row, _ in rows],
            self.size,
        )
        spans = [(row, self.done[row], self.done[row] + count) for row, count in rows]
        ids = torch.cat([self.token_ids[row][start:end] for row, start, end in spans])
        batch.sequences = [row for row, _ in rows]
        with torch.inference_mode():
            hidden = self.decoder.forward(ids, positions, [self.kv], [batch], self._lora(spans))
            logits = self.decoder.logits(hidden)
        assert logits.dtype is torch.float32
        for (row, start, end), part in zip(
            spans, logits.split([end - start for _, start, end in spans]), strict=True
        ):
            self.logits[row][start:end] = part
            self.done[row] = end

    def _lora(self, spans: list[tuple[int, int, int]]) -> LoraRows | None:
        if self.pool is None:
            return None
        rows, counts = [row for row, _, _ in spans], [end - start for _, start, end in spans]
        slots = np.repeat([self.adapters[row] for row in rows], counts)
        if self.lora_on_device:
            return self.pool.rows_on_device(torch.from_numpy(slots).int())
        return self.pool.rows(slots)


def load(
    model: LlamaForCausalLM, folder: Path, max_context: int | None = None, **config: Any
) -> Decoder:
    saved = save(model, folder, **config)
    return load_model(saved, "cpu", torch.float32, max_context=max_context)


def expected(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits of every position, float32 `[tokens, vocab]`."""
    with torch.inference_mode():
        return model(ids[None]).logits[0].clone()
