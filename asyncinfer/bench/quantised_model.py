"""Random Llamas in the layouts of published quantised files, for `asyncinfer bench load`.

Numbers are random bytes, since their values do not change the time of loading.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import islice, product
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

__all__ = ["LAYOUTS", "SCALES", "write_gguf", "write_quantised"]

_SCALE: Final = 1e-3
#: The power of two near it, biased by 127.
_EXPONENT: Final = 117
_GROUP: Final = 128
#: Layouts of safetensors -> their settings in `config.json`.
_SCHEMES: Final[dict[str, dict[str, Any]]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [_GROUP, _GROUP]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "all": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "group_size": _GROUP},
            }
        },
    },
}
#: GGUF types -> where in a block its float16 scales are; MXFP4's is one byte.
SCALES: Final[dict[str, tuple[int, ...]]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("Q3_K", "Q6_K"), (-2,)),
    "Q2_K": (-4, -2),
    "MXFP4": (),
}
#: "gguf": Q4_K_M, with values and down projections in Q6_K.
LAYOUTS: Final = ("gguf", *_SCHEMES)


def write_quantised(shape: Mapping[str, Any], layers: int, folder: Path, layout: str) -> Path:
    """Write a model of `shape` with so many layers, and return its folder or its GGUF file."""
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "gguf":
        return write_gguf(shape, layers, folder / "model.gguf", _q4_k_m)
    from safetensors.torch import save_file

    from asyncinfer.bench.checkpoint import write_tokenizer

    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        size = rows, columns * dtype.itemsize
        # Without the highest bit of a byte e4m3 has one NaN, 127.
        numbers = torch.randint(0, 127, size, generator=generator, dtype=torch.uint8)
        return numbers.view(dtype)

    tensors: dict[str, torch.Tensor] = {}
    for name, rows, columns in _matrices(shape, layers):
        for suffix, part in _parts(layout, rows, columns, random).items():
            tensors[f"{name}.{suffix}"] = part
    hidden = int(shape["hidden_size"])
    for name in ("model.embed_tokens", "lm_head"):
        numbers = torch.randn(shape["vocab_size"], hidden, generator=generator)
        tensors[f"{name}.weight"] = numbers.mul_(0.02).bfloat16()
    kinds = ("input_layernorm", "post_attention_layernorm")
    each = product(range(layers), kinds)
    norms = ["model.norm", *(f"model.layers.{layer}.{kind}" for layer, kind in each)]
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**shape, "num_hidden_layers": layers, "dtype": "bfloat16"}
    config["quantization_config"] = _SCHEMES[layout]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    write_tokenizer(int(shape["vocab_size"]), folder)
    return folder


def _matrices(shape: Mapping[str, Any], layers: int) -> list[tuple[str, int, int]]:
    """Name, outputs and inputs of each matrix of the layers."""
    hidden, inner = int(shape["hidden_size"]), int(shape["intermediate_size"])
    kv = hidden * int(shape["num_key_value_heads"]) // int(shape["num_attention_heads"])
    each = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    numbers = range(layers)
    return [
        (f"model.layers.{layer}.{name}", *size) for layer in numbers for name, size in each.items()
    ]


def _parts(
    layout: str, rows: int, columns: int, random: Callable[[int, int, torch.dtype], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of one matrix."""
    words, groups = torch.int32, columns // _GROUP
    if layout == "fp8":
        scales = torch.full((-(-rows // _GROUP), groups), _SCALE)
        return {
            "weight": random(rows, columns, torch.float8_e4m3fn),
            "weight_scale_inv": scales,
        }
    if layout == "compressed-tensors":
        return {
            "weight_packed": random(rows, columns // 8, words),
            "weight_scale": torch.full((rows, groups), _SCALE, dtype=torch.bfloat16),
            "weight_shape": torch.tensor([rows, columns]),
        }
    packed = (columns // 8, rows) if layout == "gptq" else (columns, rows // 8)
    return {
        "qweight": random(*packed, words),
        "qzeros": random(groups, rows // 8, words),
        "scales": torch.full((groups, rows), _SCALE, dtype=torch.float16),
    }


def _q4_k_m(matrix: str) -> str:
    return "Q6_K" if matrix.endswith(("embed_tokens", "v_proj", "down_proj")) else "Q4_K"


def write_gguf(
    shape: Mapping[str, Any], layers: int, path: Path, kind_of: Callable[[str], str]
) -> Path:
    """Write a GGUF file; `kind_of` maps a matrix's name in the checkpoint to a type of `SCALES`."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    hidden, size = int(shape["hidden_size"]), int(shape["vocab_size"])
    for key, value in {
        "context_length": shape["max_position_embeddings"],
        "embedding_length": hidden,
        "block_count": layers,
        "feed_forward_length": shape["intermediate_size"],
        "attention.head_count": shape["num_attention_heads"],
        "attention.head_count_kv": shape["num_key_value_heads"],
        "vocab_size": size,
    }.items():
        writer.add_uint32(f"llama.{key}", int(value))
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    _add_tokenizer(writer, size)

    def add(name: str, rows: int, columns: int, kind: str) -> None:
        numbers, block = gguf.GGML_QUANT_SIZES[kinds[kind]]
        data = random.integers(0, 256, (rows * columns // numbers, block), np.uint8)
        scale = np.full(len(data), _SCALE, np.float16).view(np.uint8).reshape(-1, 2)
        for place in SCALES[kind]:
            data[:, place : place + 2 or None] = scale
        if not SCALES[kind]:
            data[:, 0] = _EXPONENT
        writer.add_tensor(name, data.reshape(rows, -1), raw_dtype=kinds[kind])

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    add("token_embd.weight", size, hidden, kind_of("model.embed_tokens"))
    for name, rows, columns in _matrices(shape, layers):
        add(f"{names.get_name(name)}.weight", rows, columns, kind_of(name))
    norms = [f"blk.{layer}.{name}" for layer in range(layers) for name in ("attn_norm", "ffn_norm")]
    for name in ("output_norm", *norms):
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, size: int) -> None:
    """Byte-level BPE with a merge for each token of several bytes, as in published files."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Every beginning of a word is a word, so one merge makes each word.
    words = ("".join(word) for length in range(2, 5) for word in product(letters, repeat=length))
    tokens = [*letters, *islice(words, size - len(letters))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([f"{token[:-1]} {token[-1]}" for token in tokens[len(letters) :]])
    writer.add_eos_token_id(0)
