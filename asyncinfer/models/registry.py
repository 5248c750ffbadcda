"""Architecture names to families."""

from __future__ import annotations

from typing import Final

from asyncinfer.models.family import FAMILY_PROTOCOL_VERSION, Family
from asyncinfer.plugins import Registry

__all__ = ["families"]

#: By the name that `config.json` gives under `architectures`.
families: Final[Registry[Family]] = Registry(
    "asyncinfer.models",
    Family,  # type: ignore[type-abstract]
    FAMILY_PROTOCOL_VERSION,
    {
        "GPT2LMHeadModel": "asyncinfer.models.gpt2:GPT2",
        "GPTNeoXForCausalLM": "asyncinfer.models.gpt_neox:GPTNeoX",
        "Gemma2ForCausalLM": "asyncinfer.models.gemma2:Gemma2",
        "Gemma3ForCausalLM": "asyncinfer.models.gemma3:Gemma3",
        "GptOssForCausalLM": "asyncinfer.models.gpt_oss:GptOss",
        "GraniteForCausalLM": "asyncinfer.models.granite:Granite",
        "LlamaForCausalLM": "asyncinfer.models.llama:Llama",
        "MistralForCausalLM": "asyncinfer.models.mistral:Mistral",
        "MixtralForCausalLM": "asyncinfer.models.mixtral:Mixtral",
        "Olmo2ForCausalLM": "asyncinfer.models.olmo2:OLMo2",
        "Phi3ForCausalLM": "asyncinfer.models.phi3:Phi3",
        "PhiForCausalLM": "asyncinfer.models.phi:Phi",
        "Qwen2ForCausalLM": "asyncinfer.models.qwen2:Qwen2",
        "Qwen3ForCausalLM": "asyncinfer.models.qwen3:Qwen3",
        "Qwen3MoeForCausalLM": "asyncinfer.models.qwen3_moe:Qwen3MoE",
        "SmolLM3ForCausalLM": "asyncinfer.models.smollm3:SmolLM3",
        "Starcoder2ForCausalLM": "asyncinfer.models.starcoder2:StarCoder2",
    },
)
