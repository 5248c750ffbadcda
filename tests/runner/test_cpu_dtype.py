"""bfloat16 on a CPU: taken where it was measured to be faster, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asyncinfer import Engine
from asyncinfer.bench.checkpoint import write_checkpoint
from asyncinfer.bench.shapes import llama_json
from asyncinfer.config import EngineConfig
from asyncinfer.models import ModelConfig, parse_config
from asyncinfer.quantization.schemes import Scheme
from asyncinfer.runner import cpu_dtype
from asyncinfer.runner.cpu_dtype import computes_in_bfloat16

#: A layer's matrix is of the least size that is measured.
SHAPE = llama_json(
    512, 2048, 1, 8, 64, num_key_value_heads=2, vocab_size=384, max_position_embeddings=64
)
AUTO = EngineConfig()


@pytest.fixture
def model() -> ModelConfig:
    return parse_config(dict(SHAPE))


class Clock:
    """Stands for the measurement, and counts it."""

    def __init__(self, *ratios: float) -> None:
        self.ratios = list(ratios)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, outputs: int, inputs: int) -> list[float]:
        self.asked.append((outputs, inputs))
        return self.ratios


def measured(monkeypatch: pytest.MonkeyPatch, *ratios: float) -> Clock:
    clock = Clock(*ratios)
    monkeypatch.setattr(cpu_dtype, "_ratios", clock)
    monkeypatch.setattr(cpu_dtype.onednn, "multiplies_bfloat16", lambda: True)
    return clock


def test_it_is_measured_once_for_a_size_and_processor(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = measured(monkeypatch, 1.4, 1.8, 2.1)
    assert computes_in_bfloat16(model, AUTO, tmp_path)
    assert computes_in_bfloat16(model, AUTO, tmp_path)
    assert clock.asked == [(2048, 512)]
    assert computes_in_bfloat16(replace(model, hidden_size=1024), AUTO, tmp_path)
    # Larger ones are measured as if they were of the largest size that is.
    assert computes_in_bfloat16(replace(model, intermediate_size=8192), AUTO, tmp_path)
    monkeypatch.setattr(cpu_dtype, "cpu_model", lambda: "another")
    assert computes_in_bfloat16(model, AUTO, tmp_path)
    assert clock.asked == [(2048, 512), (2048, 1024), (2048, 512)]


@pytest.mark.parametrize(
    ("ratios", "taken"),
    [
        ((1.05, 2.0, 2.0), False),
        ((2.0, 0.5, 2.0), False),
        ((2.0, 2.0, 0.75), False),
        # A prompt may take a little longer.
        ((1.8, 1.3, 0.85), True),
    ],
)
def test_tokens_have_to_be_faster_and_prompts_not_much_slower(
    model: ModelConfig,
    ratios: tuple[float, ...],
    taken: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = measured(monkeypatch, *ratios)
    assert computes_in_bfloat16(model, AUTO, tmp_path) is taken
    assert computes_in_bfloat16(model, AUTO, tmp_path) is taken
    assert len(clock.asked) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", '{"key": {}, "bfloat16": true}', "\udcff", "9" * 20_000]
)
def test_a_file_that_something_else_wrote_counts_as_none(
    model: ModelConfig, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = measured(monkeypatch, 1.0, 1.0, 1.0)
    assert not computes_in_bfloat16(model, AUTO, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text, "utf-8", "surrogateescape")
    assert not computes_in_bfloat16(model, AUTO, tmp_path)
    assert len(clock.asked) == 2


def test_a_folder_that_cannot_be_written_to_keeps_nothing(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = measured(monkeypatch, 2.0, 2.0, 2.0)
    (tmp_path / "file").touch()
    for _ in range(2):
        assert computes_in_bfloat16(model, AUTO, tmp_path / "file")
    assert len(clock.asked) == 2


def test_what_is_small_quantised_or_exact_is_not_measured(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = measured(monkeypatch, 2.0, 2.0, 2.0)
    quantised = replace(model, scheme=Scheme("gptq", ()))
    for other, config in (
        (replace(model, intermediate_size=511), AUTO),
        (quantised, AUTO),
        (model, EngineConfig(weights="int8")),
        (model, EngineConfig(deterministic=True)),
    ):
        assert not computes_in_bfloat16(other, config, tmp_path)
    # In a model of this size torch's operators between the products take too long.
    monkeypatch.setattr(cpu_dtype, "between_kernels", lambda dtype: None)
    assert not computes_in_bfloat16(replace(model, intermediate_size=2047), AUTO, tmp_path)
    monkeypatch.setattr(cpu_dtype.onednn, "multiplies_bfloat16", lambda: False)
    assert not computes_in_bfloat16(model, AUTO, tmp_path)
    assert not clock.asked


def test_a_small_model_is_measured_where_all_of_it_is_native_code(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = measured(monkeypatch, 2.0, 2.0, 2.0)
    monkeypatch.setattr(cpu_dtype, "between_kernels", lambda dtype: object())
    assert computes_in_bfloat16(replace(model, intermediate_size=512), AUTO, tmp_path)
    assert clock.asked == [(512, 512)]


def test_the_measurement_is_of_both(model: ModelConfig) -> None:
    threads = torch.get_num_threads()
    ratios = cpu_dtype._ratios(128, 64)
    assert torch.get_num_threads() == threads
    assert len(ratios) == 3
    assert all(0 < ratio < float("inf") for ratio in ratios)


@pytest.mark.parametrize(
    ("faster", "stored", "asked", "dtype"),
    [
        (True, "bfloat16", "auto", "bfloat16"),
        (False, "bfloat16", "auto", "float32"),
        (True, "float32", "auto", "float32"),
        (True, "float16", "auto", "float32"),
        (True, "bfloat16", "float32", "float32"),
    ],
)
@pytest.mark.anyio
async def test_engines_take_it_for_checkpoints_in_bfloat16(
    faster: bool,
    stored: str,
    asked: str,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "asyncinfer.runner.opening.computes_in_bfloat16", lambda model, config: faster
    )
    write_checkpoint({**SHAPE, "dtype": stored}, tmp_path)
    async with Engine(tmp_path, device="cpu", dtype=asked) as engine:
        assert engine.model.dtype == dtype
        done = await engine.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
    assert len(done.token_ids) == 2
