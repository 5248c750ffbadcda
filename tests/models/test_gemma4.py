"""Gemma 4: what its config says of its layers, what these keep of a token, and what a checkpoint
holds. `test_hybrid_families.py` compares what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import GLOBAL, LOCAL, randomised
from models.gemmas import GEMMAS
from models.held import Held
from safetensors.torch import load_file, save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from asyncinfer import EngineConfig, ModelLoadError
from asyncinfer.attention import KVCache
from asyncinfer.models import ModelConfig, load_model, parse_config
from asyncinfer.planner import find_gpu, plan_config
from asyncinfer.planner.size import ModelSize
from asyncinfer.runner import plan_memory, runner_of
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.testing.decoder_run import DecoderRun
from asyncinfer.testing.inline import InlineEngine

#: The text of gemma-4-E2B-it.
E2B: dict[str, Any] = {
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "sliding_window": 512,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": 30.0,
    "layer_types": [*[LOCAL] * 4, GLOBAL] * 7,
}
PUBLISHED: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {"model_type": "gemma4_text", **E2B},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    use_cpu_threads(1)
    yield
    use_cpu_threads(before)


def text(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **E2B, **changes}


def test_the_layers_of_a_published_config() -> None:
    config = parse_config(PUBLISHED)
    assert config.notes
    assert config.names.prefix == "model.language_model."
    assert config.kv_layers == tuple(range(15))
    kinds = config.kv_shapes(config.kv_layers)
    assert {shape.head_dim: layers for shape, layers in kinds.items()} == {
        256: tuple(i for i in range(15) if i % 5 != 4),
        512: (4, 9, 14),
    }
    assert {config.layer(i).shares_kv for i in range(15, 35)} == {13, 14}
    assert [config.layer(i).shares_kv for i in (18, 19)] == [13, 14]
    assert [config.layer_intermediate(i) for i in (14, 15)] == [6144, 12_288]
    assert [config.layer(i).window for i in (13, 14)] == [512, None]
    # As it is published, without what transformers writes of each layer.
    written = Gemma4TextConfig(**E2B).to_dict()
    assert "per_layer_config" in written
    assert parse_config({**written, "architectures": ["Gemma4ForCausalLM"]}).layers == config.layers


def test_heads_that_are_alike() -> None:
    config = parse_config(text(per_layer_config={}))
    assert {config.layer_kv(index).head_dim for index in range(35)} == {256}
    alike = Gemma4TextConfig(**E2B | {"global_head_dim": 256}).to_dict()
    read = parse_config({**alike, "architectures": ["Gemma4ForCausalLM"]})
    assert read.layers == config.layers


def test_its_size_is_that_of_transformers() -> None:
    config = parse_config(text())
    with torch.device("meta"):
        model = Gemma4ForCausalLM(Gemma4TextConfig(**E2B))
    scales = config.num_layers
    count = sum(parameter.numel() for parameter in model.parameters())
    assert ModelSize.of(config).parameters == count + scales
    # Twelve local layers and three global ones keep something, the others share it.
    plan = plan_config(config, gpu=find_gpu("h100"), context=8192)
    assert plan.formats[0].kv_bytes_per_token == 2 * (12 * 2 * 256 + 3 * 2 * 512)
    assert plan.formats[0].kv_bytes_per_further_token == 2 * 3 * 2 * 512


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"enable_moe_block": True}, r"moe_intermediate_size=\(missing\): is required"),
        (
            {"enable_moe_block": True, "moe_intermediate_size": 24, "num_experts": 4},
            r"top_k_experts=\(missing\): is required",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input=7: must be vocab_size"),
        ({"num_kv_shared_layers": 35}, "num_kv_shared_layers=35: must be between 0 and 34"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers=31: some layer has none of its kind"),
        ({"global_head_dim": 511}, "global_head_dim=511: must be even"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "num_global_key_value_heads=3: must divide num_attention_heads=8",
        ),
        ({"per_layer_config": {"3": {"head_dim": 8}}}, r"per_layer_config\.3=.*global layer"),
        (
            {"per_layer_config": {"9" * 5000: {"head_dim": 8}}},
            r"per_layer_config\.9+.*global layer",
        ),
        ({"per_layer_config": {"04": {"sliding_window": 8}}}, r"per_layer_config\.04=.*alone"),
        ({"per_layer_config": {"04": {"head_dim": 7}}}, r"per_layer_config\.04\.head_dim=7"),
        ({"layer_types": ["banana"] * 35}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window=0"),
    ],
)
def test_what_it_cannot_be_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        parse_config(text(**changes))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    randomised(GEMMAS["gemma4-shared"][1][0]).save_pretrained(folder)
    return folder


def run(folder: Path, tokens: list[int]) -> torch.Tensor:
    decoder = load_model(folder, "cpu", torch.float32, max_context=96)
    made = DecoderRun(decoder, [tokens])
    made.step({0: len(tokens)})
    return made.logits[0]


def test_shared_keys_and_values_that_a_checkpoint_holds_are_left_out(
    saved: Path, tmp_path: Path
) -> None:
    tensors = load_file(saved / "model.safetensors")
    for part, shape in (("k_proj", (16, 64)), ("v_proj", (16, 64)), ("k_norm", (16,))):
        tensors[f"model.layers.4.self_attn.{part}.weight"] = torch.full(shape, torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    tokens = [*range(3, 50)]
    torch.testing.assert_close(run(tmp_path, tokens), run(saved, tokens), rtol=0, atol=0)
    # Those of a layer that has its own are wanted.
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layers\.2\.self_attn\.k_proj"):
        run(tmp_path, tokens)


@pytest.mark.parametrize(
    ("context", "one_group", "groups"),
    [
        (96, False, [(1,), (0, 2)]),
        # Hardly longer than the window.
        (24, False, [(0, 1, 2)]),
        # As a draft model has it.
        (96, True, [(0, 1, 2)]),
    ],
)
def test_pages_are_those_of_the_layers_that_keep_something(
    saved: Path, context: int, one_group: bool, groups: list[tuple[int, ...]]
) -> None:
    decoder = load_model(saved, "cpu", torch.float32, max_context=context)
    options = EngineConfig(
        device="cpu", block_size=4, max_context=context, max_step_tokens=8, kv_bytes=1 << 18
    )
    spec = plan_memory(
        options, decoder.config, torch.float32, decoder.device, 199, one_group=one_group
    )
    assert [group.layers for group in spec.groups] == groups
    if not one_group:
        runner = runner_of(decoder, options, 199)
        caches = [cache for cache in runner.kv if isinstance(cache, KVCache)]
        assert sorted(layer for cache in caches for layer in cache.layers) == [0, 1, 2]
        assert all(cache.head_dim == (24 if 1 in cache.layers else 16) for cache in caches)
        held = sum(tensor.nbytes for cache in caches for tensor in cache.tensors)
        assert 0 < held <= 1 << 18


@pytest.mark.parametrize("kind", sorted(GEMMAS))
def test_one_group_answers_as_two_do(kind: str, tmp_path: Path) -> None:
    """And pages of 8 bits as plain ones, for so few tokens."""
    randomised(GEMMAS[kind][1][0]).save_pretrained(tmp_path)
    answers = []
    for context, kv, groups in ((96, "plain", 2), (24, "plain", 1), (96, "int8", 2)):
        decoder = load_model(tmp_path, "cpu", torch.float32, max_context=context)
        options: dict[str, Any] = {"kv": kv, "max_context": context, "kv_bytes": 1 << 20}
        engine = InlineEngine(
            Held(decoder), device="cpu", dtype="float32", block_size=8, max_step_tokens=7, **options
        )
        assert len(engine.core.runner.spec.groups) == groups
        stream = engine.submit([*range(3, 14)], max_tokens=10, temperature=0.0, ignore_eos=True)
        engine.run()
        stream.read()
        assert stream.error is None
        answers.append(stream.token_ids(0))
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) > 5


def test_deterministic_is_refused_by_name(saved: Path) -> None:
    config: ModelConfig = load_model(saved, "cpu", torch.float32, max_context=96).config
    options = EngineConfig(device="cpu", deterministic=True)
    with pytest.raises(ModelLoadError, match=r"deterministic=True: .*differ in keys and values"):
        plan_memory(options, config, torch.float32, torch.device("cpu"), 199)
