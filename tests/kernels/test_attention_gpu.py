"""Paged attention's kernels on a GPU: what an interpreter cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hidden_waits import refused_waits
from kernels.attention_cases import Case, make_case

from asyncinfer.kernels import triton
from asyncinfer.kernels.workspace import AttentionWorkspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
#: Llama 3.1 8B's attention.
LLAMA = {"heads": 32, "kv_heads": 8, "head_dim": 128}
GPT_OSS = {"heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128, "sinks": True}
GEMMA = {"heads": 8, "kv_heads": 4, "head_dim": 256, "window": 1024, "softcap": 50.0}


def on_gpu(rows: list[tuple[int, int]], **options: Any) -> Case:
    return make_case(rows, **{"dtype": torch.bfloat16, "device": "cuda", **options})


def close(got: torch.Tensor, exact: torch.Tensor, tolerance: float = 2e-2) -> None:
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance / 4)


@pytest.mark.parametrize("model", [LLAMA, GPT_OSS, GEMMA], ids=["llama", "gpt-oss", "gemma"])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_long(model: dict[str, Any], cache_dtype: torch.dtype | None) -> None:
    rows = [(9000, 1), (1, 1), (257, 1), (4000, 1), (1500, 700), (300, 300)]
    case = on_gpu(rows, cache_dtype=cache_dtype, decode_rows=4, **model)
    # Of four million results in 8 bits one was off by 0.0052.
    tolerance = 2e-2 if cache_dtype is None else 3e-2
    close(triton.paged_attention(**case.arguments), case.exact, tolerance)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_float32(head_dim: int) -> None:
    options = {"dtype": torch.float32, "head_dim": head_dim, "decode_rows": 2, "max_query_len": 3}
    case = on_gpu([(700, 1), (90, 3), (200, 130)], **options)
    close(triton.paged_attention(**case.arguments), case.exact, 5e-5)


def test_a_call_does_not_wait_for_the_device() -> None:
    case = on_gpu([(700, 1), (90, 90)], decode_rows=1)
    triton.paged_attention(**case.arguments)
    with refused_waits():
        got = triton.paged_attention(**case.arguments)
    close(got, case.exact)


def test_a_graph_replays_for_other_lengths() -> None:
    """Captured for the longest rows, replayed for shorter, empty and again the longest ones."""
    options = {"decode_rows": 4, "parts": 24, **LLAMA}
    longest = on_gpu(4 * [(3000, 1)], **options)
    workspace = AttentionWorkspace.allocate(4, 32, 128, 24, "cuda")
    inputs = {name: tensor.clone() for name, tensor in longest.tensors.items()}
    arguments = {**inputs, **longest.options, "workspace": workspace}
    triton.paged_attention(**arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = triton.paged_attention(**arguments)
    for lengths in [(3000, 17, 0, 1), (0, 0, 0, 0), (257, 256, 2999, 512), (3000,) * 4]:
        case = on_gpu([(length, 1) for length in lengths], **options)
        for name, tensor in case.tensors.items():
            # Caches and tables of shorter rows are smaller.
            inputs[name][tuple(slice(0, size) for size in tensor.shape)] = tensor
        graph.replay()
        close(out, case.exact)
        assert not workspace.arrivals.any()


def test_bit_for_bit_in_every_batch() -> None:
    mine = (5000, 1)
    results = []
    for others in (0, 1, 40, 200):
        rows = others * [(600, 1)] + [mine]
        case = on_gpu(rows, decode_rows=len(rows), chunk=512, **LLAMA)
        results.append(triton.paged_attention(**case.arguments)[-1])
    assert all(torch.equal(result, results[0]) for result in results)
