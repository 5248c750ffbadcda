"""The decode loop on a real GPU: recorded steps against eager ones and transformers, no hidden
waiting, memory given back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hidden_waits import refused_waits

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.engine.checkpoint import CheckpointSource
from asyncinfer.kernels import triton
from asyncinfer.kernels.dispatch import use_triton
from asyncinfer.runner import ModelRunner
from asyncinfer.runner.accelerator import CudaAccelerator
from asyncinfer.runner.graph_executor import GraphExecutor
from asyncinfer.testing import InlineEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [
    "def add(a, b):",
    "import os\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path",
    "for i in range(10):\n    ",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "# A comment about nothing in particular\nx = [1, 2, 3]\n",
    "class Stack:\n    def push(self, item):\n",
]
NEW = 40


HALVES = ["bfloat16", "float16"]


@pytest.fixture(params=["float32", *HALVES])
def dtype(request: pytest.FixtureRequest) -> str:
    """Fused layers and their kernels compute in halves; float32 is exact, and has none of them."""
    return str(request.param)


@pytest.fixture(autouse=True)
def stream() -> Iterator[None]:
    """A runner takes the thread to a stream of its own."""
    with torch.cuda.stream(torch.cuda.current_stream()):
        yield


def engine(**options: Any) -> InlineEngine:
    defaults: dict[str, Any] = {"device": "cuda", "dtype": "float32", "kv_bytes": 1 << 27}
    return InlineEngine(CheckpointSource(MODEL_PATH), **{**defaults, **options})


def answers(inline: InlineEngine, **options: Any) -> list[list[int]]:
    defaults = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
    streams = [inline.submit(prompt, **{**defaults, **options}) for prompt in PROMPTS]
    inline.run()
    for each in streams:
        each.read()
        assert each.error is None
    return [each.token_ids() for each in streams]


def close(inline: InlineEngine) -> None:
    inline.core.runner.close()


def recorded(inline: InlineEngine) -> int:
    runner = inline.core.runner
    assert isinstance(runner, ModelRunner)
    executor = runner.executor
    return executor.graphs.recorded if isinstance(executor, GraphExecutor) else 0


def test_recorded_equals_eager_equals_transformers() -> None:
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).cuda().eval()
    # It would bar the end that it must not come to; an engine that ignores the end may draw it.
    peer.generation_config.eos_token_id = None
    found = {}
    for graphs in ("lazy", "start", "off"):
        inline = engine(cuda_graphs=graphs, max_running=8)
        found[graphs] = answers(inline)
        assert (recorded(inline) > 0) == (graphs != "off")
        tokenizer = inline.core.loaded.tokenizer
        close(inline)
    assert found["lazy"] == found["start"] == found["off"]
    for prompt, tokens in zip(PROMPTS, found["lazy"], strict=True):
        ids = torch.tensor([tokenizer.encode(prompt)], device="cuda")
        out = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
        assert out[0, ids.shape[1] :].tolist() == tokens


@pytest.mark.parametrize("half", HALVES)
def test_halves_open_without_a_fallback(half: str) -> None:
    """`kernels="triton"` refuses to open where the trial or the first answer finds a fault."""
    inline = engine(dtype=half, kernels="triton", kernel_trial="process", max_running=8)
    assert [len(tokens) for tokens in answers(inline)] == [NEW] * len(PROMPTS)
    runner = inline.core.runner
    assert isinstance(runner, ModelRunner)
    assert runner.fallbacks == ()
    assert recorded(inline) > 0
    close(inline)


@pytest.mark.parametrize("options", [{"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.8}])
def test_draws_are_the_same_however_far_ahead(options: dict[str, Any], dtype: str) -> None:
    found = []
    ways = [(1, "lazy"), (2, "lazy"), (4, "lazy")]
    if dtype == "float32":
        # A recorded step is padded, which rounds halves in another order.
        ways.append((1, "off"))
    for overlap, graphs in ways:
        inline = engine(overlap=overlap, cuda_graphs=graphs, dtype=dtype)
        found.append(answers(inline, seed=5, **options))
        close(inline)
    assert all(each == found[0] for each in found)


def test_a_steady_decode_step_never_waits_for_the_device(dtype: str) -> None:
    inline = engine(overlap=2, dtype=dtype)
    for prompt in PROMPTS:
        inline.submit(prompt, max_tokens=200, temperature=0.7, ignore_eos=True)
    inline.pump(12)
    graphs = recorded(inline)
    with refused_waits():
        inline.pump(100)
    assert recorded(inline) == graphs > 0
    inline.run()
    close(inline)


def test_a_recording_that_fails_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    inline = engine(dtype=dtype)
    expected = answers(inline)
    close(inline)

    def failing(self: Any, work: Any) -> Any:
        def wrong() -> None:
            work()
            # Waits for the device.
            torch.zeros(1, device="cuda").item()

        return record(self, wrong)

    record = CudaAccelerator.record
    monkeypatch.setattr(CudaAccelerator, "record", failing)
    with pytest.warns(RuntimeWarning, match="recording"):
        inline = engine(dtype=dtype)
        assert answers(inline) == expected
    assert recorded(inline) == 0
    close(inline)


@pytest.mark.parametrize("half", HALVES)
def test_a_kernel_that_fails_costs_speed_only(monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    """Layers of few launches go on by torch's operators."""

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image is available")

    inline = engine(dtype=half, cuda_graphs="off", max_running=8)
    monkeypatch.setattr(triton, "rope_kv_write", failing)
    try:
        with pytest.warns(RuntimeWarning, match="rope_kv_write"):
            found = answers(inline)
    finally:
        use_triton(True)
    assert [len(tokens) for tokens in found] == [NEW] * len(PROMPTS)
    close(inline)


@pytest.mark.parametrize(
    ("cycles", "tokens"),
    [(30, NEW), pytest.param(500, 3, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_closing_gives_memory_back(cycles: int, tokens: int) -> None:
    used = []
    for _ in range(cycles):
        inline = engine(max_running=4, cuda_graphs="lazy", dtype="bfloat16")
        answers(inline, max_tokens=tokens)
        assert recorded(inline) > 0
        close(inline)
        del inline
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append((torch.cuda.memory_allocated(), total - free))
    # Kernels and libraries load in the first rounds.
    assert used[-1][0] == used[3][0]
    assert used[-1][1] <= used[3][1] + (8 << 20)


def test_the_same_bits_alone_and_together(dtype: str) -> None:
    inline = engine(deterministic=True, dtype=dtype)
    options = {"max_tokens": 12, "temperature": 0.9, "seed": 3, "logprobs": 2, "ignore_eos": True}

    def chunks(prompts: list[str]) -> list[Any]:
        streams = [inline.submit(prompt, **options) for prompt in prompts]
        inline.run()
        return [[(c.token_ids, c.logprobs) for c in each.read()] for each in streams]

    together = chunks(PROMPTS)
    assert together == [chunks([prompt])[0] for prompt in PROMPTS]
    close(inline)
