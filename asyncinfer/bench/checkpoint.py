"""A checkpoint of any shape with random weights, for engines that read one from disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["write_checkpoint"]

STD = 0.02


def write_checkpoint(config: dict[str, Any], folder: Path, *, seed: int = 0) -> None:
    """Write config.json, model.safetensors (bfloat16: matrices normal with std 0.02, norms 1) and a
    tokenizer, as transformers reads them. The tensors are those that the engine's own table asks
    for."""
    import torch
    from safetensors.torch import save_file

    from asyncinfer.bench.random_llama import byte_and_word_tokenizer
    from asyncinfer.models import parse_config, tensor_table

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), "utf-8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for packed in tensor_table(parse_config(config)).values():
        for piece in packed.pieces:
            tensor = torch.empty(piece.shape, dtype=torch.bfloat16, device=device)
            if len(piece.shape) == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, STD, generator=generator)
            tensors[piece.name] = tensor.cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    byte_and_word_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
