"""Adapters made by PEFT, the oracle: saved as it saves them, and merged into the model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from asyncinfer.adapters import AdapterPool, check_adapter, open_adapter
from asyncinfer.models import Decoder

__all__ = ["loaded_pool", "random_adapter"]


def random_adapter(
    model: PreTrainedModel, folder: Path, seed: int = 0, **config: Any
) -> dict[str, torch.Tensor]:
    """Save an adapter with random matrices, large enough to show in every logit. Gives the weights
    of the model with the adapter merged; the model itself stays as it is."""
    # Four seconds of imports, which only its own tests should take.
    from peft import LoraConfig, PeftModel, get_peft_model

    given = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **config}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        # It asks the model for an attribute by an old name.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, LoraConfig(**given))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.2, generator=generator)
    adapted.save_pretrained(folder)
    assert isinstance(adapted, PeftModel)
    merged: PreTrainedModel = adapted.merge_and_unload()
    weights = {name: tensor.clone() for name, tensor in merged.state_dict().items()}
    model.load_state_dict(before)
    return weights


def loaded_pool(decoder: Decoder, folders: list[Path]) -> tuple[AdapterPool, list[int]]:
    """A pool with these adapters, and the slot of each."""
    pool = AdapterPool(decoder.config, decoder.device, decoder.dtype, max_adapters=8, max_rank=16)
    slots = []
    for folder in folders:
        with open_adapter(folder) as files:
            slots.append(pool.load(check_adapter(files, pool.layout, pool.max_rank)).slot)
    return pool, slots
