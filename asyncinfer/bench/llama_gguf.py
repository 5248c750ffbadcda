"""Writes a Llama checkpoint as a GGUF file, for engines that read no other format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from asyncinfer.bench.record import BenchError

__all__ = ["write_llama_gguf"]

#: GGUF's names for the keys of `config.json` that llama.cpp reads.
_NUMBERS: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}


def write_llama_gguf(folder: Path, path: Path, dtype: str) -> None:
    """Write the weights of `folder` to `path`: matrices as `dtype`, "float32" or "bfloat16", the
    rest as float32. The file has no tokens, since prompts are token ids.

    Raises `BenchError` where the checkpoint is no Llama.
    """
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config.get("model_type") != "llama":
        raise BenchError(f"{folder}: llama.cpp's file is written for Llamas only")
    kinds = gguf.GGMLQuantizationType
    kind = {"float32": kinds.F32, "bfloat16": kinds.BF16}[dtype]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, "llama")
    for key, name in _NUMBERS.items():
        writer.add_uint32(f"llama.{key}", config[name])
    for key, number in (
        ("attention.head_count_kv", kv_heads),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
    ):
        writer.add_uint32(f"llama.{key}", number)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32("llama.rope.freq_base", _theta(config))
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for file in sorted(folder.glob("*.safetensors")):
        for tensor, values in load_file(file).items():
            known = names.get_name(tensor, try_suffixes=(".weight",))
            if known is None:
                raise BenchError(f"{folder}: {tensor} has no name in llama.cpp's Llama")
            rotated = {"q_proj": heads, "k_proj": kv_heads}.get(tensor.split(".")[-2])
            if rotated is not None:
                # llama.cpp rotates neighbouring rows; the checkpoint rotates halves of a head.
                halves = values.view(rotated, 2, head_dim // 2, -1)
                values = halves.transpose(1, 2).reshape(values.shape)
            stored = kind if values.ndim > 1 else kinds.F32
            packed = gguf.quantize(values.to(torch.float32).numpy(), stored)
            writer.add_tensor(known, packed, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _theta(config: dict[str, Any]) -> float:
    parameters = config.get("rope_parameters") or config
    return float(parameters.get("rope_theta", 10_000.0))
