"""`asyncinfer bench quantized` on a small file."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from models.families import random_model
from models.gguf_files import write_gguf

from asyncinfer.bench import (
    BenchError,
    QuantizedOptions,
    QuantizedResult,
    QuantizedRow,
    measure_quantized,
)
from asyncinfer.bench import quantized as quantized_module
from asyncinfer.bench.peers.llama_cpp import LlamaPeer, has_llama

WORK = ("1 request", "16 requests", "64 requests", "prefill")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = random_model("llama", "plain")
    return write_gguf(model, tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q4_1)


def test_a_smoke_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_module, "_READ_BYTES", 1 << 20)
    heard: list[str] = []
    options = QuantizedOptions(model=str(file), threads=1, quick=True, no_peer=True)
    result = measure_quantized(options, heard.append)
    assert {(row.engine, row.work) for row in result.rows} == {
        (engine, work) for engine in ("packed", "floats") for work in WORK
    }
    assert result.file_bytes == file.stat().st_size
    assert min(result.bandwidth, *(row.tokens_per_second for row in result.rows)) > 0
    assert heard[:2] == ["opening: packed", "opening: floats"]


def test_what_is_made_of_it() -> None:
    rows = [("packed", 200.0), ("floats", 80.0), ("llama.cpp", 250.0)]
    result = QuantizedResult(
        1e11,
        100_000_000,
        tuple(
            QuantizedRow(engine=engine, work="1 request", tokens_per_second=speed)
            for engine, speed in rows
        ),
    )
    figures = {figure.name: figure for figure in result.figures()}
    assert figures["1 request, packed: of the bandwidth"].value == pytest.approx(20.0)
    over = figures["1 request: packed over floats"]
    assert (over.value, over.met) == (2.5, True)
    over = figures["1 request: packed over llama.cpp"]
    assert (over.value, over.met) == (0.8, False)


def test_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="must be a GGUF file"):
        measure_quantized(QuantizedOptions(model=str(tmp_path / "model.gguf")))


@pytest.mark.skipif(not has_llama(), reason="needs llama-cpp-python")
def test_llama_answers_all_requests(file: Path) -> None:
    peer = LlamaPeer(file, threads=1, context=64, requests=2)
    answers = peer.generate([[3, 4, 5], [6, 7]], 4)
    peer.close()
    assert [len(answer) for answer in answers] == [4, 4]
