"""Models in GGUF files: logits equal to those of the model they were made from."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from models.checkpoints import Sequences, expected
from models.families import CASES, FAMILIES, TEMPERED, random_model, randomised
from models.gemmas import GEMMAS
from models.gguf_files import ARCHITECTURES, write_gguf
from models.hybrids import HYBRIDS
from models.sparse import SPARSE
from transformers import PreTrainedModel

from asyncinfer.bench.weight_bytes import weight_bytes
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels import native
from asyncinfer.models import load, load_model, tensor_table
from asyncinfer.models.gguf import architectures, gguf_config
from asyncinfer.plugins import models
from asyncinfer.text.gguf_words import CUTS
from asyncinfer.weights.gguf import GgufCheckpoint

Q = gguf.GGMLQuantizationType
#: What is taken for granted of some families, in the place of what a case has.
GRANTED: dict[str, dict[str, Any]] = {
    "afmoe": {"mup_enabled": True},
    "deepseek_v3": {"attention_bias": False},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 256},
    "gemma3_text": {"query_pre_attn_scalar": 64},
    # A file of the family's own architecture has no word for how queries grow.
    "mistral4": {
        "rope_interleave": True,
        "rope_parameters": {**TEMPERED, "llama_4_scaling_beta": 0.1},
    },
    "qwen3_moe": {"norm_topk_prob": True},
}
#: What a file has no words for, or llama.cpp takes for granted.
UNSAID = {
    ("afmoe", "listed, scaled, tied"): "which layers have windows",
    ("dots1", "groups, windows, biases"): "which layers have windows",
    ("cohere2", "biases, untied"): "which layers have windows, a head",
    ("deepseek_v3", "not interleaved"): "pairs that are apart",
    ("deepseek_v3", "yarn, queries whole"): "a rotation that is scaled; see test_latent_yarn",
    ("olmoe", "normalised, tied"): "experts that sum to one",
    ("gemma2", "caps"): "biases of Gemma's attention, another scale",
    ("gemma2", "no caps, untied"): "Gemma 2 without caps",
    ("gemma3_text", "listed"): "which layers have windows",
    ("gemma3_text", "scaled"): "which layers have windows",
    ("gpt2", "unscaled"): "attention without a scale",
    ("ernie4_5_moe", "some layers, biases, untied"): "the last layer with experts",
    ("gpt_oss", "listed, unscaled"): "which layers have windows, another limit",
    ("ministral3", "window, tied"): "a window, another factor of the rotation",
    ("mixtral", "window, one of three"): "a window of every layer",
    ("phi", "all rotated"): "another activation",
    ("phimoe", "longrope, biases"): "jitter, the rotation's factor; see test_phi_longrope",
    ("qwen2", "window above"): "which layers have windows",
    ("qwen2_moe", "some layers, normalised, windows"): "which layers have experts",
    ("qwen3", "bias and windows"): "which layers have windows",
    ("qwen3_moe", "some layers, normalised"): "which layers have experts",
    ("qwen3_moe", "windows"): "which layers have windows",
    ("smollm3", "every other"): "another interval of layers without rotation",
    ("smollm3", "listed, untied, windows"): "which layers are rotated",
}
#: GGUF's architectures that are not loaded, by the reason.
REFUSED = {
    "no family of ours": (
        "arctic baichuan bailingmoe bailingmoe2 bitnet bloom chameleon chatglm "
        "codeshell command-r dbrx deci deepseek exaone falcon "
        "gemma3n gptj grok grovemoe internlm2 jais "
        "jais2 maincoder mimo2 minicpm minicpm3 mpt "
        "olmo openelm orion pangu-embedded plamo plamo3 plm qwen refact "
        "smallthinker stablelm starcoder step35 xverse"
    ),
    "layers that keep another state in place of KV": (
        "arwkv7 jamba mamba mamba2 plamo2 rwkv6 rwkv6qwen2 rwkv7"
    ),
    "images or sound": (
        "clip cogvlm deepseek2-ocr hunyuan_vl paddleocr qwen2vl qwen3vl qwen3vlmoe wavtokenizer-dec"
    ),
    "no text is written from left to right": (
        "bert dream eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llada llada-moe llama-embed "
        "modern-bert neo-bert nomic-bert nomic-bert-moe rnd1 t5 t5encoder"
    ),
}
#: Families whose GGUF files are not loaded.
WITHOUT_FILES = {
    "CwmForCausalLM": "a file does not say which layers have windows",
    "ExaoneMoeForCausalLM": "another name of ExaoneMoEForCausalLM",
    "Glm4MoeLiteForCausalLM": "a file is one of DeepSeek-V2",
    "GraniteSWAForCausalLM": "llama.cpp has no such architecture",
    "HYV3ForCausalLM": "the package that reads GGUF files knows no such architecture",
    "Qwen3VLForConditionalGeneration": "its text model alone is qwen3",
    "Qwen3VLMoeForConditionalGeneration": "its text model alone is qwen3moe",
    "YoutuForCausalLM": "a file is one of DeepSeek-V2, which has experts",
    "SolarOpenForCausalLM": "a file is one of GLM-4 with experts",
    "DeepseekV32ForCausalLM": "the package that reads GGUF files knows no such architecture",
    "Llama4ForConditionalGeneration": "its text model alone is llama4",
    "MinistralForCausalLM": "a file does not say which layers have windows",
    "Mistral3ForConditionalGeneration": "its text model alone is llama or mistral3",
    "Gemma3ForConditionalGeneration": "its text model alone is gemma3",
    "Gemma4ForConditionalGeneration": "its text model alone is gemma4",
    "OlmoHybridForCausalLM": "llama.cpp has no such architecture",
    "PhimoeForCausalLM": "another name of PhiMoEForCausalLM",
    "Qwen3_5ForConditionalGeneration": "its text model alone is qwen35",
    "Qwen3_5MoeForConditionalGeneration": "its text model alone is qwen35moe",
}
#: Of packed weights: halves of heads in order, experts, all three projections in one, no gate, a
#: latent KV.
PACKED_FAMILIES = ("llama", "mixtral", "phi3", "gpt2", "gemma3_text", "deepseek_v3")
SAID = [case for case in CASES if case[0] in ARCHITECTURES and case not in UNSAID]


@pytest.mark.parametrize("case", SAID, ids=lambda case: f"{case[0]}-{case[1]}".replace(" ", "-"))
def test_logits(case: tuple[str, str], tmp_path: Path) -> None:
    check_logits(random_model(*case, **GRANTED.get(case[0], {})), tmp_path)


def test_latent_yarn(tmp_path: Path) -> None:
    """The file has one number for two factors, which are equal in DeepSeek's models."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 64,
    }
    model = random_model(
        "deepseek_v3", "yarn, queries whole", attention_bias=False, rope_parameters=rope
    )
    check_logits(model, tmp_path)


def test_queries_that_grow_as_a_file_says(tmp_path: Path) -> None:
    """Mistral Large 3's files are called as DeepSeek's are."""
    model = random_model("mistral4", "plain")
    beta, start = TEMPERED["llama_4_scaling_beta"], TEMPERED["original_max_position_embeddings"]
    said = {"attention.temperature_scale": beta, "attention.temperature_length": start}
    check_logits(model, tmp_path, "deepseek2", said)
    check_logits(model, tmp_path, "mistral4", said)


@pytest.mark.parametrize(
    "said",
    [
        {"rope.scale_linear": 4.0, "rope.scaling.type": None, "rope.scaling.factor": None},
        {"rope.scaling.type": None, "rope.scaling.factor": 4.0},
    ],
    ids=["the first files' key", "no type"],
)
def test_a_linear_scaling_that_a_file_does_not_call_so(
    said: dict[str, Any], tmp_path: Path
) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    check_logits(random_model("llama", "plain", rope_parameters=rope), tmp_path, "llama", said)


@pytest.mark.parametrize("kind", ["linear", "none", "yarn"])
def test_a_factor_of_0_stands_for_no_scaling(kind: str, tmp_path: Path) -> None:
    said = {"rope.scaling.type": kind, "rope.scaling.factor": 0.0}
    check_logits(random_model("llama", "plain"), tmp_path, "llama", said)


def test_a_window_of_0_stands_for_none(tmp_path: Path) -> None:
    """Files of Phi-4 have it."""
    check_logits(random_model("phi3", "plain"), tmp_path, "phi3", {"attention.sliding_window": 0})


def test_phi_longrope(tmp_path: Path) -> None:
    """llama.cpp scales the rotation by the one factor that Phi-3.5-MoE has."""
    rope = FAMILIES["phimoe"]["longrope, biases"]["rope_parameters"]
    scales = dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122)
    model = random_model(
        "phimoe", "longrope, biases", router_jitter_noise=0.01, rope_parameters={**rope, **scales}
    )
    check_logits(model, tmp_path)


def test_every_architecture_is_mapped_or_refused_with_a_reason() -> None:
    """GGUF's list grows with the package that reads it: a new name shows here."""
    theirs = set(gguf.MODEL_ARCH_NAMES.values())
    ours = {name for name in architectures.ARCHITECTURES if "+" not in name}
    refused = {name for names in REFUSED.values() for name in names.split()}
    assert ours <= theirs
    assert not ours & refused
    # The package may be older or newer than the list.
    assert theirs - ours <= refused, sorted(theirs - ours - refused)
    families = {each.family for each in architectures.ARCHITECTURES.values()}
    left = {one for one in models.names() if models.is_built_in(one)} - families
    assert left == WITHOUT_FILES.keys()


def test_the_documentation_lists_the_architectures_that_are_loaded() -> None:
    page = (Path(__file__).parents[2] / "docs/gguf.md").read_text("utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| architectures |"))
    listed = re.findall("`([^`]+)`", row)
    assert sorted(listed) == sorted(name for name in architectures.ARCHITECTURES if "+" not in name)
    (row,) = (line for line in page.splitlines() if line.startswith("| tokenizers |"))
    assert re.findall("`([^`]+)`", row.partition("`pre` types")[2]) == sorted(CUTS)


def check_logits(
    model: PreTrainedModel, tmp_path: Path, name: str = "", said: Mapping[str, Any] | None = None
) -> None:
    """`name` is that of the file's architecture, of which it also has the values `said`."""
    values = {f"{name}.{key}": value for key, value in (said or {}).items()}
    path = write_gguf(model, tmp_path / "model.gguf", name=name, **values)
    decoder = load_model(path, "cpu", torch.float32, max_context=256)
    ids = [torch.randint(0, 199, (70,), generator=torch.Generator().manual_seed(3))]
    sequences = Sequences(decoder, ids)
    sequences.step(s0=50)
    for _ in range(20):
        sequences.step(s0=1)
    torch.testing.assert_close(sequences.logits[0], expected(model, ids[0]), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(
    "case",
    [next(case for case in CASES if case[0] == family) for family in PACKED_FAMILIES],
    ids=lambda case: case[0],
)
@pytest.mark.parametrize("kind", [Q.Q4_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_packed_products_give_the_logits_of_floats(
    case: tuple[str, str], kind: Q, tmp_path: Path
) -> None:
    """Rows in another order than in the file, experts, and an embedding that is the head."""
    path = write_gguf(random_model(*case), tmp_path / "model.gguf", kind)
    ids = [torch.randint(0, 199, (30,), generator=torch.Generator().manual_seed(3))]
    found = []
    for storage in ("plain", "floats"):
        decoder = load_model(path, "cpu", torch.float32, max_context=64, storage=storage)
        sequences = Sequences(decoder, ids)
        sequences.step(s0=20)
        for _ in range(10):
            sequences.step(s0=1)
        found.append(sequences.logits[0])
    torch.testing.assert_close(*found, rtol=0.0, atol=1e-4)


def held(path: Path, storage: str) -> int:
    """Bytes of the weights in memory."""
    decoder = load_model(path, "cpu", torch.float32, max_context=64, storage=storage)
    return weight_bytes(decoder)


def lacking(path: Path, storage: str) -> str | None:
    """What an engine says of its matrices when it opens."""
    return load_model(path, "cpu", torch.float32, max_context=64, storage=storage).config.lacking


def test_how_matrices_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(random_model("llama", "plain"), tmp_path / "model.gguf", Q.Q4_1)
    monkeypatch.setattr(native, "available", lambda: True)
    four, floats, eight = (held(path, storage) for storage in ("plain", "floats", "int8"))
    # What is asked for is made of a file's numbers, whatever these are.
    assert four < eight < floats
    assert lacking(path, "plain") is None
    # Without a kernel floats are faster, and need room. The engine says which they are.
    monkeypatch.setattr(native, "available", lambda: False)
    assert held(path, "plain") == floats
    said = lacking(path, "plain")
    assert said is not None
    assert "needs llvmlite" in said
    assert "held as floats" in said
    assert "needs llvmlite" in (lacking(path, "int8") or "")
    assert lacking(path, "floats") is None
    monkeypatch.setattr(load, "host_bytes", lambda: floats)
    assert held(path, "plain") == four
    assert "unpacked in each step" in (lacking(path, "plain") or "")


class Header:
    """What `gguf_config` looks at of a file, with metadata of one's own."""

    def __init__(self, checkpoint: GgufCheckpoint, metadata: dict[str, Any]) -> None:
        self.folder = checkpoint.folder
        self.tensors = dict(checkpoint.tensors)
        self.reader = checkpoint.reader
        self.metadata = metadata


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from((-1, 0, 1, 3, 2**31, 2**63, 2**64 - 1, "", "x", 0.0, -1.5, math.nan, math.inf)),
    st.lists(st.integers(-3, 3), max_size=4).map(lambda values: np.array(values, np.int32)),
    st.lists(st.text(max_size=2), max_size=2),
    st.lists(st.sampled_from((0.0, -1.0, 1e30, math.nan, math.inf)), max_size=4).map(np.float32),
    st.sampled_from(("yarn", "linear", "longrope", "none", 10**9, 7, 199)),
)
#: Keys that few files have.
MORE = (
    *("scaling.type", "scaling.factor", "scaling.original_context_length", "dimension_count"),
    *("scaling.yarn_log_multiplier", "scaling.attn_factor", "scaling.yarn_beta_fast", "freq_base"),
)
OTHERS = (
    *("expert_count", "expert_used_count", "expert_group_count", "expert_gating_func"),
    *("block_count", "nextn_predict_layers", "leading_dense_block_count", "context_length"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "attention.head_count_kv"),
    *("attention.temperature_scale", "attention.indexer.types", "attention.shared_kv_layers"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[GgufCheckpoint]]:
    families = ("llama", "phi3", "gemma3_text", "mixtral", "gpt_oss", "gpt2")
    families += ("deepseek_v3", "exaone4")
    cases = [next(case for case in CASES if case[0] == family) for family in families]
    cases += [("llama", "tied, llama3"), ("phi3", "longrope"), ("glm4_moe", "plain")]
    hybrids = (HYBRIDS[kind][1][0] for kind in ("falcon-h1", "granite-4", "lfm2-moe", "qwen3.5"))
    others = [HYBRIDS["nemotron-h"][1][1], HYBRIDS["kimi-linear"][1][0], SPARSE["llama4"][1][0]]
    others += [SPARSE["glm-5"][1][0], GEMMAS["gemma4-experts"][1][0]]
    made = [random_model(*case) for case in cases] + [*map(randomised, (*hybrids, *others))]
    folder = tmp_path_factory.mktemp("gguf")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(GgufCheckpoint(write_gguf(model, folder / f"{index}.gguf")))
            for index, model in enumerate(made)
        ]


def test_a_list_in_the_place_of_a_number(files: list[GgufCheckpoint]) -> None:
    gemma = files[2]
    metadata = {**gemma.metadata, "gemma3.block_count": np.array([3, 4], np.int32)}
    with pytest.raises(ModelLoadError, match="num_hidden_layers"):
        gguf_config(cast(GgufCheckpoint, Header(gemma, metadata)))


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
def test_a_token_of_minus_one_stands_for_none(none: int, files: list[GgufCheckpoint]) -> None:
    """As llama2.c's converter writes those that its models lack."""
    ids = dict.fromkeys(("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"), none)
    config = gguf_config(cast(GgufCheckpoint, Header(files[0], {**files[0].metadata, **ids})))
    assert config.bos_token_id is None
    assert config.eos_token_ids == ()


@fuzz(200)
@given(data=st.data())
def test_fuzzed_metadata(files: list[GgufCheckpoint], data: st.DataObject) -> None:
    """Whatever the values of a file are: a config, or a `ModelLoadError`."""
    checkpoint = data.draw(st.sampled_from(files))
    metadata = dict(checkpoint.metadata)
    keys = sorted(key for key in metadata if not key.startswith("tokenizer.ggml.t"))
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        metadata[key] = data.draw(ODD)
    architecture = checkpoint.metadata["general.architecture"]
    names = (*(f"rope.{name}" for name in MORE), *OTHERS)
    for name in data.draw(st.lists(st.sampled_from(names), max_size=2)):
        metadata[f"{architecture}.{name}"] = data.draw(ODD)
    header = Header(checkpoint, metadata)
    # A tensor that is missing, or is called as another's bias.
    for name in data.draw(st.lists(st.sampled_from(sorted(header.tensors)), max_size=2)):
        stored = header.tensors.pop(name, None)
        if stored is not None and data.draw(st.booleans()):
            header.tensors[name.replace(".weight", ".bias")] = stored
    refusal = checkpoint.folder.name
    try:
        tensor_table(gguf_config(cast(GgufCheckpoint, header)))
    except ModelLoadError as error:
        refusal = str(error)
    assert checkpoint.folder.name in refusal


def test_tensors_of_another_kind_of_attention_are_refused(files: list[GgufCheckpoint]) -> None:
    """One with queries, keys and values in the place of three, which a gate does not fit."""
    (qwen,) = (each for each in files if "qwen35.block_count" in each.metadata)
    header = Header(qwen, dict(qwen.metadata))
    for layer in range(8):
        header.tensors.pop(f"blk.{layer}.attn_q.weight", None)
    with pytest.raises(ModelLoadError, match=r"\.gguf: is no qwen35 model: .*attention_gate"):
        gguf_config(cast(GgufCheckpoint, header))
