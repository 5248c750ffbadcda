"""Random adapters of the embedded model, and that model with one merged."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from asyncinfer.builtin import MODEL_PATH

__all__ = ["ALL", "CONFIG", "merged_model", "random_tensors"]

#: Outputs and inputs of the modules of a layer.
ALL = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (128, 256),
    "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (640, 256),
    "mlp.up_proj": (640, 256),
    "mlp.down_proj": (256, 640),
}
CONFIG: dict[str, Any] = {"peft_type": "LORA", "lora_alpha": 16}
_LAYERS = 6


def random_tensors(
    seed: int, rank: int = 4, modules: tuple[str, ...] = tuple(ALL)
) -> dict[str, torch.Tensor]:
    """An adapter's state dict, large enough to change what the model says."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(_LAYERS):
        for module in modules:
            outputs, inputs = ALL[module]
            name = f"base_model.model.model.layers.{layer}.{module}"
            down = torch.randn(rank, inputs, generator=generator) * 0.05
            up = torch.randn(outputs, rank, generator=generator) * 0.05
            tensors[f"{name}.lora_A.weight"] = down
            tensors[f"{name}.lora_B.weight"] = up
    return tensors


def merged_model(folder: Path, tensors: dict[str, torch.Tensor], *, rslora: bool = False) -> Path:
    """The embedded model with the adapter added to its matrices, in float32."""
    shutil.copytree(MODEL_PATH, folder, dirs_exist_ok=True)
    weights = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
    for name in tensors:
        if name.endswith("lora_A.weight"):
            down, up = tensors[name], tensors[name.replace("lora_A", "lora_B")]
            rank = len(down)
            scale = CONFIG["lora_alpha"] / (math.sqrt(rank) if rslora else rank)
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{module}.weight"] += scale * (up @ down)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = config["torch_dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config))
    return folder
