"""A checkpoint of any shape with random weights, for engines that read one from disk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from asyncinfer.bench.record import BenchError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["vocab_size", "write_checkpoint", "write_tokenizer"]

STD: Final = 0.02


def write_checkpoint(
    config: Mapping[str, Any], folder: Path, *, shards: int = 1, seed: int = 0
) -> None:
    """Write config.json, safetensors (matrices normal with std 0.02, norms 1, of the config's
    dtype) and a tokenizer whose tokens are whole strings, as transformers reads them. The tensors
    are those that the engine's own table asks for, in as many files as `shards`."""
    import torch
    from safetensors.torch import save_file

    from asyncinfer.models import parse_config, tensor_table

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1), "utf-8")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    table = tensor_table(parse_config(dict(config)))
    pieces = [piece for packed in table.values() for piece in packed.pieces]
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        file = file if shards > 1 else "model.safetensors"
        tensors = {}
        for piece in pieces[shard * len(pieces) // shards : (shard + 1) * len(pieces) // shards]:
            tensor = torch.empty(piece.shape, dtype=dtype, device=device)
            if len(piece.shape) == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, STD, generator=generator)
            tensors[piece.name] = tensor.cpu()
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    write_tokenizer(config["vocab_size"], folder)


def write_tokenizer(size: int, folder: Path) -> None:
    """Write a tokenizer of `size` tokens, which are whole strings, as transformers reads it."""
    _tokenizer(size).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def _tokenizer(size: int) -> Tokenizer:
    """A byte-level tokenizer of `size` tokens: every byte, then short words that no merge makes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (
        "".join(letters)
        for length in itertools.count(2)
        for letters in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=length)
    )
    tokens = itertools.islice(itertools.chain(alphabet, words), size)
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def vocab_size(folder: Path) -> int:
    """The vocabulary size in a checkpoint's config. Raises `BenchError`."""
    path = folder / "config.json"
    try:
        return int(json.loads(path.read_text("utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path}: no checkpoint with a vocab_size") from error
