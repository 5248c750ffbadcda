"""`asyncinfer bench serve`, small: what is counted was computed. Times are not looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncinfer import Engine, EngineConfig
from asyncinfer.bench import BenchError, ServeOptions, measure_serve
from asyncinfer.bench.checkpoint import write_checkpoint
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.peer import TransformersPeer
from asyncinfer.bench.products import (
    BULK_ROWS,
    floor_seconds,
    product_rows,
    product_seconds,
    product_shapes,
)
from asyncinfer.bench.serve_run import Run, run_workload
from asyncinfer.bench.shapes import LLAMA_125M, LLAMA_TINY
from asyncinfer.bench.workloads import QUICK, Workload
from asyncinfer.builtin import MODEL_PATH
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


def test_the_peer_computes_the_same_tokens(tiny: Path) -> None:
    """Both engines do the same work: greedy, past the end of text, batched."""
    work = Workload("pair", "two lengths", ((20, 6), (9, 6)))
    prompts = work.prompts(LLAMA_TINY["vocab_size"], 0)
    peer = TransformersPeer(tiny)
    assert peer.run(work, prompts) > 0
    theirs = [tokens.tolist() for tokens in peer.generate(prompts, 6)]

    async def ours() -> list[list[int]]:
        async with Engine(tiny, device="cpu", dtype="float32") as engine:
            done = [
                await engine.generate(prompt, max_tokens=6, temperature=0.0, ignore_eos=True)
                for prompt in prompts
            ]
        return [list(one.token_ids) for one in done]

    assert theirs == run_on("asyncio", ours)


def test_the_peer_keeps_its_kv_cache_whatever_the_checkpoint_says(tiny: Path) -> None:
    peer = TransformersPeer(tiny)
    lengths: list[int] = []
    peer.model.generation_config.use_cache = False
    peer.model.register_forward_pre_hook(
        lambda _, __, inputs: lengths.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    assert peer.generate([[1, 2, 3, 4, 5]], 4).shape == (1, 4)
    assert lengths == [5, 1, 1, 1]


def test_the_whole_command(tiny: Path) -> None:
    options = ServeOptions(
        models=[str(tiny)], columns=["one", "sixteen", "shared"], peer_repeat=1, quick=True
    )
    told: list[str] = []
    result = measure_serve(options, told.append)
    (model,) = result.models
    assert [column.name for column in model.columns] == ["one", "sixteen", "shared"]
    for column in model.columns:
        assert len(column.rates) == 3
        assert len(column.peer_rates) == 1
        assert column.peer_ratio == sorted(column.rates)[1] / column.peer_rates[0]
        assert column.goal is None
    assert model.columns[2].cached_tokens == QUICK["shared"].cached_tokens
    assert all(column.ceiling > 0 for column in model.columns)
    names = [figure.name for figure in result.figures()]
    assert len(set(names)) == len(names)
    assert any("16 at once over 1" in name for name in names)
    assert told


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


def test_products_are_timed_for_each_number_of_rows() -> None:
    seconds = product_seconds(MODEL_PATH, [1, 16, BULK_ROWS])
    assert seconds.keys() == {1, 16, BULK_ROWS}
    assert all(0 < each < float("inf") for each in seconds.values())


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"config\.json: no checkpoint"):
        measure_serve(ServeOptions(models=[str(tmp_path)], repeat=1, peer=False))
