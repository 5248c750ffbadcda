"""Multimodal checkpoints: their text model, by the names that its tensors have there. The towers
for images and sounds are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from asyncinfer.models.config import ModelConfig
from asyncinfer.models.family import Family
from asyncinfer.models.gemma3 import Gemma3
from asyncinfer.models.gemma4 import Gemma4
from asyncinfer.models.llama4 import Llama4
from asyncinfer.models.ministral import Ministral
from asyncinfer.models.ministral3 import Ministral3
from asyncinfer.models.mistral import Mistral
from asyncinfer.models.mistral4 import Mistral4
from asyncinfer.models.names import TensorNames
from asyncinfer.models.qwen3 import Qwen3
from asyncinfer.models.qwen3_5 import Qwen35
from asyncinfer.models.qwen3_5_moe import Qwen35MoE
from asyncinfer.models.qwen3_moe import Qwen3MoE
from asyncinfer.models.reader import JsonReader
from asyncinfer.models.text_part import TEXT_ALONE, text_values

__all__ = [
    "Gemma3Multimodal",
    "Gemma4Multimodal",
    "Llama4Multimodal",
    "Mistral3Multimodal",
    "Qwen35MoEMultimodal",
    "Qwen35Multimodal",
    "QwenVL",
    "QwenVLMoE",
]


_IN_MEMORY, _HEAD = "model.language_model.", "lm_head"


class Multimodal(Family):
    """A model of more than text: images and sounds are not supported."""

    #: `model_type` under `text_config` -> the text model; a config without it has the first.
    texts: ClassVar[Mapping[str, type[Family]]]
    #: The prefix of the text model's tensors, except the head. Models whose prefix is another one
    #: have this, too, where their tensors were saved as transformers holds them in memory.
    prefix: ClassVar[str] = _IN_MEMORY
    head: ClassVar[str] = _HEAD
    #: Patterns of tensors that do not belong to the text model.
    towers: ClassVar[tuple[str, ...]]

    def read(self, architecture: str, values: Mapping[str, Any], file: str) -> ModelConfig:
        text = JsonReader({**self.defaults, **text_values(values, file)}, file, "text_config.")
        kind = text.string("model_type", next(iter(self.texts)))
        if kind not in self.texts:
            raise text.refuse("model_type", f"must be one of {', '.join(self.texts)}")
        config = self.texts[kind]().read(architecture, text.values, file)
        names = replace(
            config.names,
            prefix=self.prefix,
            head=self.head,
            other_prefix=(_IN_MEMORY, _HEAD),
            ignored=(*config.names.ignored, *self.towers),
        )
        return replace(config, names=names, notes=(*config.notes, TEXT_ALONE))


class Gemma3Multimodal(Multimodal):
    """Gemma 3 with images, its text part: images are not supported."""

    model_type = "gemma3"
    texts: ClassVar = {"gemma3_text": Gemma3}
    prefix = "language_model.model."
    head = "language_model.lm_head"
    towers = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)
    defaults: ClassVar = {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    }


class Gemma4Multimodal(Multimodal):
    """Gemma 4 with images and sounds, such as gemma-4-E2B-it, its text alone."""

    model_type = "gemma4"
    texts: ClassVar = {"gemma4_text": Gemma4}
    towers = (r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*",)


class Llama4Multimodal(Multimodal):
    """Llama 4 with images, such as Llama-4-Scout-17B-16E-Instruct, its text alone."""

    model_type = "llama4"
    texts: ClassVar = {"llama4_text": Llama4}
    prefix = "language_model.model."
    head = "language_model.lm_head"
    towers = (r"vision_model\..*", r"multi_modal_projector\..*")


class Mistral3Multimodal(Multimodal):
    """Mistral Small 3.1 and 3.2, Ministral 3, Mistral Small 4 with images, their text model: images
    are not supported."""

    model_type = "mistral3"
    texts: ClassVar = {
        "mistral": Mistral,
        "ministral": Ministral,
        "ministral3": Ministral3,
        "mistral4": Mistral4,
    }
    defaults: ClassVar = {"num_attention_heads": 32, "max_position_embeddings": 131_072}
    prefix = "language_model.model."
    head = "language_model.lm_head"
    towers = (r"(model\.)?(vision_tower|multi_modal_projector)\..*",)


class QwenVL(Multimodal):
    """Qwen3-VL, such as Qwen3-VL-8B-Instruct, its text alone."""

    model_type = "qwen3_vl"
    texts: ClassVar = {"qwen3_vl_text": Qwen3}
    towers = (r"model\.visual\..*",)
    defaults: ClassVar = {
        "vocab_size": 151_936,
        "num_attention_heads": 32,
        "max_position_embeddings": 128_000,
        # Only transformers 4 left it out, and meant this one.
        "rope_theta": 5_000_000.0,
    }


class _Qwen3VLMoEText(Qwen3MoE):
    """Qwen3-VL's text model with experts: all of a layer's in one tensor."""

    def configure(self, config: JsonReader, llama: ModelConfig) -> ModelConfig:
        base = super().configure(config, llama)
        assert base.experts is not None
        names = TensorNames(
            expert_up=("mlp.experts.gate_up_proj",), expert_down="mlp.experts.down_proj"
        )
        return replace(base, experts=replace(base.experts, normalise=True), names=names)


class QwenVLMoE(QwenVL):
    """Qwen3-VL with experts, such as Qwen3-VL-30B-A3B-Instruct, its text alone."""

    model_type = "qwen3_vl_moe"
    texts: ClassVar = {"qwen3_vl_moe_text": _Qwen3VLMoEText}
    defaults: ClassVar = {
        "vocab_size": 151_936,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128_000,
        "rope_theta": 500_000.0,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
    }


class Qwen35Multimodal(QwenVL):
    """Qwen3.5 with images, such as Qwen3.5-9B, its text model: images are not supported."""

    model_type = "qwen3_5"
    texts: ClassVar = {"qwen3_5_text": Qwen35}
    defaults: ClassVar = {}


class Qwen35MoEMultimodal(QwenVL):
    """Qwen3.5 with experts and images, such as Qwen3.5-35B-A3B, its text model: images are not
    supported."""

    model_type = "qwen3_5_moe"
    texts: ClassVar = {"qwen3_5_moe_text": Qwen35MoE}
    defaults: ClassVar = {}
