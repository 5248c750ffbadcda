"""Hybrids and sparse attention in GGUF files: logits equal to those of the model that they were
made from, with states that are kept between chunks, rows and prefix hits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from models import gguf_files
from models.checkpoints import expected
from models.families import GLOBAL, randomised
from models.gemmas import GEMMAS
from models.gguf_files import write_gguf
from models.hybrids import HYBRIDS, LINEAR
from models.sparse import SPARSE
from transformers import PreTrainedConfig, PreTrainedModel

from asyncinfer.errors import ModelLoadError
from asyncinfer.layers import AttentionTemperature
from asyncinfer.models import load_model, read_config
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.testing.family_trial import runs

Q = gguf.GGMLQuantizationType
#: What a file has no words for, by what is taken for granted.
GRANTED: dict[str, dict[str, Any]] = {
    "falcon-h1": {
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "projectors_bias": False,
    },
    "gemma4-shared": {"attention_bias": False},
    "kimi-linear": {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    "lfm2": {"conv_bias": False},
    "lfm2-moe": {"conv_bias": False},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "use_qk_norm": True},
    "nemotron-h": {"use_bias": False},
    "qwen3-next": {"mlp_only_layers": [], "norm_topk_prob": True},
}
CONFIGS = {**HYBRIDS, **GEMMAS, **SPARSE}
#: Kinds of which there are no GGUF files.
NOT_READ = ("deepseek-v3.2", "olmo-hybrid")
CASES = [(kind, shape) for kind in CONFIGS if kind not in NOT_READ for shape in (0, 1)]
#: Of gated delta nets' logits, which are as far from transformers' without a GGUF file: outputs of
#: small heads, which are normalised, may lie near zero.
DELTA_TOLERANCE = 5e-4
TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    use_cpu_threads(1)
    yield
    use_cpu_threads(before)


def config_of(kind: str, shape: int) -> PreTrainedConfig:
    config = copy.deepcopy(CONFIGS[kind][1][shape])
    for key, value in GRANTED.get(kind, {}).items():
        setattr(config, key, value)
    count = config.num_hidden_layers
    if kind == "kimi-linear":
        config.linear_num_heads = config.num_attention_heads
    if kind in ("glm-5", "kimi-linear"):
        config.mlp_layer_types = ["dense"] + ["sparse"] * (count - 1)
    if kind == "llama4":
        config.no_rope_layers = [int((layer + 1) % 4 != 0) for layer in range(count)]
    return config


def check_logits(model: PreTrainedModel, path: Path) -> None:
    decoder = load_model(path, "cpu", torch.float32, max_context=96)
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, 190, (count,), generator=generator).tolist() for count in (50, 37, 45)]
    ids[2][:32] = ids[1][:32]
    tolerance = DELTA_TOLERANCE if "qwen" in model.config.model_type else TOLERANCE
    right = [expected(model, torch.tensor(each)) for each in ids]
    for how, run in runs(decoder, ids).items():
        for row, got in enumerate(run.logits):
            # What a prefix hit left out was not computed, nor what was not fed.
            done = slice(32 if "prefix" in how and row == 2 else 0, run.done[row])
            torch.testing.assert_close(got[done], right[row][done], rtol=0.0, atol=tolerance)


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_logits(kind: str, shape: int, tmp_path: Path) -> None:
    model = randomised(config_of(kind, shape))
    check_logits(model, write_gguf(model, tmp_path / "model.gguf"))


def test_layers_that_attend_are_listed(tmp_path: Path) -> None:
    """Newer files of Qwen3.5 list the layers with states, in the place of an interval."""
    config = config_of("qwen3.5", 0)
    config.layer_types = [GLOBAL, LINEAR, LINEAR]
    model = randomised(config)
    listed = {"qwen35.attention.recurrent_layers": [False, True, True]}
    check_logits(model, write_gguf(model, tmp_path / "model.gguf", **listed))


@pytest.mark.parametrize(
    "kind", ["qwen3.5", "granite-4", "lfm2", "gemma4-experts", "kimi-linear", "llama4"]
)
def test_packed_products_give_the_logits_of_floats(kind: str, tmp_path: Path) -> None:
    """Also where the inputs of a projection are in another order than in the file."""
    config = config_of(kind, 0)
    if kind == "qwen3.5":
        # Heads of whole groups, which change places as they are stored.
        config.linear_value_head_dim = 32
    path = write_gguf(randomised(config), tmp_path / "model.gguf", Q.Q8_0)
    ids = torch.randint(3, 190, (3, 40), generator=torch.Generator().manual_seed(3)).tolist()
    found = []
    for storage in ("plain", "floats"):
        decoder = load_model(path, "cpu", torch.float32, max_context=96, storage=storage)
        run = next(iter(runs(decoder, ids).values()))
        found.append([logits[:done] for logits, done in zip(run.logits, run.done, strict=True)])
    torch.testing.assert_close(*found, rtol=0.0, atol=TOLERANCE)


def test_a_state_of_another_size_is_refused(tmp_path: Path) -> None:
    model = randomised(config_of("granite-4", 0))
    path = write_gguf(model, tmp_path / "m.gguf", **{"granitehybrid.ssm.state_size": 7})
    with pytest.raises(ModelLoadError, match=r"blk\.0\.ssm_"):
        load_model(path, "cpu", torch.float32)


def test_what_llama_cpp_takes_for_granted_of_llama_4(tmp_path: Path) -> None:
    """Chunks, layers without rotation and how their queries grow; Maverick is without norms."""
    config = config_of("llama4", 0)
    config.max_position_embeddings = 1 << 20
    config.layer_types = ["chunked_attention"] * 3 + [GLOBAL]
    model = randomised(config)
    path = write_gguf(model, tmp_path / "model.gguf")
    published, got = read_config(path.parent / "published"), read_config(path)
    assert got.layers == published.layers
    assert got.layers[0].window == 8192
    assert got.layers[3].temperature == AttentionTemperature(scale=0.1, period=8192, offset=1)
    assert got.layers[0].qk_norm
    maverick = write_gguf(model, tmp_path / "maverick.gguf", **{"llama4.expert_count": 128})
    assert read_config(maverick).qk_norm is None
    whole = {"llama4.attention.sliding_window": 0}
    with pytest.raises(ModelLoadError, match=r"whole\.gguf: llama4\.attention\.sliding_window=0: "):
        read_config(write_gguf(model, tmp_path / "whole.gguf", **whole))


@pytest.mark.parametrize(
    "said",
    [{"glm-dsa.attention.indexer.types": [True, False]}, {"glm-dsa.context_length": 1 << 20}],
)
def test_layers_without_an_indexer_of_their_own_are_refused(
    said: dict[str, Any], tmp_path: Path
) -> None:
    path = write_gguf(randomised(config_of("glm-5", 1)), tmp_path / "model.gguf", **said)
    with pytest.raises(ModelLoadError, match="takes the choice of the one before"):
        read_config(path)


def test_factors_that_turn_a_pair_otherwise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Gemma 4 a pair turns as the base says, or not at all."""
    factors = np.float32([1.0, 0.5, 1e30])
    made = [("rope_freqs.weight", factors)]
    monkeypatch.setattr(gguf_files, "gemma4_tensors", lambda _: iter(made))
    path = write_gguf(randomised(config_of("gemma4-dense", 0)), tmp_path / "model.gguf")
    with pytest.raises(ModelLoadError, match=r"model\.gguf, tensor rope_freqs\.weight: must be of"):
        read_config(path)
