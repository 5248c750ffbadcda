"""Gemma 3 as it is published from 4B on: a Gemma 3 with a tower for images, which is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.gemma3 import Gemma3
from asyncinfer.models.reader import JsonReader

__all__ = ["Gemma3Multimodal"]

_TEXT = "text_config"
#: What `config.json` says beside `text_config`, and of all of it.
_OF_ALL = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")


class Gemma3Multimodal(Gemma3):
    """Gemma 3 with images, its text part: images are not supported."""

    model_type = "gemma3"
    defaults: ClassVar = {
        **Gemma3.defaults,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    }

    def read(self, architecture: str, values: Mapping[str, Any], file: str) -> ModelConfig:
        whole = JsonReader(values, file)
        text = whole.object(_TEXT)
        if text is None:
            raise whole.refuse(_TEXT, "is required")
        of_all = {key: values[key] for key in _OF_ALL if values.get(key) is not None}
        config = super().read(architecture, {**text.values, **of_all}, file)
        names = replace(
            config.names,
            prefix="language_model.model.",
            head="language_model.lm_head",
            ignored=(*config.names.ignored, r"vision_tower\..*", r"multi_modal_projector\..*"),
        )
        return replace(config, names=names, notes=("images are not supported: only text is read",))
