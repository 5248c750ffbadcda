"""How many KV blocks an engine gets."""

from __future__ import annotations

import torch

from asyncinfer.attention import KVCache
from asyncinfer.config import EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import ModelConfig

__all__ = ["count_blocks"]

#: What a CPU engine takes unless it is told: pages are committed as they are first used.
CPU_BYTES = 1 << 30
#: Positions whose logits exist at once when a prompt is scored.
SCORED_AT_ONCE = 256


def count_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Blocks for `config.kv_bytes`, or for the configured share of the memory that is free now
    (the weights are loaded), so that a second engine on the device counts what the first took.

    Raises `ModelLoadError` if not even one block fits.
    """
    per_block = KVCache.bytes_per_block(model, config.block_size, dtype)
    if config.kv_bytes is not None:
        budget, source = config.kv_bytes, f"kv_bytes={config.kv_bytes}"
    elif device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and nobody uses is free to us, too.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        budget = int(free * config.kv_fraction) - _activation_bytes(config, model, dtype)
        source = f"kv_fraction={config.kv_fraction} of {free} free bytes"
    else:
        budget, source = CPU_BYTES, f"the CPU's default of {CPU_BYTES} bytes"
    blocks = budget // per_block
    if blocks < 1:
        raise ModelLoadError(
            f"{source}: no room for one KV block of {config.block_size} tokens "
            f"({per_block} bytes); give more or lower block_size"
        )
    return int(blocks)


def _activation_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """An upper estimate of what one step needs beside weights and KV."""
    widest = 2 * model.intermediate_size + 4 * model.hidden_size
    tokens = config.max_step_tokens * widest * dtype.itemsize
    # Logits in float32, and as many again while they are sampled.
    logits = max(config.max_running, SCORED_AT_ONCE) * model.vocab_size * 4 * 4
    return tokens + logits
