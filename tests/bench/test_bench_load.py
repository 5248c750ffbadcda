"""`asyncinfer bench load`, small: every loader loads the same. Times are not looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncinfer.bench import BenchError, LoadOptions, Record, measure_load, save_plot
from asyncinfer.bench.load import _SHAPE, _SMALL, _TINY, _layers, write_layers
from asyncinfer.bench.load_once import (
    BYTES,
    ENGINE,
    LOADERS,
    READ,
    SECOND,
    TimedLoad,
    _memory,
    load_once,
    weight_files,
)
from asyncinfer.bench.quantised_model import LAYOUTS, write_quantised
from asyncinfer.models import parse_config
from asyncinfer.planner import ModelSize

#: In layers of 9 MB each, of 16 bits.
_WIDE = {**_TINY, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}


def load(name: str, folder: Path, dtype: torch.dtype) -> Any:
    return LOADERS[name](folder, device=torch.device("cpu"), dtype=dtype)


def test_every_loader_loads_the_same(tmp_path: Path) -> None:
    write_layers(_TINY, 2, tmp_path / "model", "float16")
    plain = load("load_file, mapped", tmp_path / "model", torch.float16)
    ours, alone, peer = (
        load(name, tmp_path / "model", torch.float32)
        for name in ("asyncinfer", "asyncinfer, weights alone", "from_pretrained")
    )
    name = "model.embed_tokens.weight"
    for found in (
        load("load_file", tmp_path / "model", torch.float32)[name],
        ours.embedding.weight,
        alone["embedding"],
        dict(peer.named_parameters())[name],
    ):
        assert found.dtype is torch.float32
        assert torch.equal(found, plain[name].float())
    assert {key: tuple(tensor.shape) for key, tensor in peer.named_parameters()} == {
        key: tuple(tensor.shape) for key, tensor in plain.items()
    }
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 4


@pytest.mark.parametrize("megabytes", [1, 300, 5000])
def test_the_random_model_is_about_as_large_as_asked_for(megabytes: int) -> None:
    layers = _layers(_SHAPE, megabytes)
    size = ModelSize.of(parse_config({**_SHAPE, "num_hidden_layers": layers}))
    # In layers of 90 MB; embedding and head are more than 1 MB.
    assert 2e-6 * size.parameters == pytest.approx(max(megabytes, 222), abs=46)


def test_what_is_held_is_seen() -> None:
    before = _memory(reset=True)
    held = bytearray(b"x") * (256 << 20)
    # What was free of the heap may hold a part of it.
    assert _memory() - before > len(held) / 2
    del held
    assert _memory() - before > 128 << 20
    assert _memory(reset=True) - before < 64 << 20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize(("stored", "dtype"), [("float32", "float16"), ("bfloat16", "bfloat16")])
def test_the_host_holds_the_model_and_a_shard(tmp_path: Path, stored: str, dtype: str) -> None:
    """Also where weights are converted, or laid out anew."""
    tiny, folder = tmp_path / "tiny", tmp_path / "model"
    write_layers(_TINY, 1, tiny, stored)
    write_layers(_WIDE, 12, folder, stored)
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    size = sum(shards) * getattr(torch, dtype).itemsize // getattr(torch, stored).itemsize
    run = load_once("asyncinfer", folder, tiny, "cpu", dtype)
    assert 0.9 * size < run.peak_bytes < size + max(shards) + (8 << 20)


@pytest.mark.slow
def test_the_whole_command_has_its_figures(tmp_path: Path) -> None:
    told: list[str] = []
    result = measure_load(LoadOptions(quick=True, repeat=1), told.append)
    loaders = set(LOADERS) - {ENGINE, READ}
    assert len(told) == 2 + len(loaders)
    assert (result.device, result.dtype) == ("cpu", "float16")
    assert set(result.runs) == loaders
    figures = {figure.name: figure for figure in result.figures()}
    assert len(figures) == 3 * len(loaders) + 5
    assert figures[f"{SECOND}, over {BYTES}: time"].target == 1.3
    assert figures["asyncinfer over load_file"].target == 0.9
    assert figures["asyncinfer over from_pretrained"].target == 1.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_can_be_opened(tmp_path: Path, layout: str) -> None:
    model = write_quantised(_SMALL, 2, tmp_path / "model", layout)
    decoder = LOADERS["asyncinfer"](model, device=torch.device("cpu"), dtype=torch.float32)
    assert decoder.config.num_layers == 2
    (content,) = LOADERS[READ](model, device=torch.device("cpu"), dtype=torch.float32)
    (file,) = weight_files(model)
    assert content.numpy().tobytes() == file.read_bytes()


@pytest.mark.slow
def test_opening_is_held_against_reading() -> None:
    result = measure_load(LoadOptions(layout="gguf", quick=True, repeat=1, device="cpu"))
    assert result.dtype == "float32"
    assert set(result.runs) == {"asyncinfer", ENGINE, READ, SECOND, BYTES}
    figures = {figure.name: figure for figure in result.figures()}
    assert figures[f"{ENGINE} over {READ}: time"].target == 1.5
    runs = {name: runs[0] for name, runs in result.runs.items()}
    ratio = figures[f"{ENGINE} over {READ}: time"].value
    assert ratio == pytest.approx(runs[ENGINE].seconds / runs[READ].seconds)


def test_a_model_has_a_layout_already(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="layout"):
        measure_load(LoadOptions(model=str(tmp_path), layout="fp8", device="cpu", peer=False))


def test_figures_are_of_the_medians(tmp_path: Path) -> None:
    from dataclasses import asdict

    from asyncinfer.bench.load import LoadResult

    runs = {
        "asyncinfer": tuple(TimedLoad(seconds, 0.1, 5) for seconds in (9.0, 2.0, 1.0)),
        "asyncinfer, weights alone": (TimedLoad(1.0, 0.1, 5),) * 3,
        "load_file": tuple(TimedLoad(seconds, 0.1, 7) for seconds in (18.0, 1.0, 0.25)),
    }
    result = LoadResult("cpu", "float16", 4_000_000_000, runs)
    figures = {figure.name: figure.value for figure in result.figures()}
    assert figures["asyncinfer: rate"] == 2.0
    # 2, a half and a quarter as fast; one after the other, on a machine that got faster.
    assert figures["asyncinfer over load_file"] == 0.5
    assert figures["asyncinfer, weights alone, over load_file"] == 1.0
    assert "asyncinfer over from_pretrained" not in figures
    record = Record("load", {}, result.figures(), asdict(result))
    save_plot(record, tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no safetensors"):
        measure_load(LoadOptions(model=str(tmp_path), device="cpu", peer=False))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(BenchError, match=f"model '{missing}': there is no such folder"):
        measure_load(LoadOptions(model=str(missing), device="cpu", peer=False))
