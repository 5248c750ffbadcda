"""`asyncinfer bench serve`, small: what is counted was computed. Times are not looked at."""

from __future__ import annotations

import fcntl
import json
import sys
from dataclasses import asdict
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from support import children

from asyncinfer import Engine, EngineConfig
from asyncinfer.bench import BenchError, ServeOptions, measure_serve
from asyncinfer.bench import interference as interference_module
from asyncinfer.bench.checkpoint import write_checkpoint
from asyncinfer.bench.interference import busy_programs, until_quiet
from asyncinfer.bench.llama_gguf import write_llama_gguf
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.peers import PeerProcess, installed_peers, parse_peers
from asyncinfer.bench.peers import process as process_module
from asyncinfer.bench.peers import table as table_module
from asyncinfer.bench.peers.table import ONE_THREAD
from asyncinfer.bench.peers.transformers import TransformersPeer
from asyncinfer.bench.peers.worker import Setup
from asyncinfer.bench.products import (
    BULK_ROWS,
    floor_seconds,
    product_rows,
    product_seconds,
    product_shapes,
)
from asyncinfer.bench.record import Record
from asyncinfer.bench.serve_result import ServeResult
from asyncinfer.bench.serve_run import Run, run_workload
from asyncinfer.bench.shapes import LLAMA_125M, LLAMA_TINY
from asyncinfer.bench.tables import record_tables
from asyncinfer.bench.workloads import QUICK, Workload
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cli import bench_serve as commands
from asyncinfer.models import parse_config
from asyncinfer.planner import ModelSize
from asyncinfer.testing import FakeModel

TINY_PARAMETERS = ModelSize.of(parse_config(dict(LLAMA_TINY))).parameters


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(LLAMA_TINY, folder)
    return folder


def through(work: Workload, prompts: list[list[int]], **config: object) -> Run:
    """Run a workload on the fake model."""

    async def run() -> Run:
        async with Engine(FakeModel(), config=EngineConfig(max_running=16, **config)) as engine:
            return await run_workload(engine, work, prompts)

    return run_on("asyncio", run)


@pytest.mark.parametrize("name", list(QUICK))
def test_a_workload_is_counted(name: str) -> None:
    work = QUICK[name]
    run = through(work, work.prompts(258, 0))
    assert run.seconds > 0
    assert run.cached_tokens == work.cached_tokens
    assert len(run.ttft) == len(work.requests)
    assert len(run.itl) == work.output_tokens - len(work.requests)


def test_a_cold_cache_does_not_pass_for_a_warm_one() -> None:
    work = QUICK["shared"]
    with pytest.raises(BenchError, match="cached_tokens rose by 0 instead of 576"):
        through(work, work.prompts(258, 0), prefix_cache=False)


def test_a_warm_cache_does_not_pass_for_a_cold_one() -> None:
    work = Workload("twice", "the same prompt twice", ((64, 2),))
    prompts = work.prompts(258, 0)

    async def run() -> None:
        async with Engine(FakeModel()) as engine:
            await run_workload(engine, work, prompts)
            await run_workload(engine, work, prompts)

    with pytest.raises(BenchError, match="cached_tokens rose by 48 instead of 0"):
        run_on("asyncio", run)


def test_preempted_work_is_no_measurement() -> None:
    work = Workload("long", "16 at once, 16+64", ((16, 64),) * 16)

    async def run() -> None:
        # Room for the prompts and hardly more: some are computed twice.
        async with Engine(FakeModel(blocks=24), max_running=16) as engine:
            await run_workload(engine, work, work.prompts(258, 0))

    with pytest.raises(BenchError, match=r"preemptions rose by \d+ instead of 0"):
        run_on("asyncio", run)


def test_the_random_llama_has_125_million_parameters() -> None:
    assert ModelSize.of(parse_config(dict(LLAMA_125M))).parameters == 124_668_672


def test_the_random_llama_is_what_its_shape_says(tiny: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(tiny / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) == TINY_PARAMETERS
    weight = tensors["model.layers.0.mlp.up_proj.weight"]
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    vocabulary = json.loads((tiny / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(LLAMA_TINY["vocab_size"]))


def test_the_random_llama_is_the_same_every_time(tiny: Path, tmp_path: Path) -> None:
    write_checkpoint(LLAMA_TINY, tmp_path)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        assert (tmp_path / name).read_bytes() == (tiny / name).read_bytes()
    write_checkpoint({**LLAMA_TINY, "num_hidden_layers": 1}, tmp_path)
    assert (tmp_path / "config.json").read_bytes() != (tiny / "config.json").read_bytes()


def ours(folder: Path, work: Workload, prompts: list[list[int]]) -> list[list[int]]:
    """The engine's own answers."""

    async def run() -> list[list[int]]:
        async with Engine(folder, device="cpu", dtype="float32") as engine:
            done = [
                await engine.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)
                for prompt, (_, tokens) in zip(prompts, work.requests, strict=True)
            ]
        return [list(one.token_ids) for one in done]

    return run_on("asyncio", run)


@pytest.mark.parametrize("name", [*installed_peers(), ONE_THREAD])
def test_a_peer_computes_the_same_tokens(name: str, tiny: Path, tmp_path: Path) -> None:
    """All engines do the same work: greedy, past the end of text, batched, each in a process."""
    work = Workload("some", "three lengths", ((20, 6), (40, 3), (25, 6)), shared=16)
    prompts = work.prompts(LLAMA_TINY["vocab_size"], 0)
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(tiny, file, "float32")

    async def theirs() -> list[list[int]]:
        async with PeerProcess.open(name, sys.executable, setup(tiny, file)) as peer:
            assert await peer.seconds(work, prompts) > 0
            return await peer.answers(work, prompts)

    assert run_on("asyncio", theirs) == ours(tiny, work, prompts)


def setup(folder: Path, file: Path) -> Setup:
    return {
        "folder": str(folder),
        "gguf": str(file),
        "dtype": "float32",
        "threads": 1,
        "running": 2,
        "context": 64,
    }


def test_the_gguf_file_has_the_same_weights(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(tiny, file, "float32")
    from gguf import GGUFReader
    from safetensors.torch import load_file

    tensors = load_file(tiny / "model.safetensors")
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in GGUFReader(file).tensors}
    assert len(stored) == len(tensors)
    assert stored["blk.1.ffn_up.weight"].equal(tensors["model.layers.1.mlp.up_proj.weight"])
    # The first head's rows 0, 1, 2, ... are rotated in pairs of neighbours there.
    query = tensors["model.layers.0.self_attn.q_proj.weight"]
    assert stored["blk.0.attn_q.weight"][:4].equal(query[[0, 8, 1, 9]])


def test_a_gguf_file_of_another_family_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 4}')
    with pytest.raises(BenchError, match="for Llamas only"):
        write_llama_gguf(tmp_path, tmp_path / "file.gguf", "float32")


HOLD = """
import fcntl, signal, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
signal.alarm(600)
signal.pause()
"""
PEER = """
import subprocess
import sys
class Peer:
    version = "1.2.3"
    def __init__(self, setup):
        if setup["gguf"]:
            # A process of its own, which holds a file locked.
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            command = [sys.executable, "-c", setup["gguf"], setup["folder"]]
            self.child = subprocess.Popen(command, **pipes)
            self.child.stdout.readline()
    def warm(self, prefix):
        print("noise on stdout")
    def run(self, requests, shared):
        if len(requests) == 3:
            sys.exit("the engine crashed")
        return [prompt[:tokens] for prompt, tokens in requests]
def open_peer(setup):
    if setup["dtype"] == "bfloat16":
        raise ValueError("no bfloat16 here")
    return Peer(setup)
"""


@pytest.fixture
def copycat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A peer whose answers are the beginnings of their prompts."""
    (tmp_path / "copycat.py").write_text(PEER)
    monkeypatch.setattr(process_module, "_HERE", tmp_path)
    return "copycat"


def asked(
    name: str, *works: Workload, most_seconds: float = inf, **changes: Any
) -> list[list[list[int]]]:
    async def ask() -> list[list[list[int]]]:
        opened = cast("Setup", {**setup(Path("folder"), Path("file")), "gguf": "", **changes})
        async with PeerProcess.open(name, sys.executable, opened, most_seconds) as peer:
            return [await peer.answers(work, work.prompts(9, 0)) for work in works]

    return run_on("asyncio", ask)


def test_what_a_peer_prints_is_no_answer(copycat: str) -> None:
    work = Workload("some", "two", ((5, 2), (6, 3)), shared=2)
    prompts = work.prompts(9, 0)
    (answers,) = asked(copycat, work)
    assert answers == [prompts[0][:2], prompts[1][:3]]


def test_what_a_peer_has_begun_ends_with_it(copycat: str, tmp_path: Path) -> None:
    (tmp_path / "locked").touch()
    asked(copycat, folder=str(tmp_path / "locked"), gguf=HOLD)
    with (tmp_path / "locked").open() as file:
        # Waits for whoever holds it, for ever if that has not ended.
        fcntl.flock(file, fcntl.LOCK_EX)


def test_an_answer_too_short_is_no_measurement(copycat: str) -> None:
    with pytest.raises(BenchError, match="copycat: RuntimeError: request 1 gave 4 of 8 tokens"):
        asked(copycat, Workload("long", "longer than its prompt", ((5, 2), (4, 8))))


def test_a_peer_that_cannot_be_opened_says_why(copycat: str) -> None:
    with pytest.raises(BenchError, match="copycat: ValueError: no bfloat16 here"):
        asked(copycat, dtype="bfloat16")


def test_a_peer_that_crashes_ends_the_run_with_its_words(copycat: str) -> None:
    with pytest.raises(BenchError, match=r"copycat: its process ended[\s\S]*the engine crashed"):
        asked(copycat, Workload("three", "three", ((4, 1),) * 3))


def test_a_peer_that_does_not_answer_is_not_waited_for(copycat: str) -> None:
    with pytest.raises(BenchError, match="copycat: no answer after 1e-09 seconds"):
        asked(copycat, most_seconds=1e-9)


def test_a_peer_that_fails_in_a_turn_takes_no_further_ones(
    copycat: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three = Workload("three", "three at once", ((4, 1),) * 3)
    monkeypatch.setitem(cast("dict[str, Workload]", QUICK), "mixed", three)
    result = measure_serve(
        ServeOptions(
            models=[str(tiny)],
            columns=["one", "mixed"],
            peers=[copycat],
            interference=False,
            repeat=2,
            quick=True,
        )
    )
    (model,) = result.models
    one, mixed = model.columns
    assert len(one.rates) == len(mixed.rates) == 2
    assert len(one.peer_rates[copycat]) == 1, "it crashed in its second turn"
    assert copycat not in mixed.peer_rates
    assert model.peer_versions == {copycat: "1.2.3"}
    # What it has printed may name files of this machine.
    assert model.not_measured == {copycat: "three at once: copycat: its process ended."}
    record = Record("serve", {}, result.figures(), {"models": [asdict(model)]})
    assert record_tables(record)[-1].title == "not measured"


def test_an_interpreter_that_is_not_there_is_named() -> None:
    async def open_it() -> None:
        opened = setup(Path("folder"), Path("file"))
        async with PeerProcess.open("transformers", "/no/python", opened):
            pass

    with pytest.raises(BenchError, match="transformers: /no/python cannot be run"):
        run_on("asyncio", open_it)


def test_peers_are_named_with_their_interpreters() -> None:
    assert parse_peers(["vllm=/opt/python", "transformers"]) == {
        "vllm": "/opt/python",
        "transformers": sys.executable,
    }
    with pytest.raises(BenchError, match=r"'ollama': the peers are transformers, llama\.cpp, vllm"):
        parse_peers(["ollama"])


def test_a_record_names_peers_and_no_interpreters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[object, object]] = []

    def measure(options: ServeOptions, report: object, pythons: object) -> ServeResult:
        asked.append((options.peers, pythons))
        return ServeResult(())

    monkeypatch.setattr(commands, "measure_serve", measure)
    file = tmp_path / "record.json"
    command = ["--peer", "vllm=/opt/python", "--json", str(file)]
    assert CliRunner().invoke(commands.serve, command).exit_code == 0
    assert asked == [(("vllm",), {"vllm": "/opt/python"})]
    assert Record.load(file).options["peers"] == ["vllm"]


def test_a_peer_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"vllm is not installed here.*--peer vllm=PYTHON"):
        parse_peers(["vllm"])
    assert installed_peers() == ()


def test_busy_programs_compute_and_leave() -> None:
    before = children()
    with busy_programs(2):
        assert len(children() - before) == 2
    assert children() == before


@pytest.mark.parametrize(
    ("busy_cores", "busy", "looks"),
    [
        (0, [9.0, 9.5, 10.0, 10.01], 3),
        (1, [9.0, 9.5, 9.75], 2),
        (0, [float(second) for second in range(99)], 12),
        (0, [None] * 2, 1),
    ],
)
def test_a_turn_waits_for_the_threads_of_the_one_before(
    busy_cores: int, busy: list[float | None], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(interference_module, "busy_seconds", lambda cores: busy.pop(0))
    monkeypatch.setattr(interference_module.anyio, "sleep", sleep)
    run_on("asyncio", lambda: until_quiet(busy_cores))
    assert slept == [0.25] * looks


def test_the_peer_keeps_its_kv_cache_whatever_the_checkpoint_says(tiny: Path) -> None:
    peer = TransformersPeer(tiny, 16)
    lengths: list[int] = []
    peer.model.generation_config.use_cache = False
    peer.model.register_forward_pre_hook(
        lambda _, __, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    assert peer.generate([[1, 2, 3, 4, 5]], 4).shape == (1, 4)
    assert lengths == [5, 1, 1, 1]


def test_the_whole_command(tiny: Path) -> None:
    options = ServeOptions(
        models=[str(tiny)],
        columns=["one", "sixteen", "shared"],
        peers=["transformers"],
        peer_repeat=1,
        repeat=2,
        quick=True,
    )
    told: list[str] = []
    result = measure_serve(options, told.append)
    (model,) = result.models
    assert [column.name for column in model.columns] == ["one", "sixteen", "shared"]
    for column in model.columns:
        assert len(column.rates) == 2
        assert len(column.peer_rates["transformers"]) == 1
    one, _, shared = model.columns
    assert one.interference is not None
    assert len(one.interference.rates) == len(one.interference.one_thread_rates) == 2
    assert len(one.interference.peer_rates["transformers"]) == 1
    assert shared.interference is None
    assert shared.cached_tokens == QUICK["shared"].cached_tokens
    assert all(column.ceiling > 0 for column in model.columns)
    figures = {figure.name: figure for figure in result.figures()}
    assert len(figures) == len(result.figures())
    over = figures[f"{tiny}: 1 request, 16+8, over transformers"]
    assert over.value == median(one.rates) / one.peer_rates["transformers"][0]
    over = figures[f"{tiny}: 1 request, 16+8, beside busy programs, over one thread alone"]
    assert over.value == median(one.interference.rates) / median(one.interference.one_thread_rates)
    assert any("16 at once over 1" in name for name in figures)
    # A peer that takes too long there has had its other turns.
    beside = [at for at, what in enumerate(told) if "beside busy programs" in what]
    assert beside == list(range(len(told) - 4, len(told)))


def test_the_ceiling_counts_what_is_computed() -> None:
    work = Workload("some", "20 requests", ((48, 9),) * 20, shared=32)
    # 16 fresh tokens and 8 decode steps each; a step has 16 rows.
    seconds = {BULK_ROWS: 512.0, 16: 100.0}
    assert floor_seconds(work, seconds) == 20 * 16 + 100 * 20 * 8 / 16
    assert product_rows(work) == 16
    assert product_rows(Workload("one", "one", ((4, 4),))) == 1


def test_products_are_the_models_own(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    embedding, norms = 512 * 64, (2 * 2 + 1) * 64
    products = sum(rows * columns for rows, columns in product_shapes(config))
    assert products == TINY_PARAMETERS - embedding - norms


@pytest.mark.parametrize("supported", [True, False])
def test_products_are_timed_for_each_number_of_rows(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 oneDNN lays nothing out on processors that lack the instructions."""
    if not supported:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    dtype = "float32" if supported else "bfloat16"
    seconds = product_seconds(MODEL_PATH, [1, 16, BULK_ROWS], dtype)
    assert seconds.keys() == {1, 16, BULK_ROWS}
    assert all(0 < each < float("inf") for each in seconds.values())


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"config\.json: no checkpoint"):
        measure_serve(ServeOptions(models=[str(tmp_path)], repeat=1, peers=[]))
