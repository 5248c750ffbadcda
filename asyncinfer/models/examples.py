"""`EXAMPLES`: a well-known checkpoint of each shipped architecture, by groups."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["EXAMPLES", "GROUPS"]

#: Group -> architecture -> a checkpoint's id on the hub. A text model that is only published
#: together with towers has the id of the whole.
GROUPS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "attention and a feed-forward layer": {
            "ApertusForCausalLM": "swiss-ai/Apertus-8B-Instruct-2509",
            "ArceeForCausalLM": "arcee-ai/AFM-4.5B",
            "Cohere2ForCausalLM": "CohereLabs/c4ai-command-r7b-12-2024",
            "CwmForCausalLM": "facebook/cwm",
            "Ernie4_5ForCausalLM": "baidu/ERNIE-4.5-0.3B-PT",
            "Exaone4ForCausalLM": "LGAI-EXAONE/EXAONE-4.0-32B",
            "GPT2LMHeadModel": "openai-community/gpt2",
            "GPTNeoXForCausalLM": "EleutherAI/pythia-1.4b",
            "Gemma2ForCausalLM": "google/gemma-2-9b-it",
            "Gemma3ForCausalLM": "google/gemma-3-1b-it",
            "GemmaForCausalLM": "google/gemma-7b-it",
            "Glm4ForCausalLM": "zai-org/GLM-4-9B-0414",
            "GraniteForCausalLM": "ibm-granite/granite-3.1-8b-instruct",
            "GraniteSWAForCausalLM": "ibm-granite/granite-swash-2b",
            "HunYuanDenseV1ForCausalLM": "tencent/Hunyuan-7B-Instruct",
            "LlamaForCausalLM": "meta-llama/Llama-3.1-8B-Instruct",
            "Ministral3ForCausalLM": "mistralai/Ministral-3-8B-Base-2512",
            "MinistralForCausalLM": "mistralai/Ministral-8B-Instruct-2410",
            "MistralForCausalLM": "mistralai/Mistral-7B-Instruct-v0.3",
            "NemotronForCausalLM": "nvidia/Nemotron-Mini-4B-Instruct",
            "Olmo2ForCausalLM": "allenai/OLMo-2-1124-7B",
            "Olmo3ForCausalLM": "allenai/Olmo-3-7B-Instruct",
            "Phi3ForCausalLM": "microsoft/Phi-4-mini-instruct",
            "PhiForCausalLM": "microsoft/phi-2",
            "Qwen2ForCausalLM": "Qwen/Qwen2.5-7B-Instruct",
            "Qwen3ForCausalLM": "Qwen/Qwen3-8B",
            "SeedOssForCausalLM": "ByteDance-Seed/Seed-OSS-36B-Instruct",
            "SmolLM3ForCausalLM": "HuggingFaceTB/SmolLM3-3B",
            "Starcoder2ForCausalLM": "bigcode/starcoder2-7b",
            "YoutuForCausalLM": "tencent/Youtu-LLM-2B",
        },
        "experts": {
            "AfmoeForCausalLM": "arcee-ai/Trinity-Mini",
            "DeepseekV2ForCausalLM": "deepseek-ai/DeepSeek-V2-Lite",
            "DeepseekV32ForCausalLM": "deepseek-ai/DeepSeek-V3.2-Exp",
            "DeepseekV3ForCausalLM": "deepseek-ai/DeepSeek-V3",
            "Dots1ForCausalLM": "rednote-hilab/dots.llm1.inst",
            "Ernie4_5_MoeForCausalLM": "baidu/ERNIE-4.5-21B-A3B-PT",
            "ExaoneMoEForCausalLM": "LGAI-EXAONE/K-EXAONE-236B-A23B",
            "ExaoneMoeForCausalLM": "LGAI-EXAONE/K-EXAONE-236B-A23B",
            "Gemma4ForCausalLM": "google/gemma-4-26B-A4B-it",
            "Glm4MoeForCausalLM": "zai-org/GLM-4.5",
            "Glm4MoeLiteForCausalLM": "zai-org/GLM-4.7-Flash",
            "GlmMoeDsaForCausalLM": "zai-org/GLM-5",
            "GptOssForCausalLM": "openai/gpt-oss-20b",
            "GraniteMoeForCausalLM": "ibm-granite/granite-3.0-3b-a800m-instruct",
            "HYV3ForCausalLM": "tencent/Hy3-preview",
            "HunYuanMoEV1ForCausalLM": "tencent/Hunyuan-A13B-Instruct",
            "Llama4ForCausalLM": "meta-llama/Llama-4-Scout-17B-16E",
            "MiniMaxM2ForCausalLM": "MiniMaxAI/MiniMax-M2",
            "Mistral4ForCausalLM": "mistralai/Mistral-Small-4-119B-2603",
            "MixtralForCausalLM": "mistralai/Mixtral-8x7B-v0.1",
            "OlmoeForCausalLM": "allenai/OLMoE-1B-7B-0924",
            "PhiMoEForCausalLM": "microsoft/Phi-3.5-MoE-instruct",
            "PhimoeForCausalLM": "microsoft/Phi-3.5-MoE-instruct",
            "Qwen2MoeForCausalLM": "Qwen/Qwen1.5-MoE-A2.7B",
            "Qwen3MoeForCausalLM": "Qwen/Qwen3-30B-A3B",
            "SolarOpenForCausalLM": "upstage/Solar-Open-100B",
        },
        "layers with a state": {
            "FalconH1ForCausalLM": "tiiuae/Falcon-H1-0.5B-Instruct",
            "GraniteMoeHybridForCausalLM": "ibm-granite/granite-4.0-h-tiny",
            "KimiLinearForCausalLM": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
            "Lfm2ForCausalLM": "LiquidAI/LFM2-1.2B",
            "Lfm2MoeForCausalLM": "LiquidAI/LFM2-8B-A1B",
            "NemotronHForCausalLM": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
            "OlmoHybridForCausalLM": "allenai/Olmo-Hybrid-7B",
            "Qwen3NextForCausalLM": "Qwen/Qwen3-Next-80B-A3B-Instruct",
            "Qwen3_5ForCausalLM": "Qwen/Qwen3.5-27B",
            "Qwen3_5MoeForCausalLM": "Qwen/Qwen3.5-35B-A3B",
        },
        "the text of models of more than text": {
            "Gemma3ForConditionalGeneration": "google/gemma-3-4b-it",
            "Gemma4ForConditionalGeneration": "google/gemma-4-E2B-it",
            "Llama4ForConditionalGeneration": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
            "Mistral3ForConditionalGeneration": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
            "Qwen3VLForConditionalGeneration": "Qwen/Qwen3-VL-8B-Instruct",
            "Qwen3VLMoeForConditionalGeneration": "Qwen/Qwen3-VL-30B-A3B-Instruct",
            "Qwen3_5ForConditionalGeneration": "Qwen/Qwen3.5-27B",
            "Qwen3_5MoeForConditionalGeneration": "Qwen/Qwen3.5-35B-A3B",
        },
    }
)
#: Architecture -> its group and its checkpoint.
EXAMPLES: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        architecture: (group, checkpoint)
        for group, members in GROUPS.items()
        for architecture, checkpoint in members.items()
    }
)
