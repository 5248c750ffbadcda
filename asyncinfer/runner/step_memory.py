"""Estimates the device memory of a runner's steps, besides weights and KV."""

from __future__ import annotations

import torch

from asyncinfer.config import EngineConfig
from asyncinfer.kernels.flashinfer import FLASHINFER_BYTES
from asyncinfer.kernels.workspace import AttentionWorkspace
from asyncinfer.models import ModelConfig
from asyncinfer.runner.decode_graphs import batch_sizes
from asyncinfer.runner.recorded_forward import input_bytes, row_sizes, token_sizes
from asyncinfer.runner.tiles import TILE
from asyncinfer.sampling import OPTION_WORDS, Draws, draw_bytes

__all__ = ["activation_bytes", "graph_bytes", "graph_hold"]

#: An estimate of the driver's memory for one graph of some hundred kernels.
_GRAPH_BYTES = 2 << 20
#: Workspaces of cuBLAS: 32 MiB on a large GPU, for each of two streams with products.
_LIBRARY_BYTES = 64 << 20


def activation_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """About the bytes that the largest step needs besides weights and KV: the most that a layer
    holds at once, logits and the sampler's intermediate tensors, and the workspaces of attention
    and of libraries."""
    rows = min(config.max_running, config.max_step_tokens)
    step = _step_bytes(config.max_step_tokens, rows, model, dtype)
    # A deterministic pass attends tile by tile, and splits each row into up to 64 parts.
    parted = 64 * TILE if config.deterministic else rows
    libraries = _LIBRARY_BYTES + (FLASHINFER_BYTES if config.attention == "flashinfer" else 0)
    return step + _attention_bytes(parted, model) + libraries


def graph_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """About the bytes that stay on the device from step to step; where steps are recorded, also the
    intermediate tensors of the largest recorded step and the driver's memory for each graph."""
    context = config.max_context or model.max_context
    history = 4 * (config.max_running + 1) * (context + 1)
    if config.cuda_graphs == "off" or config.deterministic:
        return history
    sizes = batch_sizes(config.max_running)
    # Per slot: the tables, the options, a position and an adapter.
    words = _table_words(config, model) + OPTION_WORDS + 2
    resident = history + 4 * (config.max_running + 1) * words + 4 * sizes[-1] * model.vocab_size
    tokens = token_sizes(config.max_step_tokens, model.hidden_size)
    rows = row_sizes(sizes[-1])
    resident += input_bytes(tokens[-1], rows[-1], _most_groups(model))
    # The inputs of a drafting head stay, too.
    states = 4 if model.head_kv is not None else 1
    resident += states * tokens[-1] * model.hidden_size * dtype.itemsize
    graphs = len(sizes) * len(Draws) + len(tokens) * len(rows)
    return graph_hold(config, model, dtype) + resident + _GRAPH_BYTES * graphs


def graph_hold(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the intermediate tensors of the largest recorded step, shared by all graphs."""
    rows = batch_sizes(config.max_running)[-1]
    # A recorded pass has more tokens than a recorded batch has rows, and twice as many rows.
    tokens = max(rows, token_sizes(config.max_step_tokens, model.hidden_size)[-1])
    tables = 4 * (2 * rows + 1) * _table_words(config, model)
    step = _step_bytes(tokens, rows, model, dtype) + tables
    return step + _attention_bytes(rows, model)


def _attention_bytes(rows: int, model: ModelConfig) -> int:
    """Bytes of a pass' attention workspaces, one for each KV group."""
    kinds = {(kv.num_kv_heads, kv.head_dim) for kv in map(model.layer_kv, range(model.num_layers))}
    most = max(AttentionWorkspace.most_bytes(rows, model.num_heads, *kind) for kind in kinds)
    return max(_most_groups(model), len(kinds)) * most


def _table_words(config: EngineConfig, model: ModelConfig) -> int:
    """Entries of a slot's block tables."""
    context = config.max_context or model.max_context
    return -(-context // config.block_size) * _most_groups(model)


def _most_groups(model: ModelConfig) -> int:
    return 1 if model.window is None and not model.state_layers else 2


def _step_bytes(tokens: int, rows: int, model: ModelConfig, dtype: torch.dtype) -> int:
    heads, inner = _widest(model)
    # Predicted states are kept until a further token is predicted; a drafting head gets the states
    # of three layers, and a concatenation of them.
    kept = 7 if model.head_kv is not None else int(model.predicts)
    width = (3 + kept) * model.hidden_size + max(2 * heads, 3 * inner)
    # Per-layer embeddings, and the two tensors that they are the sum of.
    width += 3 * model.num_layers * model.per_layer_inputs
    return tokens * width * dtype.itemsize + draw_bytes(rows, model.vocab_size)


def _widest(model: ModelConfig) -> tuple[int, int]:
    """Elements of a token's queries, keys and values, and of the inside of a feed-forward layer, in
    the widest layers."""
    layers = range(model.num_layers)
    heads = (
        (model.num_heads + 2 * kv.num_kv_heads) * kv.head_dim for kv in map(model.layer_kv, layers)
    )
    return max(heads), max(map(model.layer_intermediate, layers))
