"""The kinds of plugins: a registry for each, with the plugins that the package ships."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Final

from asyncinfer.errors import PluginError
from asyncinfer.plugins.info import PluginInfo
from asyncinfer.plugins.installed import installed, origin
from asyncinfer.plugins.registry import Registry
from asyncinfer.protocols import (
    EVICTION_PROTOCOL_VERSION,
    MODEL_PROTOCOL_VERSION,
    OBSERVER_PROTOCOL_VERSION,
    PROPOSER_PROTOCOL_VERSION,
    SAMPLER_PROTOCOL_VERSION,
    SCHEDULING_PROTOCOL_VERSION,
    CapacityAware,
    ConversationAware,
    EvictionPolicy,
    ModelFamily,
    Observer,
    Proposer,
    SamplerPlugin,
    SchedulingPolicy,
)

__all__ = [
    "block",
    "cache_policies",
    "ignored",
    "models",
    "observers",
    "proposers",
    "register",
    "registries",
    "samplers",
    "schedulers",
    "unblock",
]

cache_policies: Final[Registry[EvictionPolicy]] = Registry(
    "asyncinfer.cache_policies",
    EvictionPolicy,  # type: ignore[type-abstract]
    EVICTION_PROTOCOL_VERSION,
    {
        "arc": "asyncinfer.cache.policies.arc:ARC",
        "conversations": "asyncinfer.cache.policies.conversations:ByConversation",
        "cost-aware": "asyncinfer.cache.policies.cost_aware:CostAware",
        "lfu": "asyncinfer.cache.policies.lfu:LFU",
        "lru": "asyncinfer.cache.policies.lru:LRU",
        "prefix-lhd": "asyncinfer.cache.policies.prefix_lhd:PrefixLHD",
        "s3-fifo": "asyncinfer.cache.policies.s3_fifo:S3FIFO",
        "tail-first": "asyncinfer.cache.policies.leaves:TailFirst",
        "ttl": "asyncinfer.cache.policies.ttl:TTL",
    },
    optional=(CapacityAware, ConversationAware),
)
#: By the name that `config.json` gives under `architectures`.
models: Final[Registry[ModelFamily]] = Registry(
    "asyncinfer.models",
    ModelFamily,  # type: ignore[type-abstract]
    MODEL_PROTOCOL_VERSION,
    {
        "AfmoeForCausalLM": "asyncinfer.models.afmoe:AFMoE",
        "ApertusForCausalLM": "asyncinfer.models.apertus:Apertus",
        "ArceeForCausalLM": "asyncinfer.models.arcee:Arcee",
        "Cohere2ForCausalLM": "asyncinfer.models.cohere2:Cohere2",
        "CwmForCausalLM": "asyncinfer.models.cwm:CWM",
        "DeepseekV2ForCausalLM": "asyncinfer.models.deepseek_v2:DeepSeekV2",
        "DeepseekV32ForCausalLM": "asyncinfer.models.deepseek_v32:DeepSeekV32",
        "DeepseekV3ForCausalLM": "asyncinfer.models.deepseek_v3:DeepSeekV3",
        "Dots1ForCausalLM": "asyncinfer.models.dots1:Dots1",
        "Ernie4_5ForCausalLM": "asyncinfer.models.ernie4_5:Ernie45",
        "Ernie4_5_MoeForCausalLM": "asyncinfer.models.ernie4_5_moe:Ernie45MoE",
        "Exaone4ForCausalLM": "asyncinfer.models.exaone4:Exaone4",
        # The makers' spelling, and transformers'.
        "ExaoneMoEForCausalLM": "asyncinfer.models.exaone_moe:ExaoneMoE",
        "ExaoneMoeForCausalLM": "asyncinfer.models.exaone_moe:ExaoneMoE",
        "FalconH1ForCausalLM": "asyncinfer.models.falcon_h1:FalconH1",
        "GPT2LMHeadModel": "asyncinfer.models.gpt2:GPT2",
        "GPTNeoXForCausalLM": "asyncinfer.models.gpt_neox:GPTNeoX",
        "Gemma2ForCausalLM": "asyncinfer.models.gemma2:Gemma2",
        "Gemma3ForCausalLM": "asyncinfer.models.gemma3:Gemma3",
        "Gemma3ForConditionalGeneration": "asyncinfer.models.multimodal:Gemma3Multimodal",
        "Gemma4ForCausalLM": "asyncinfer.models.gemma4:Gemma4",
        "Gemma4ForConditionalGeneration": "asyncinfer.models.multimodal:Gemma4Multimodal",
        "GemmaForCausalLM": "asyncinfer.models.gemma:Gemma",
        "Glm4ForCausalLM": "asyncinfer.models.glm4:GLM4",
        "Glm4MoeForCausalLM": "asyncinfer.models.glm4_moe:GLM4MoE",
        "Glm4MoeLiteForCausalLM": "asyncinfer.models.glm4_moe_lite:GLM4MoELite",
        "GlmMoeDsaForCausalLM": "asyncinfer.models.glm_moe_dsa:GLM5",
        "GptOssForCausalLM": "asyncinfer.models.gpt_oss:GptOss",
        "GraniteForCausalLM": "asyncinfer.models.granite:Granite",
        "GraniteMoeForCausalLM": "asyncinfer.models.granitemoe:GraniteMoE",
        "GraniteMoeHybridForCausalLM": "asyncinfer.models.granitemoehybrid:GraniteHybrid",
        "GraniteSWAForCausalLM": "asyncinfer.models.granite_swa:GraniteSWA",
        "HYV3ForCausalLM": "asyncinfer.models.hy_v3:HyV3",
        "HunYuanDenseV1ForCausalLM": "asyncinfer.models.hunyuan_v1_dense:HunyuanDense",
        "HunYuanMoEV1ForCausalLM": "asyncinfer.models.hunyuan_v1_moe:HunyuanMoE",
        "KimiLinearForCausalLM": "asyncinfer.models.kimi_linear:KimiLinear",
        "Lfm2ForCausalLM": "asyncinfer.models.lfm2:LFM2",
        "Lfm2MoeForCausalLM": "asyncinfer.models.lfm2_moe:LFM2MoE",
        "Llama4ForCausalLM": "asyncinfer.models.llama4:Llama4",
        "Llama4ForConditionalGeneration": "asyncinfer.models.multimodal:Llama4Multimodal",
        "LlamaForCausalLM": "asyncinfer.models.llama:Llama",
        "MiniMaxM2ForCausalLM": "asyncinfer.models.minimax_m2:MiniMaxM2",
        "Ministral3ForCausalLM": "asyncinfer.models.ministral3:Ministral3",
        "MinistralForCausalLM": "asyncinfer.models.ministral:Ministral",
        "Mistral3ForConditionalGeneration": "asyncinfer.models.multimodal:Mistral3Multimodal",
        "Mistral4ForCausalLM": "asyncinfer.models.mistral4:Mistral4",
        "MistralForCausalLM": "asyncinfer.models.mistral:Mistral",
        "MixtralForCausalLM": "asyncinfer.models.mixtral:Mixtral",
        "NemotronForCausalLM": "asyncinfer.models.nemotron:Nemotron",
        "NemotronHForCausalLM": "asyncinfer.models.nemotron_h:NemotronH",
        "Olmo2ForCausalLM": "asyncinfer.models.olmo2:OLMo2",
        "Olmo3ForCausalLM": "asyncinfer.models.olmo3:OLMo3",
        "OlmoHybridForCausalLM": "asyncinfer.models.olmo_hybrid:OLMoHybrid",
        "OlmoeForCausalLM": "asyncinfer.models.olmoe:OLMoE",
        "Phi3ForCausalLM": "asyncinfer.models.phi3:Phi3",
        "PhiForCausalLM": "asyncinfer.models.phi:Phi",
        # As the makers spell it, and as transformers does.
        "PhiMoEForCausalLM": "asyncinfer.models.phimoe:PhiMoE",
        "PhimoeForCausalLM": "asyncinfer.models.phimoe:PhiMoE",
        "Qwen2ForCausalLM": "asyncinfer.models.qwen2:Qwen2",
        "Qwen2MoeForCausalLM": "asyncinfer.models.qwen2_moe:Qwen2MoE",
        "Qwen3ForCausalLM": "asyncinfer.models.qwen3:Qwen3",
        "Qwen3MoeForCausalLM": "asyncinfer.models.qwen3_moe:Qwen3MoE",
        "Qwen3NextForCausalLM": "asyncinfer.models.qwen3_next:Qwen3Next",
        "Qwen3VLForConditionalGeneration": "asyncinfer.models.multimodal:QwenVL",
        "Qwen3VLMoeForConditionalGeneration": "asyncinfer.models.multimodal:QwenVLMoE",
        "Qwen3_5ForCausalLM": "asyncinfer.models.qwen3_5:Qwen35",
        "Qwen3_5ForConditionalGeneration": "asyncinfer.models.multimodal:Qwen35Multimodal",
        "Qwen3_5MoeForCausalLM": "asyncinfer.models.qwen3_5_moe:Qwen35MoE",
        "Qwen3_5MoeForConditionalGeneration": "asyncinfer.models.multimodal:Qwen35MoEMultimodal",
        "SeedOssForCausalLM": "asyncinfer.models.seed_oss:SeedOss",
        "SmolLM3ForCausalLM": "asyncinfer.models.smollm3:SmolLM3",
        "SolarOpenForCausalLM": "asyncinfer.models.solar_open:SolarOpen",
        "Starcoder2ForCausalLM": "asyncinfer.models.starcoder2:StarCoder2",
        "YoutuForCausalLM": "asyncinfer.models.youtu:Youtu",
    },
)
observers: Final[Registry[Observer]] = Registry(
    "asyncinfer.observers",
    Observer,  # type: ignore[type-abstract]
    OBSERVER_PROTOCOL_VERSION,
    {"request-log": "asyncinfer.telemetry.request_log:RequestLog"},
)
proposers: Final[Registry[Proposer]] = Registry(
    "asyncinfer.proposers",
    Proposer,  # type: ignore[type-abstract]
    PROPOSER_PROTOCOL_VERSION,
    {
        "prompt-lookup": "asyncinfer.speculation:PromptLookup",
        "suffix": "asyncinfer.speculation.suffix_table:SuffixTable",
    },
)
samplers: Final[Registry[SamplerPlugin]] = Registry(
    "asyncinfer.samplers",
    SamplerPlugin,  # type: ignore[type-abstract]
    SAMPLER_PROTOCOL_VERSION,
    {
        "dry": "asyncinfer.samplers:DRY",
        "dynamic-temperature": "asyncinfer.samplers:DynamicTemperature",
        "mirostat": "asyncinfer.samplers:Mirostat",
        "top-n-sigma": "asyncinfer.samplers:TopNSigma",
        "xtc": "asyncinfer.samplers:XTC",
    },
    dataclasses_only=True,
)
schedulers: Final[Registry[SchedulingPolicy]] = Registry(
    "asyncinfer.schedulers",
    SchedulingPolicy,  # type: ignore[type-abstract]
    SCHEDULING_PROTOCOL_VERSION,
    {
        "fcfs": "asyncinfer.scheduler.policy:FCFS",
        "priority": "asyncinfer.scheduler.policy:Priority",
        "deadline": "asyncinfer.scheduler.policy:Deadline",
    },
)


def registries() -> tuple[Registry[Any], ...]:
    """The registries of all groups."""
    return cache_policies, models, observers, proposers, samplers, schedulers


def register(group: str, name: str, factory: Callable[..., Any]) -> None:
    """Make a plugin known by a name in this process, as an entry point would.

    Args:
        group: the entry-point group, such as "asyncinfer.samplers".
        name: not that of another plugin, built in, installed or registered.
        factory: the class, or a function that makes one; of a sampler, its parameters' class.

    Raises:
        PluginError: there is no such group, the name is taken, or the factory lacks something.
    """
    _registry(group).register(name, factory)


def block(group: str, name: str) -> None:
    """Refuse a plugin by name in this process from now on, whether it is built in, installed or
    registered; it is not imported. The environment variable `ASYNCINFER_BLOCK_PLUGINS` does the
    same.

    Args:
        group: the entry-point group, such as "asyncinfer.samplers".
        name: of the plugin; `"*"` stands for every plugin of the group that is installed.

    Raises:
        PluginError: there is no such group.
    """
    _registry(group).block(name)


def unblock(group: str, name: str) -> None:
    """Take a `block` back; names that the environment blocks stay blocked. Raises `PluginError`."""
    _registry(group).unblock(name)


def ignored() -> list[PluginInfo]:
    """Installed plugins that cannot be used, each with the reason: its name is taken, its group
    does not exist, or its distribution's entry points cannot be read."""
    found = [info for registry in registries() for info in registry.shadowed()]
    groups = tuple(registry.group for registry in registries())
    everything = installed()
    for group, points in everything.points.items():
        nearest = None if group in groups else _misspelt(group, groups)
        if nearest is not None:
            problem = f"there is no group {group}; the nearest is {nearest}"
            found += [PluginInfo(p.name, origin(p), "", problem, group) for p in points]
    for distribution, error in everything.unreadable:
        problem = f"its entry points cannot be read: {error}"
        found.append(PluginInfo("*", distribution, "", problem, "asyncinfer"))
    return found


@lru_cache(maxsize=1024)
def _misspelt(group: str, groups: tuple[str, ...]) -> str | None:
    """The group whose name is close to `group`, if any is."""
    letters = "".join(filter(str.isalnum, group.lower()))
    cutoff = 0.0 if letters.startswith("asyncinfer") else 0.8
    return next(iter(get_close_matches(group, groups, n=1, cutoff=cutoff)), None)


def _registry(group: str) -> Registry[Any]:
    groups = {registry.group: registry for registry in registries()}
    if group not in groups:
        raise PluginError(f"no group {group!r} of plugins; there are: {', '.join(groups)}")
    return groups[group]
