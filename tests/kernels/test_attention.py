"""Paged attention's Triton kernels against float64: in the interpreter, and on a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from kernels.attention_cases import Case, make_case
from kernels.targets import ONE_DTYPE, Target
from triton.runtime import interpreter

from asyncinfer.kernels import ops, reference, triton
from asyncinfer.kernels.workspace import AttentionWorkspace

#: Lengths 0, 1, a page and one beside it, a tile and one beside it, and long.
DECODE = [(length, 1) for length in (0, 1, 15, 16, 17, 64, 65, 200)]
#: The same, from the start of a sequence and with a context; parts of tiles and several.
PREFILL = [(1, 1), (15, 15), (16, 2), (17, 17), (0, 1), (65, 65), (150, 40)]
#: Rows of 1 to 8 tokens, as when speculated ones are verified.
VERIFY = [(1, 1), (8, 8), (17, 3), (0, 1), (130, 8), (90, 5)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window of 1": {"window": 1},
    "window": {"window": 20},
    "wide window": {"window": 100},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "everything": {"window": 50, "softcap": 2.0, "sinks": True, "scale": 0.3},
}
of_one_dtype = pytest.mark.parametrize("target", ONE_DTYPE, indirect=True)
QUANTISED = [torch.int8, torch.float8_e4m3fn]


def case_for(target: Target, rows: list[tuple[int, int]], **options: Any) -> Case:
    return make_case(rows, dtype=target.dtype, device=target.device, **options)


def check(target: Target, rows: list[tuple[int, int]], **options: Any) -> None:
    case = case_for(target, rows, **options)
    got = triton.paged_attention(**case.arguments)
    assert got.dtype is target.dtype
    target.check(got, case.exact)


@pytest.mark.parametrize("name", OPTIONS)
def test_decode(target: Target, name: str) -> None:
    check(target, DECODE, decode_rows=len(DECODE), parts=len(DECODE) + 9, chunk=64, **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_prefill(target: Target, name: str) -> None:
    check(target, PREFILL, **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_verify(target: Target, name: str) -> None:
    options = {"max_query_len": 8, "parts": 12, "chunk": 64, **OPTIONS[name]}
    check(target, VERIFY, decode_rows=len(VERIFY), **options)


@pytest.mark.parametrize("cache_dtype", [None, *QUANTISED], ids=str)
def test_mixed(target: Target, cache_dtype: torch.dtype | None) -> None:
    """Decode rows, rows to verify and prompts, in one call."""
    rows = [(130, 1), (0, 1), (20, 4), (40, 40), (100, 9)]
    options = {"decode_rows": 3, "max_query_len": 4, "parts": 8, "chunk": 64}
    check(target, rows, cache_dtype=cache_dtype, **OPTIONS["everything"], **options)
    check(target, rows, cache_dtype=cache_dtype, **options)


@of_one_dtype
@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16])
def test_grouped_queries(target: Target, group: int) -> None:
    rows = [(70, 1), (33, 1), (20, 20)]
    check(target, rows, heads=2 * group, kv_heads=2, decode_rows=2)
    # 128 queries times heads: more than one tile of them.
    options = {"decode_rows": 2, "max_query_len": 8, "chunk": 64, "parts": 6}
    check(target, [(90, 8), (9, 3)], heads=group, kv_heads=1, **options)


@of_one_dtype
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)
def test_head_dims(target: Target, head_dim: int, cache_dtype: torch.dtype | None) -> None:
    options = {"head_dim": head_dim, "cache_dtype": cache_dtype, "decode_rows": 1, "chunk": 64}
    check(target, [(130, 1), (35, 20)], **options)


@of_one_dtype
@pytest.mark.parametrize("block_size", [8, 32, 48, 64])
def test_block_sizes(target: Target, block_size: int) -> None:
    rows = [(block_size, 1), (block_size + 1, 1), (130, 1), (70, 20)]
    check(target, rows, block_size=block_size, decode_rows=3, window=60)


@of_one_dtype
def test_many_rows_of_prompts(target: Target) -> None:
    """More than one look at the rows' starts; rows shorter and longer than a tile."""
    rows = [(0 if row % 8 else 1 + row % 3, 1 + row % 3) for row in range(135)]
    rows[60], rows[131] = (70, 66), (0, 2)
    check(target, rows, heads=1, kv_heads=1, block_size=8)


@of_one_dtype
def test_a_long_row_is_read_by_as_many_programs_in_a_full_batch_as_alone(target: Target) -> None:
    """Beside more rows than are looked at in one go. Short ones stay in one part each."""
    used = []
    for others in (0, 130):
        rows = [(0 if row % 10 else 1 + row % 60, 1) for row in range(others)]
        rows.append((1100, 1))
        parts = len(rows) + 16
        workspace = AttentionWorkspace.allocate(len(rows), 1, 64, parts, target.device)
        workspace.lse.fill_(torch.nan)
        options = {"heads": 1, "kv_heads": 1, "parts": parts, "workspace": workspace}
        # So much that the keys of the others do not count.
        check(target, rows, decode_rows=len(rows), chunk=320, window=1000, **options)
        used.append(int(workspace.lse.isfinite().sum()))
        assert not workspace.arrivals.any()
    assert used == [4, 4]


@of_one_dtype
def test_parts_are_no_more_than_there_are(target: Target) -> None:
    """Whatever lengths rows have; where keys do not fill them, each has the least."""
    generator = np.random.default_rng(5)
    for _ in range(6):
        lengths = generator.choice([0, 1, 63, 64, 65, 200, 500], generator.integers(1, 6))
        rows = [(int(length), 1) for length in lengths]
        parts = len(rows) + int(generator.integers(1, 5))
        print(rows, parts)
        options = {"heads": 1, "kv_heads": 1, "decode_rows": len(rows), "chunk": 1}
        check(target, rows, parts=parts, **options)


def test_parts_for_no_more_than_the_rows_are_refused(target: Target) -> None:
    case = case_for(target, [(3, 1), (4, 1)], decode_rows=2, parts=2)
    with pytest.raises(ValueError, match="parts is 2, not above decode_rows, which is 2"):
        triton.paged_attention(**case.arguments)


@of_one_dtype
def test_queries_cut_from_a_packed_product(target: Target) -> None:
    case = case_for(target, [(70, 1), (30, 12)], decode_rows=1)
    packed = torch.full((13, 9, 64), torch.nan, dtype=target.dtype, device=target.device)
    packed[:, 2:6] = case.tensors["q"]
    got = triton.paged_attention(**{**case.arguments, "q": packed[:, 2:6]})
    target.check(got, case.exact)


@of_one_dtype
def test_as_many_parts_as_you_like(target: Target) -> None:
    """One workspace for all, whatever was left in it; each time its counters are zero again."""
    rows = [(200, 1), (0, 1), (65, 2), (1, 1)]
    workspace = AttentionWorkspace.allocate(4, 4, 64, 30, target.device, max_query_len=2)
    workspace.outputs.fill_(torch.nan)
    workspace.lse.fill_(torch.nan)
    for parts, chunk in [(5, 1), (6, 33), (8, 1), (12, 64), (30, 1)]:
        options = {"parts": parts, "chunk": chunk, "workspace": workspace}
        check(target, rows, decode_rows=4, max_query_len=2, sinks=True, **options)
        assert not workspace.arrivals.any()


@of_one_dtype
def test_nothing_depends_on_the_order_of_programs(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as which split ends last; with more than one tile of queries for a KV head."""
    options = {"decode_rows": 2, "max_query_len": 8, "chunk": 64, "heads": 10, "kv_heads": 1}
    case = case_for(target, [(150, 8), (70, 7)], **options)
    first = triton.paged_attention(**case.arguments)
    for turn in range(2 if target.device == "cpu" else 50):
        if target.device == "cpu":
            shuffle_programs(monkeypatch, turn)
        assert torch.equal(triton.paged_attention(**case.arguments), first)


def shuffle_programs(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The interpreter runs a grid's programs one after another: from here on in another order."""
    builder = interpreter.interpreter_builder

    def set_grid_idx(*at: int) -> None:
        order = np.random.default_rng(seed).permutation(math.prod(builder.grid_dim))
        flat = order[np.ravel_multi_index(at, builder.grid_dim)]
        builder.grid_idx = tuple(int(i) for i in np.unravel_index(flat, builder.grid_dim))

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)


@of_one_dtype
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_a_row_does_not_depend_on_the_others(target: Target, name: str) -> None:
    """Bit for bit: alone, among others, in another place, with a wider table."""
    mine = (200, 1)
    batches = [[mine], [(3, 1), mine, (0, 1)], [(300, 1)] + 3 * [(20, 1)] + [mine]]
    results = []
    for rows in batches:
        case = case_for(target, rows, decode_rows=len(rows), chunk=64, **OPTIONS[name])
        results.append(triton.paged_attention(**case.arguments)[rows.index(mine)])
        target.check(results[-1], case.exact[rows.index(mine)])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@of_one_dtype
@pytest.mark.parametrize("rows", [[(0, 1)], [(0, 0), (20, 20)], [(300, 1), (20, 20)]], ids=str)
def test_one_row_of_up_to_one_token(target: Target, rows: list[tuple[int, int]]) -> None:
    """Such a row has code of its own; prompts beside it keep what is theirs."""
    check(target, rows, decode_rows=1, chunk=64, **OPTIONS["everything"])


@of_one_dtype
def test_a_prompt_does_not_depend_on_the_others(target: Target) -> None:
    mine = (90, 30)
    alone = triton.paged_attention(**case_for(target, [mine]).arguments)
    rows = [(20, 1), (40, 40), mine, (5, 5)]
    among = triton.paged_attention(**case_for(target, rows, decode_rows=1).arguments)
    assert torch.equal(alone, among[41:71])


def test_the_twins_agree(target: Target) -> None:
    options = {"decode_rows": 2, **OPTIONS["everything"]}
    case = case_for(target, [(70, 1), (9, 1), (40, 30)], cache_dtype=torch.int8, **options)
    for kernel in (reference.paged_attention, ops.paged_attention):
        target.check(kernel(**case.arguments), case.exact)


def test_no_rows(target: Target) -> None:
    arguments = case_for(target, [(3, 1)]).arguments
    for name, end in (("q", 0), ("seq_lens", 0), ("block_tables", 0), ("query_starts", 1)):
        arguments[name] = arguments[name][:end]
    assert triton.paged_attention(**arguments).shape == (0, 4, 64)


def test_a_workspace_that_is_too_small_is_refused(target: Target) -> None:
    case = case_for(target, [(3, 1), (4, 1)], decode_rows=2, parts=6)
    small = AttentionWorkspace.allocate(2, 4, 64, 4, target.device)
    with pytest.raises(ValueError, match="workspace is too small for 2 rows of 1 query tokens"):
        triton.paged_attention(**case.arguments, workspace=small)


def test_layouts_that_cannot_be_read_are_refused(target: Target) -> None:
    arguments = case_for(target, [(3, 1)], cache_dtype=torch.int8).arguments
    apart = arguments["k_scales"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="k_scales is not contiguous"):
        triton.paged_attention(**{**arguments, "k_scales": apart})
    apart = arguments["k_cache"].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="k_cache and v_cache have strides"):
        triton.paged_attention(**{**arguments, "k_cache": apart})
