"""Writing a checkpoint that can be read while it is replaced."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from asyncinfer.builtin.training.vocabulary import write_tokenizer


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write `model` in bfloat16 with its tokenizer to `folder`, each file in one atomic step."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {  # each once: the head is the embedding
        name: parameter.detach().to("cpu", torch.bfloat16)
        for name, parameter in model.named_parameters()
    }
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".export-") as name:
        scratch = Path(name)
        model.save_pretrained(scratch, state_dict=weights)
        _finish_config(scratch / "config.json")
        write_tokenizer(tokenizer, scratch, int(model.config.max_position_embeddings))
        for path in sorted(scratch.iterdir()):
            os.chmod(path, 0o644)
            os.replace(path, folder / path.name)


def _finish_config(path: Path) -> None:
    """Say the rope's base in the older place too, for readers that know only that one."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    config["dtype"] = config["torch_dtype"] = "bfloat16"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
