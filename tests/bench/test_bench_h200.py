"""`asyncinfer bench h200`, as its smoke run: every part, its record, and what happens to faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.test_bench_command import printed, refusal
from benchmarks import burst, h200
from benchmarks.burst import STATIC
from benchmarks.gpu_peers import GPU_PEERS, PeerWork, run_peer
from benchmarks.h200 import PARTS, GpuOptions, GpuResult, measure_gpu
from benchmarks.shapes import TINY, shape_json

from asyncinfer.bench import BenchError, Record
from asyncinfer.bench.checkpoint import write_checkpoint


@pytest.mark.slow
def test_the_smoke_run_has_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The other one in this process, below: each process of its own imports transformers once more.
    monkeypatch.setattr(burst, "importable_peers", lambda: [STATIC])
    path, plot = tmp_path / "h200.json", tmp_path / "h200.png"
    words = ("h200", "--quick", "--device", "cpu", "--json", path, "--plot", plot)
    said = printed(capsys, *words)
    record = Record.load(path)
    parts = {part["name"]: part for part in record.detail["parts"]}
    assert list(parts) == list(PARTS)
    assert all(part["error"] is None for part in parts.values())
    assert all(part["detail"] for part in parts.values())
    # What a smoke run measures is held against no target; what it checks is.
    assert {figure.name.split(",")[1] for figure in record.figures if figure.target} == {
        " largest error"
    }
    requests = parts["burst"]["detail"]
    assert requests["failed"] == {}
    assert set(requests["peers"]) == {STATIC}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert printed(capsys, "show", path) == said


def test_a_part_that_raises_is_recorded_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(run: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(h200, "MEASURES", {**h200.MEASURES, "kernels": broken})
    saved: list[GpuResult] = []
    options = GpuOptions(parts=("ceilings", "kernels", "decode"), quick=True, device="cpu")
    result = measure_gpu(options, save=saved.append)
    assert [part.error is None for part in result.parts] == [True, False, True]
    assert str(result.parts[1].error).startswith("MemoryError: no room (")
    assert [len(record.parts) for record in saved] == [1, 2, 3]
    assert not result.parts[1].figures
    assert result.parts[2].figures
    json.dumps(result.detail(), allow_nan=False)


def test_a_burst_is_saved_before_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[GpuResult] = []
    seen: list[int] = []

    def peer(name: str, given: PeerWork, timeout: float) -> float:
        seen.append(len(saved))
        raise BenchError(f"{name}: ended")

    monkeypatch.setattr(burst, "importable_peers", lambda: ["one", "another"])
    monkeypatch.setattr(burst, "run_peer", peer)
    options = GpuOptions(parts=("burst",), quick=True, device="cpu")
    result = measure_gpu(options, save=saved.append)
    assert seen == [1, 2]
    assert [record.parts[0].error for record in saved] == ["not done", "not done", None]
    assert [figure.name for figure in saved[0].figures()] == ["6 requests at once"]
    assert saved[1].parts[0].detail["failed"] == {"one": "one: ended"}
    assert result.parts[0].detail["failed"] == {"one": "one: ended", "another": "another: ended"}


def test_a_burst_ends_when_its_part_has_no_time_left(tmp_path: Path) -> None:
    config = shape_json(TINY)
    write_checkpoint(config, tmp_path)
    given = burst.burst_work(tmp_path, config["vocab_size"], "cpu", 2, 4, 8)
    with pytest.raises(BenchError, match="2 requests: not done in 0 s"):
        burst.measure_burst(given, print, seconds_left=lambda: 0.0)


def test_parts_without_time_are_left_out() -> None:
    result = measure_gpu(GpuOptions(quick=True, device="cpu", seconds=0.0))
    assert {part.error for part in result.parts} == {"no time left"}


def test_an_unknown_part_is_refused_before_the_run() -> None:
    with pytest.raises(BenchError, match="part 'speed': must be one of ceilings, kernels"):
        measure_gpu(GpuOptions(parts=("ceilings", "speed"), quick=True))


def test_a_command_that_lost_a_part_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(run: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(h200, "MEASURES", {**h200.MEASURES, "decode": broken})
    path = tmp_path / "a.json"
    words = ("h200", "--quick", "--device", "cpu", "--part", "ceilings", "--part", "decode")
    said = refusal(capsys, *words, "--json", path)
    assert "parts without figures: decode; the record says why" in said
    errors = {part["name"]: part["error"] for part in Record.load(path).detail["parts"]}
    assert errors["ceilings"] is None
    assert errors["decode"].startswith("MemoryError: no room (test_bench_h200.py:")
    shown = printed(capsys, "show", path)
    assert "not measured" in shown
    assert "no room" in shown


def work(tmp_path: Path) -> PeerWork:
    return PeerWork(tmp_path, [[1, 2, 3]], [2], "cpu")


def test_a_peer_that_raises_is_told(tmp_path: Path) -> None:
    # It is not installed; and where it is, nothing lies in the folder.
    with pytest.raises(BenchError, match=r"mini-sglang: \w*Error"):
        run_peer("mini-sglang", work(tmp_path), 60.0)


@pytest.mark.filterwarnings("default")
def test_continuous_batching_does_the_same_work(tmp_path: Path) -> None:
    write_checkpoint(shape_json(TINY), tmp_path)
    _, run = GPU_PEERS["transformers continuous batching"]
    assert run(PeerWork(tmp_path, [[1, 2, 3], [4, 5], [6]], [2, 5, 3], "cpu")) > 0


def test_a_peer_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="not done in 0 s"):
        run_peer("transformers static cache", work(tmp_path), 0.01)


def test_checkpoints_load_in_transformers_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_checkpoint(shape_json(TINY), tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    weight = model.model.layers[0].mlp.up_proj.weight.detach()
    assert float(weight.std()) == pytest.approx(0.02, rel=0.1)
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path)) == 1024
    assert set(GPU_PEERS) == {
        "mini-sglang",
        "transformers continuous batching",
        "transformers static cache",
    }
