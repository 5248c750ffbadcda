"""Every kernel as machine code for six targets: it has to fit, whichever GPU a user has.

What the code looks like on an A100 and an H100 is in each kernel's own tests. Here formats and head
dimensions take turns over the targets, so that each kernel is compiled once or twice for each.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kernels.compiled import FEW_SPILLS, SHARED, Code, Launch, compiled_for, recorded
from triton.runtime.jit import JITFunction

from asyncinfer.kernels import triton

BF16, FP8, INT8, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int32
CAPABILITIES = tuple(SHARED)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
HEADS, KV_HEADS, ROWS = 32, 8, 3
#: Of a multiprocessor, on every target.
REGISTERS = 1 << 16


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def real(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float32)


def kv_format(turn: int) -> torch.dtype:
    """On targets without fp8 an engine refuses such a cache."""
    formats = (BF16, INT8, FP8) if CAPABILITIES[turn] >= 89 else (BF16, INT8)
    return formats[turn % len(formats)]


def cache_of(dtype: torch.dtype, head_dim: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    cache = meta(100, KV_HEADS, 16, head_dim, dtype=dtype)
    scales = real(*cache.shape[:3])
    return cache, {} if dtype is BF16 else {"k_scales": scales, "v_scales": scales}


def norms_and_gates(turn: int) -> None:
    x, weight, plus_one = meta(ROWS, 4096), meta(4096), turn % 2 == 1
    triton.rms_norm(x, weight, 1e-6, plus_one=plus_one)
    triton.add_rms_norm(x, x, weight, 1e-6, plus_one=plus_one)
    gate = (triton.silu_mul, triton.gelu_mul)[turn % 2]
    gate(meta(ROWS, 28672))


def rotations_and_writes(turn: int) -> None:
    head_dim = HEAD_DIMS[turn]
    cache, scales = cache_of(kv_format(turn), head_dim)
    qkv, norm = meta(ROWS, HEADS + 2 * KV_HEADS, head_dim), meta(head_dim)
    angles, slots = real(ROWS, 1, head_dim), meta(ROWS, dtype=torch.int64)
    triton.rope_kv_write(qkv, angles, angles, cache, cache, slots, q_norm=norm, **scales)
    triton.kv_write(qkv[:, :8], qkv[:, 8:16], cache, cache, slots, **scales)
    triton.rope(qkv, angles, angles)


def attention(decode_rows: int, turn: int) -> None:
    # Such a kernel takes a second or two, so one for each target.
    at = turn if decode_rows else turn + 1
    head_dim = HEAD_DIMS[at % len(HEAD_DIMS)]
    cache, scales = cache_of(kv_format((at + turn) % 6) if turn > 1 else BF16, head_dim)
    triton.paged_attention(
        *(meta(64, HEADS, head_dim), cache, cache, meta(32, 20, dtype=INT32)),
        *(meta(32, dtype=INT32), meta(33, dtype=INT32), 0.1),
        decode_rows=decode_rows,
        **scales,
    )


#: A weight and what goes with it, `[outputs, inputs]`, in each format.
WEIGHTS: tuple[Callable[[tuple[int, ...], int], dict[str, Any]], ...] = (
    lambda shape, inputs: {"weight": meta(*shape, inputs)},
    lambda shape, inputs: {
        "weight": meta(*shape, inputs, dtype=INT8),
        "scales": real(*shape, 1),
        "code": "int8",
    },
    lambda shape, inputs: {
        "weight": meta(*shape, inputs // 2, dtype=torch.uint8),
        "scales": meta(*shape, inputs // 32),
        "offsets": meta(*shape, inputs // 32),
        "code": "int4",
    },
    lambda shape, inputs: {
        "weight": meta(*shape, inputs // 2, dtype=torch.uint8),
        "scales": meta(*shape, inputs // 32, dtype=torch.float8_e8m0fnu),
        "code": "e2m1",
    },
    lambda shape, inputs: {
        "weight": meta(*shape, inputs, dtype=INT8),
        "scales": real(*shape, inputs // 128),
        "code": "e4m3",
    },
    lambda shape, inputs: {
        "weight": meta(*shape, inputs // 2, dtype=torch.uint8),
        "scales": meta(*shape, inputs // 32, dtype=torch.float16),
        "code": "iq4",
    },
)


def products(turn: int) -> None:
    """As many tokens as each kernel takes at most, a norm before the product or a gate after it."""
    formats = len(WEIGHTS)
    few, many = WEIGHTS[turn % formats], WEIGHTS[(turn + 1) % formats]
    tokens = 4 if few is WEIGHTS[0] else 2
    triton.linear_small(meta(tokens, 4096), **few((4096,), 4096), norm=meta(4096))
    options = many((28672,), 4096)
    triton.linear_small(meta(64, 4096), **options, activation="silu")


def experts(turn: int) -> None:
    formats = len(WEIGHTS)
    ends = meta(32, dtype=INT32)
    for rows, at in ((8, turn + 2), (2048, turn + 3)):
        triton.grouped_linear(
            meta(rows, 2048), ends=ends, **WEIGHTS[at % formats]((32, 1536), 2048)
        )


def adapters(turn: int) -> None:
    for rows in (16, 2048):
        triton.lora_add(
            *(meta(rows, 6144), meta(rows, 4096), meta(16, 3 * 64, 4096), meta(16, 64, 6144)),
            *(meta(16, dtype=INT32), meta(rows, dtype=INT32)),
            sizes=(4096, 1024, 1024),
        )


def draws(turn: int) -> None:
    logits = meta(ROWS, 151_936, dtype=(torch.float32, BF16)[turn % 2])
    keys = (meta(ROWS, dtype=torch.int64), meta(ROWS, dtype=torch.int64), real(ROWS))
    filters = {"top_k": meta(ROWS, dtype=INT32), "top_p": real(ROWS), "min_p": real(ROWS)}
    triton.sample(logits, *keys, **filters)


def recorded_steps(turn: int) -> None:
    state = meta(257, 2, 8193, dtype=INT32), meta(257, 9, dtype=INT32)
    history = meta(257, 131_073, dtype=INT32)
    triton.decode_inputs(meta(ROWS, dtype=INT32), meta(257, dtype=INT32), *state, history, 16)
    places = meta(ROWS, dtype=torch.int64)
    results = meta(4, 2, 256, dtype=INT32)
    triton.keep_draws(
        places, real(ROWS), places, history.view(-1), results, meta(1, dtype=torch.int64)
    )


GROUPS: dict[str, Callable[[int], None]] = {
    "norms and gates": norms_and_gates,
    "rotations and writes": rotations_and_writes,
    "decode attention": partial(attention, 32),
    "prefill attention": partial(attention, 0),
    "products": products,
    "experts": experts,
    "adapters": adapters,
    "draws": draws,
    "recorded steps": recorded_steps,
}


def launches(group: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    for module in ("prefill_attention", "decode_attention"):
        name = f"asyncinfer.kernels.triton.{module}.device_shared"
        monkeypatch.setattr(name, lambda _: SHARED[capability])
    with recorded() as found:
        GROUPS[group](CAPABILITIES.index(capability))
    return found


def compiled(group: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Of a group's launches those that are compiled for a target. Of a kernel that is launched as
    several codes, one after the other, each target has one: the others differ by a branch."""
    codes: dict[str, list[Launch]] = {}
    for launch in launches(group, capability, monkeypatch):
        known = codes.setdefault(launch.name, [])
        if all(compiled_for(launch) != compiled_for(each) for each in known):
            known.append(launch)
    # Dtypes change with every target.
    turn = CAPABILITIES.index(capability) // 2
    return [each[turn % len(each)] for each in codes.values()]


def check(launch: Launch, code: Code) -> None:
    told = f"{launch.name}: {code.registers} registers, {code.shared} B, spills {code.spills} B"
    print(told)
    assert code.fits, told
    assert code.spills <= FEW_SPILLS, told
    # A program that takes more registers than there are is never launched.
    assert 32 * launch.options["num_warps"] * code.registers <= REGISTERS, told


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("group", GROUPS)
def test_kernels_fit(group: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for launch in compiled(group, capability, monkeypatch):
        check(launch, launch.compile(capability))


def launched_kernels() -> set[str]:
    """The jitted functions that the package's wrappers launch: `name[grid](...)` in their code."""
    found = set()
    for name, module in sys.modules.items():
        if not f"{name}.".startswith(f"{triton.__name__}.") or module.__file__ is None:
            continue
        with open(module.__file__, encoding="utf-8") as file:
            told = set(re.findall(r"^\s+(\w+)\[", file.read(), re.MULTILINE))
        found |= {each for each in told if isinstance(vars(module).get(each), JITFunction)}
    return found


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_kernel_is_left_out(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {launch.name for group in GROUPS for launch in compiled(group, capability, monkeypatch)}
    assert names == launched_kernels()
    assert len(names) > 15


def test_formats_and_head_dimensions_all_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which target compiles which is a rotation, and it has to reach everything."""
    seen: set[tuple[Any, ...]] = set()
    for capability in CAPABILITIES:
        for group in GROUPS:
            for launch in compiled(group, capability, monkeypatch):
                if launch.name == "tally":
                    held = launch.arguments["logits"]
                    seen.add((launch.name, held.dtype, launch.arguments["FIRST"]))
                for name in ("k_cache", "weight"):
                    if name in launch.arguments:
                        held = launch.arguments[name]
                        code = launch.arguments.get("CODE")
                        seen.add((launch.name, held.dtype, code))
                if "HEAD_DIM" in launch.arguments:
                    seen.add((launch.name, launch.arguments["HEAD_DIM"]))
    for name in ("_decode_attention", "_prefill_attention", "_rope_kv_write", "_kv_write"):
        assert {(name, dtype, None) for dtype in (BF16, INT8, FP8)} <= seen
        assert {(name, head_dim) for head_dim in HEAD_DIMS} <= seen
    for first in (True, False):
        assert {("tally", dtype, first) for dtype in (torch.float32, BF16)} <= seen
    packed = [(torch.uint8, code) for code in ("int4", "e2m1", "iq4")]
    bytewise = [(INT8, code) for code in ("int8", "e4m3")]
    for name in ("gemv", "skinny_gemm", "grouped_gemv", "grouped_gemm"):
        assert {(name, *held) for held in [(BF16, None), *bytewise, *packed]} <= seen


def test_code_that_does_not_fit_is_found() -> None:
    with recorded() as found:
        norms_and_gates(0)
    launch = found[0]

    def code(**changed: int) -> Code:
        figures = {"registers": 32, "spills": 0, "shared": 0} | changed
        return Code(86, "", b"", **figures)

    check(launch, code())
    for changed in ({"registers": 512}, {"spills": FEW_SPILLS + 4}, {"shared": SHARED[86] + 1}):
        with pytest.raises(AssertionError, match="rms_norm: "):
            check(launch, code(**changed))
