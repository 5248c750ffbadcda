"""Hybrids in GGUF files: logits equal to those of the model that they were made from, with states
that are kept between chunks, rows and prefix hits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from models.checkpoints import expected
from models.families import GLOBAL, randomised
from models.gemmas import GEMMAS
from models.gguf_files import write_gguf
from models.hybrids import HYBRIDS, LINEAR
from transformers import PreTrainedConfig, PreTrainedModel

from asyncinfer.errors import ModelLoadError
from asyncinfer.models import load_model
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
    "lfm2": {"conv_bias": False},
    "lfm2-moe": {"conv_bias": False},
    "nemotron-h": {"use_bias": False},
    "qwen3-next": {"mlp_only_layers": [], "norm_topk_prob": True},
}
CONFIGS = {**HYBRIDS, **GEMMAS}
#: Kinds that are not read from GGUF files.
NOT_READ = ("gemma4-experts", "kimi-linear", "olmo-hybrid")
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


@pytest.mark.parametrize("kind", ["qwen3.5", "granite-4", "lfm2"])
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
