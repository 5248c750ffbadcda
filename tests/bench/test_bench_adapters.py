"""`asyncinfer bench adapters` on the embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from models.families import random_model

from asyncinfer.bench import (
    AdapterOptions,
    AdapterResult,
    AdapterTurn,
    BenchError,
    measure_adapters,
)
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cli.app import asyncinfer
from asyncinfer.kernels.native import lora_kernel


def test_a_smoke_run() -> None:
    heard: list[str] = []
    options = AdapterOptions(model=str(MODEL_PATH), running=3, threads=1, quick=True)
    result = measure_adapters(options, heard.append)
    assert result.ranks == (4, 8, 16)
    # Inputs and outputs of a layer's projections, six layers, as in files of 16 bits.
    layer = (256 + 256) + 2 * (256 + 128) + (256 + 256) + 3 * (256 + 640)
    size = 4 if lora_kernel(torch.bfloat16) is None else 2
    assert result.adapter_bytes == size * 6 * layer * (4 + 8 + 16)
    (turn,) = result.turns
    assert min(turn.without, turn.one, turn.each) > 0
    assert heard[0] == "loading adapters"


def test_what_is_made_of_it() -> None:
    turns = [(100.0, 90.0, 80.0), (50.0, 45.0, 42.0), (200.0, 170.0, 160.0)]
    result = AdapterResult(
        16, (4,), 1, tuple(AdapterTurn(without=a, one=b, each=c) for a, b, c in turns)
    )
    figures = {figure.name: figure for figure in result.figures()}
    assert figures["one adapter"].value == 90.0
    over = figures["16 adapters over one adapter"]
    # Of each turn, since the machine was slower in one of them.
    assert (over.value, over.met) == (pytest.approx(42 / 45), True)
    assert figures["one adapter over no adapter"].value == pytest.approx(0.9)


def test_a_model_without_these_projections(tmp_path: Path) -> None:
    random_model("gpt2", "plain").save_pretrained(tmp_path)
    with pytest.raises(BenchError, match="none of the projections q_proj"):
        measure_adapters(AdapterOptions(model=str(tmp_path), quick=True))


def test_an_answer_of_one_token_has_no_speed() -> None:
    done = CliRunner().invoke(asyncinfer, ["bench", "adapters", "--tokens", "1"])
    assert done.exit_code == 2
    assert "'--tokens'" in done.output
