"""Mistral's models as they are published from Mistral Small 3.1 on: with a tower for images, which
is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.ministral import Ministral
from asyncinfer.models.ministral3 import Ministral3
from asyncinfer.models.mistral import Mistral
from asyncinfer.models.mistral4 import Mistral4
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.text_part import TEXT_ALONE, text_values

__all__ = ["Mistral3Multimodal"]

#: The text models that a checkpoint may have, by `model_type`.
_TEXT: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "mistral": Mistral(),
        "ministral": Ministral(),
        "ministral3": Ministral3(),
        "mistral4": Mistral4(),
    }
)


class Mistral3Multimodal(Family):
    """Mistral Small 3.1 and 3.2, Ministral 3, Mistral Small 4 with images, their text model: images
    are not supported."""

    model_type = "mistral3"

    def read(self, architecture: str, values: Mapping[str, Any], file: str) -> ModelConfig:
        text = JsonReader(text_values(values, file), file, "text_config.")
        kind = text.string("model_type", "mistral")
        if kind not in _TEXT:
            raise text.refuse("model_type", f"must be one of {', '.join(_TEXT)}")
        config = _TEXT[kind].read(architecture, text.values, file)
        names = replace(
            config.names,
            prefix="language_model.model.",
            head="language_model.lm_head",
            ignored=(*config.names.ignored, r"vision_tower\..*", r"multi_modal_projector\..*"),
        )
        return replace(config, names=names, notes=(*config.notes, TEXT_ALONE))
