"""The torch twin of paged attention against float64: windows, soft caps, sinks, quantised caches;
and the checks at its door."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.attention_cases import make_case

from asyncinfer.kernels import ops
from asyncinfer.kernels.workspace import AttentionWorkspace, decode_parts, invariant_chunk

ROWS = [(1, 1), (17, 1), (0, 1), (15, 3), (33, 33), (40, 7)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window of 1": {"window": 1},
    "window": {"window": 9},
    "window wider than all": {"window": 99},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "everything": {"window": 17, "softcap": 2.0, "sinks": True, "head_dim": 80, "kv_heads": 1},
    "group of 5": {"heads": 10, "block_size": 8},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_agrees_with_float64(name: str, cache_dtype: torch.dtype | None) -> None:
    case = make_case(ROWS, cache_dtype=cache_dtype, **OPTIONS[name])
    got = ops.paged_attention(**case.arguments)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got.double(), case.exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
)
def test_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    case = make_case(ROWS, dtype=dtype, window=20, softcap=3.0)
    got = ops.paged_attention(**case.arguments)
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), case.exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", 0),
        ("scale", -1.0),
        ("softcap", 0.0),
        ("decode_rows", 3),
        ("decode_rows", -1),
        ("max_query_len", 9),
        ("parts", 0),
        ("chunk", 0),
    ],
)
def test_bounds_are_named(field: str, value: float) -> None:
    arguments = {**make_case([(3, 1), (5, 2)]).arguments, field: value}
    with pytest.raises(ValueError, match=f"paged_attention: {field} is {value}"):
        ops.paged_attention(**arguments)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sinks": torch.zeros(3)},
        {"sinks": torch.zeros(4).double()},
        {"k_scales": torch.ones(6, 2, 16)},
        {"k_cache": torch.zeros(5, 2, 16, 64).half(), "v_cache": torch.zeros(5, 2, 16, 64).half()},
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, torch.Tensor]) -> None:
    arguments = {**make_case([(3, 1), (5, 2)]).arguments, **wrong}
    with pytest.raises(ValueError, match="paged_attention: shapes or dtypes"):
        ops.paged_attention(**arguments)


def test_a_quantised_cache_needs_its_scales() -> None:
    arguments = make_case([(3, 1)], cache_dtype=torch.int8).arguments
    del arguments["v_scales"]
    with pytest.raises(ValueError, match="paged_attention: shapes or dtypes"):
        ops.paged_attention(**arguments)


def test_parts_that_do_not_depend_on_the_batch_are_few_and_in_whole_tiles() -> None:
    for longest in (1, 256, 4096, 16_384, 16_385, 131_072, 1 << 20):
        chunk = invariant_chunk(longest)
        assert chunk % 64 == 0
        assert chunk >= 256
        assert -(-longest // chunk) <= 64
    # As many as there may be, where there are that many.
    assert -(-131_072 // invariant_chunk(131_072)) == 64


def test_a_workspace_is_as_large_as_is_reckoned_with() -> None:
    def size(rows: int, longest: int, kv_heads: int) -> int:
        parts = decode_parts(rows, kv_heads, longest)
        workspace = AttentionWorkspace.allocate(rows, 32, 128, parts, "meta")
        return workspace.outputs.nbytes + workspace.lse.nbytes + workspace.arrivals.nbytes

    for kv_heads in (1, 8, 32):
        most = AttentionWorkspace.most_bytes(256, 32, kv_heads, 128)
        sizes = [size(rows, 131_072, kv_heads) for rows in (1, 2, 4, 8, 64, 96, 255, 256)]
        assert max(sizes) <= most
        assert most < 2 * max(sizes)
