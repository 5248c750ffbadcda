"""Kernels compile on other threads while a model's weights are loaded: a rehearsal on tensors
without memory asks for them. That it asks for all is in `test_warm_up.py`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.compiled import SHARED
from models.eagle3_heads import HeadedModel, random_head
from models.predictors import agreeing
from models.sparse import SPARSE
from transformers import AutoModelForCausalLM
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.config import EngineConfig
from asyncinfer.errors import EngineClosed
from asyncinfer.kernels import dispatch, triton
from asyncinfer.kernels.rehearsal import Launch, device_of, rehearsing
from asyncinfer.models import load_model
from asyncinfer.models.load import outline_model
from asyncinfer.runner import compile_ahead
from asyncinfer.runner.compile_ahead import CompileAhead, compiling
from asyncinfer.runner.rehearsal import rehearse
from asyncinfer.stats import LoadProgress

CUDA, CPU, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
#: Seconds that a test waits for what has to come.
PATIENCE = 60


class Compiler:
    """Takes a second for each kernel, of a clock that a test sets."""

    def __init__(self) -> None:
        self.begun, self.time_goes_on = threading.Event(), threading.Event()
        self.compiled: list[Launch] = []
        self.threads: set[str] = set()

    def __call__(self, ahead: CompileAhead, launch: Launch) -> None:
        self.begun.set()
        assert self.time_goes_on.wait(PATIENCE)
        self.threads.add(threading.current_thread().name)
        self.compiled.append(launch)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    fake = Compiler()
    monkeypatch.setattr(CompileAhead, "_compiled", lambda *args: fake(*args))
    yield fake
    fake.time_goes_on.set()


def opened(
    progress: Any = None, config: EngineConfig | None = None, device: torch.device = CUDA
) -> Any:
    """The shipped model's folder, loaded as `open_runner` does but onto the CPU."""
    config = config or EngineConfig()
    with compiling(MODEL_PATH, config, torch.bfloat16, device, 4096, progress) as report:
        return load_model(MODEL_PATH, CPU, torch.bfloat16, report)


def test_kernels_compile_while_weights_load(gpu: None, compiler: Compiler) -> None:
    seen: list[LoadProgress] = []

    def progress(step: LoadProgress) -> None:
        seen.append(step)
        if step.bytes_done == step.bytes_total:
            # All weights are there, and no kernel is.
            assert compiler.begun.wait(PATIENCE)
            compiler.time_goes_on.set()

    opened(progress)
    assert len(compiler.compiled) == len({launch.key for launch in compiler.compiled}) > 40
    assert all(name.startswith("asyncinfer-compile") for name in compiler.threads)
    assert seen[0].kernels_done == 0
    assert 0 < seen[0].bytes_total == seen[-1].bytes_done
    assert seen[-1].kernels_done == seen[-1].kernels_total == len(compiler.compiled)


def test_an_opening_that_is_cancelled_compiles_nothing_more(gpu: None, compiler: Compiler) -> None:
    def progress(step: LoadProgress) -> None:
        if compiler.begun.is_set():
            raise EngineClosed("nobody waits")

    with pytest.raises(EngineClosed, match="nobody waits"):
        opened(progress)
    compiler.time_goes_on.set()
    assert len(compiler.compiled) < 10


@pytest.mark.parametrize(
    ("options", "device"),
    [({"warm_up": False}, CUDA), ({"deterministic": True}, CUDA), ({}, CPU)],
)
def test_where_nothing_warms_up_nothing_compiles(
    gpu: None, compiler: Compiler, options: dict[str, Any], device: torch.device
) -> None:
    compiler.time_goes_on.set()
    opened(config=EngineConfig(**options), device=device)
    dispatch.use_triton(False)
    try:
        opened()
    finally:
        dispatch.use_triton(True)
    assert compiler.compiled == []


def test_a_compiler_that_fails_fails_no_opening(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(CompileAhead, "_compiled", fails)
    opened()
    monkeypatch.setattr(compile_ahead, "rehearse", fails)
    opened()


@pytest.mark.parametrize("storage", ["int8", "int4", "fp8"])
def test_weights_that_are_made_smaller(gpu: None, storage: str) -> None:
    wanted: list[Launch] = []
    with rehearsing(CUDA, wanted.append):
        outline = outline_model(MODEL_PATH, CUDA, torch.bfloat16, storage=storage)
        rehearse(outline, EngineConfig(weights=storage, kv="int8"), CUDA, 4096)
    code = {"int8": "'int8'", "int4": "'int4'", "fp8": "'e4m3'"}[storage]
    products = [launch for launch in wanted if "gemv" in str(launch.key)]
    assert any(code in str(launch.key) for launch in products)


@pytest.mark.parametrize("made_by", ["eagle", "vllm", "model"])
def test_what_predicts_is_rehearsed_with_its_model(gpu: None, tmp_path: Path, made_by: str) -> None:
    """A head of its own shapes, which takes the model's tokens or some of them; or the model's own
    layer."""
    given: dict[str, Any] = {"predictor": True}
    if made_by == "model":
        folder = agreeing().save(tmp_path)
    else:
        folder, head = HeadedModel(random_head(made_by)).save(tmp_path)
        given = {"head": head}
    config, asked = EngineConfig(max_context=64), list[set[Any]]()
    for options in ({}, given):
        wanted: list[Launch] = []
        with rehearsing(CUDA, wanted.append):
            outline = outline_model(folder, CUDA, torch.bfloat16, max_context=64, **options)
            rehearse(outline, config, CUDA, outline.config.vocab_size)
        asked.append({launch.key for launch in wanted})
    of_model, of_both = asked
    assert len(of_both - of_model) > 8


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5"])
def test_steps_that_are_never_recorded(gpu: None, tmp_path: Path, name: str) -> None:
    """Those of sparse attention, of tokens that decode and of prompts, and their draws."""
    AutoModelForCausalLM.from_config(SPARSE[name][1][0]).save_pretrained(tmp_path)
    wanted: list[Launch] = []
    with rehearsing(CUDA, wanted.append):
        outline = outline_model(tmp_path, CUDA, torch.bfloat16, max_context=256)
        rehearse(outline, EngineConfig(max_context=256), CUDA, outline.config.vocab_size)
    keys = {str(launch.key) for launch in wanted}
    for kernel in ("rms_norm", "gemv", "skinny", "grouped", "_settle"):
        assert any(kernel in key for key in keys), kernel


class Driver:
    """Of a GPU that compiles for its target and launches nothing."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def test_what_was_compiled_is_what_a_launch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton finds the kernel of a rehearsal for tensors that have memory."""
    wanted: list[Launch] = []
    x, weight = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((3, 48), (48,)))
    with rehearsing(CUDA, wanted.append):
        assert device_of(META) == CUDA
        out = triton.rms_norm(x.to(META), weight.to(META), 1e-6)
    assert device_of(META) == META
    assert (out.shape, out.device) == (x.shape, META)
    (launch,) = wanted
    monkeypatch.setattr(driver, "_active", Driver(max(SHARED)))
    kernel = vars(import_module("asyncinfer.kernels.triton.rms_norm"))["_rms_norm"]
    try:
        code = launch.compile()
        (held,) = kernel.device_caches[0][0].values()
        assert held is code
        again = kernel.run(
            *(x, weight, torch.empty_like(x), 1e-6),
            grid=(3,),
            warmup=True,
            STRIDE=48,
            SIZE=48,
            BLOCK=64,
            PLUS_ONE=False,
            num_warps=1,
        )
        assert again is code
    finally:
        kernel.device_caches.clear()
