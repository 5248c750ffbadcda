"""Small random models in GGUF files: logits of llama.cpp on the same files. Skipped where
llama-cpp-python is not installed.

A case says what a file has to have for llama.cpp, which takes more for granted than transformers
does. llama.cpp rounds to float16 on its way, and takes another expert where two are nearly as good.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gguf_files
from models.families import GLOBAL, LOCAL, TEMPERED, random_model, randomised
from models.gguf_files import architecture_of, write_gguf
from models.llama_cpp_logits import llama_cpp_logits
from models.test_gguf import GRANTED
from models.test_gguf_hybrids import config_of
from transformers import PreTrainedModel

from asyncinfer.models import load_model
from asyncinfer.testing.decoder_run import DecoderRun

TOKENS = 70
#: Logits have a deviation of 0.6 to 3; a mistake of a layer moves them by as much.
TOLERANCE = 0.08


@dataclass(frozen=True, slots=True)
class Case:
    make: Callable[[], PreTrainedModel]
    #: Values of the file, by keys without the architecture's name.
    said: dict[str, Any] = field(default_factory=dict)


def family(name: str, kind: str = "plain", said: dict[str, Any] | None = None, **more: Any) -> Case:
    changes = {**GRANTED.get(name, {}), **more}
    return Case(lambda: random_model(name, kind, **changes), said or {})


def hybrid(name: str, shape: int, said: dict[str, Any] | None = None, **changes: Any) -> Case:
    def make() -> PreTrainedModel:
        config = config_of(name, shape)
        for key, value in changes.items():
            setattr(config, key, value)
        return randomised(config)

    return Case(make, said or {})


#: The layer that predicts a further token is not one of the file's.
LAST = {"nextn_predict_layers": 0}
#: Queries and keys of delta nets are normalised with the model's epsilon, not with this one.
#: Values have as many dimensions as keys.
KIMI = {"rms_norm_eps": 1e-6}
NET = {**KIMI, "linear_value_head_dim": 12}
#: Pairs of dimensions that turn by time, height and width: all are a text's.
SECTIONS = {"rope.dimension_sections": [2, 1, 1, 0]}
#: llama.cpp takes 30 where a file of Gemma 4 has no number; published ones have it.
CAPPED = {"final_logit_softcapping": 30.0}
CASES = {
    "afmoe": family("afmoe", mup_enabled=True),
    "apertus": family("apertus"),
    "arcee": family("arcee"),
    "cohere2": family("cohere2"),
    # Its groups of experts have the sum of their two best scores, in the place of the best.
    "deepseek_v2": family("deepseek_v2", q_lora_rank=24),
    "deepseek_v3": family("deepseek_v3"),
    "dots1": family("dots1"),
    "ernie4_5": family("ernie4_5"),
    "ernie4_5_moe": family("ernie4_5_moe", said={"expert_shared_feed_forward_length": 48}),
    "exaone-moe": family("exaone_moe", said={**LAST, "block_count": 4}),
    # Windows are those of the model with 64 layers.
    "exaone4": family("exaone4", num_hidden_layers=64, layer_types=([LOCAL] * 3 + [GLOBAL]) * 16),
    "falcon-h1": hybrid("falcon-h1", 0),
    "falcon-h1 with norms": hybrid("falcon-h1", 1, attention_bias=False),
    "gemma": family("gemma"),
    "gemma2": family("gemma2"),
    "gemma3": family("gemma3_text"),
    "gemma4": hybrid("gemma4-dense", 0, **CAPPED),
    "gemma4 with experts": hybrid("gemma4-experts", 0, **CAPPED),
    "glm4": family("glm4"),
    "glm4 tied": family("glm4", "no biases, tied"),
    "glm4_moe": family("glm4_moe", said={**LAST, "block_count": 3}),
    "glm4_moe with groups": family("glm4_moe", "norms, groups, biases", {**LAST, "block_count": 3}),
    "gpt2": family("gpt2"),
    "gpt2 untied": family("gpt2", "untied, wide"),
    "gpt_neox": family("gpt_neox"),
    "gpt_neox one after the other": family("gpt_neox", "one after the other"),
    "gpt_oss": family("gpt_oss", said={"expert_feed_forward_length": 112}),
    "granite": family("granite", "multipliers"),
    "granite tied": family("granite", "biases, tied"),
    "granite-4": hybrid("granite-4", 0, mamba_expand=2, mamba_d_head=16),
    "granitemoe": family("granitemoe"),
    "granitemoe tied": family("granitemoe", "biases, tied"),
    "hunyuan dense": family("hunyuan_v1_dense"),
    "hunyuan moe": family("hunyuan_v1_moe", said={"expert_feed_forward_length": 112}),
    "kimi-linear": hybrid("kimi-linear", 0, **KIMI),
    "lfm2": hybrid("lfm2", 0),
    "lfm2 wide": hybrid("lfm2", 1),
    "lfm2-moe": hybrid("lfm2-moe", 0),
    "llama": family("llama"),
    "llama 3": family("llama", "tied, llama3"),
    "llama4": hybrid("llama4", 0),
    "minimax_m2": family(
        "minimax_m2", said={"expert_gating_func": 2, "expert_feed_forward_length": 112}
    ),
    "ministral3": family("ministral3"),
    # Files of this architecture have no windows in llama.cpp, whatever they say.
    "mistral": family("mistral", "no window"),
    "mistral4": Case(
        lambda: random_model("mistral4", "plain"),
        {
            "attention.temperature_scale": TEMPERED["llama_4_scaling_beta"],
            "attention.temperature_length": TEMPERED["original_max_position_embeddings"],
        },
    ),
    "mixtral": family("mixtral"),
    "nemotron": family("nemotron"),
    "nemotron-h": hybrid("nemotron-h", 0),
    "nemotron-h with experts": hybrid("nemotron-h", 1),
    "olmo2": family("olmo2"),
    "olmo3": family("olmo3"),
    "olmoe": family("olmoe", num_key_value_heads=4),
    "phi": family("phi"),
    "phi grouped": family("phi", "grouped"),
    # Windows of Phi-3 are switched off in llama.cpp.
    "phi3": family("phi3"),
    "phi3 longrope": family("phi3", "longrope", {"rope.scaling.attn_factor": math.sqrt(1.25)}),
    "qwen2": family("qwen2"),
    "qwen2 tied": family("qwen2", "tied"),
    "qwen2_moe": family("qwen2_moe"),
    "qwen3": family("qwen3"),
    "qwen3 tied": family("qwen3", "tied"),
    "qwen3_moe": family("qwen3_moe"),
    "qwen3-next": hybrid("qwen3-next", 0, **NET),
    "qwen3.5": hybrid("qwen3.5", 0, SECTIONS, **NET),
    "qwen3.5-moe": hybrid("qwen3.5-moe", 0, SECTIONS, **NET),
    "seed_oss": family("seed_oss"),
    "smollm3": family("smollm3"),
    # Windows of Starcoder 2 are not read.
    "starcoder2": family("starcoder2", "multi-query"),
}


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    if case.said.get("nextn_predict_layers") == 0:
        monkeypatch.setattr(gguf_files, "FURTHER", ())
    model = case.make()
    architecture = architecture_of(model)
    said = {f"{architecture}.{key}": value for key, value in case.said.items()}
    path = write_gguf(model, tmp_path / "model.gguf", **said)
    # With others a router of Qwen3's has two experts that are nearly as good.
    ids = torch.randint(3, 190, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
    run = DecoderRun(load_model(path, "cpu", torch.float32, max_context=256), [ids])
    run.step({0: TOKENS})
    theirs = torch.from_numpy(llama_cpp_logits(path, ids))
    torch.testing.assert_close(run.logits[0], theirs, rtol=0.0, atol=TOLERANCE)
