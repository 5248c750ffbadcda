"""Paged attention's kernels as machine code for GPUs that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels.compiled import FEW_SPILLS, SHARED, Launch, compiled_for, recorded

from asyncinfer.kernels import triton
from asyncinfer.kernels.triton import attention_tiling

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
EVERYTHING: dict[str, Any] = {"window": 1024, "softcap": 50.0, "sinks": True}
#: What to compile for.
DECODE: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "128": ({}, (80, 90)),
    "256": ({"head_dim": 256}, (80,)),
    "everything": (EVERYTHING, (90,)),
    "fp8": ({"cache_dtype": FP8}, (90,)),
    "int8": ({"cache_dtype": INT8}, (80,)),
    "verify 64": ({"max_query_len": 8, "group": 8}, (90,)),
}
#: What to compile for, and the registers a thread took there with Triton 3.7 (3.6 takes up to a
#: quarter more).
PREFILL: dict[str, tuple[dict[str, Any], dict[int, int]]] = {
    "128": ({}, {80: 214, 90: 194}),
    "256": ({"head_dim": 256}, {90: 255}),
    "everything": (EVERYTHING, {90: 194}),
    "fp8": ({"cache_dtype": FP8}, {90: 210}),
    "int8": ({"cache_dtype": INT8}, {80: 255}),
}
SLACK = 1.3
ROWS: dict[str, Any] = {"decode_rows": 32}


def launches(
    *,
    decode_rows: int = 0,
    rows: int = 32,
    tokens: int = 64,
    width: int = 20,
    head_dim: int = 128,
    group: int = 4,
    kv_heads: int = 8,
    block_size: int = 16,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype = BF16,
    sinks: bool = False,
    **options: Any,
) -> list[Launch]:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    cache = empty(100, kv_heads, block_size, head_dim, dtype=cache_dtype)
    scales = empty(*cache.shape[:3], dtype=torch.float32) if cache_dtype is not dtype else None
    with recorded() as found:
        triton.paged_attention(
            empty(tokens, group * kv_heads, head_dim, dtype=dtype),
            cache,
            cache,
            empty(rows, width),
            empty(rows),
            empty(rows + 1),
            0.1,
            sinks=empty(group * kv_heads, dtype=torch.float32) if sinks else None,
            k_scales=scales,
            v_scales=scales,
            decode_rows=decode_rows,
            **options,
        )
    return found


def on_device(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched as on a device of this capability."""
    for module in ("prefill_attention", "decode_attention"):
        name = f"asyncinfer.kernels.triton.{module}.device_shared"
        monkeypatch.setattr(name, lambda _: SHARED[capability])


@pytest.mark.parametrize(
    ("options", "capability"),
    [
        pytest.param(options, capability, id=f"{name}-sm_{capability}")
        for name, (options, capabilities) in DECODE.items()
        for capability in capabilities
    ],
)
def test_decode(options: dict[str, Any], capability: int) -> None:
    (launch,) = launches(decode_rows=32, **options)
    code = launch.compile(capability)
    print(f"registers={code.registers} shared={code.shared}")
    assert code.spills <= FEW_SPILLS
    # Eight warps at least on a multiprocessor: some load while others compute.
    threads = 32 * launch.options["num_warps"]
    blocks = -(-256 // threads)
    assert blocks * threads * code.registers <= 1 << 16
    assert blocks * code.shared <= (163 << 10 if capability == 80 else 227 << 10)
    assert code.count("LDGSTS") > 0
    # wgmma takes 64 rows and more.
    wide = capability == 90 and launch.arguments["M"] == 64
    assert code.count("HGMMA" if wide else "HMMA") > 0
    # What the programs tell each other is ordered: written before, read after.
    (atomic,) = (at for at, name in enumerate(code.sass) if name.startswith("ATOMG"))
    assert any(name.startswith("MEMBAR") for name in code.sass[atomic - 8 : atomic])
    assert "CCTL.IVALL" in code.sass[atomic : atomic + 8]


@pytest.mark.parametrize(
    ("options", "capability", "registers"),
    [
        pytest.param(options, capability, registers, id=f"{name}-sm_{capability}")
        for name, (options, capabilities) in PREFILL.items()
        for capability, registers in capabilities.items()
    ],
)
def test_prefill(
    options: dict[str, Any], capability: int, registers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(capability, monkeypatch)
    (launch,) = launches(**options)
    code = launch.compile(capability)
    print(f"registers={code.registers} shared={code.shared}")
    assert code.spills == 0
    assert code.registers <= registers * SLACK
    assert code.fits
    assert code.count("LDGSTS") > 0
    assert code.count("HGMMA" if capability == 90 else "HMMA") > 0


def test_only_the_last_keys_of_prompts_are_masked() -> None:
    """Of the two loops over tiles the long one compares no positions."""
    (launch,) = launches()
    code = launch.compile(90).ttir
    loops = [loop for loop in code.split("scf.for")[1:] if "tt.dot" in loop]
    masked = ["arith.cmpi sle" in loop.split("scf.yield")[0] for loop in loops]
    assert masked == [False, True]
    # With a window all tiles may be cut.
    (launch,) = launches(**EVERYTHING)
    assert launch.compile(90).ttir.count("tt.dot ") == 2


@pytest.mark.parametrize(
    ("capability", "options"),
    [
        (86, {"head_dim": 256}),
        (86, {"head_dim": 256, "dtype": torch.float32, "cache_dtype": torch.float32}),
        (86, {"head_dim": 256, "dtype": torch.float32, "cache_dtype": torch.float32, **ROWS}),
        (90, {"head_dim": 256, "cache_dtype": FP8}),
        (120, {"head_dim": 256, "cache_dtype": INT8}),
    ],
)
def test_what_has_little_shared_memory_and_what_is_new(
    capability: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(capability, monkeypatch)
    (launch,) = launches(**options)
    code = launch.compile(capability)
    print(f"registers={code.registers} shared={code.shared}")
    assert code.fits
    # float32 is there for exactness.
    assert code.spills <= (32 if options.get("dtype") is torch.float32 else 0)


@pytest.mark.parametrize("decode_rows", [0, 32])
def test_float32_is_exact_and_goes_through_the_tensor_cores(decode_rows: int) -> None:
    (launch,) = launches(decode_rows=decode_rows, dtype=torch.float32, cache_dtype=torch.float32)
    code = launch.compile(90)
    assert code.fits
    # Three products of tf32 for one of float32.
    assert code.count("HMMA.1688.F32.TF32") % 3 == 0
    assert code.count("HMMA.1688.F32.TF32") > 0


def test_one_code_for_every_batch() -> None:
    decode = [
        launches(decode_rows=rows, rows=rows, tokens=rows, width=width, parts=parts, chunk=chunk)
        for rows, width, parts, chunk in [(2, 1, 3, 1), (16, 16, 32, 16), (7, 9, 12, 300)]
    ]
    # One row has code of its own, which looks for none.
    alone = [
        launches(decode_rows=1, rows=1, tokens=tokens, width=width, parts=parts, chunk=chunk)[:1]
        for tokens, width, parts, chunk in [(1, 1, 2, 1), (16, 16, 32, 16), (7, 9, 12, 300)]
    ]
    prefill = [
        launches(rows=rows + decode, decode_rows=decode, tokens=tokens, width=width)[-1:]
        for rows, decode, tokens, width in [(1, 0, 1, 1), (16, 16, 32, 16), (5, 1, 777, 3)]
    ]
    for (first,), *others in (decode, alone, prefill):
        for (other,) in others:
            assert other.kernel is first.kernel
            assert compiled_for(other) == compiled_for(first)


def test_grids() -> None:
    """Every launch has as many programs as shapes say, whatever the device's tensors hold."""
    mixed = launches(decode_rows=20, parts=25)
    assert [launch.grid for launch in mixed] == [(8, 25, 1), (8, 64 * 4 // 128 + 12)]
    assert launches(decode_rows=32, parts=40, group=16, max_query_len=8)[0].grid == (8, 40, 2)
    # By default: what fills the GPU, but no more than the table's capacity gives work to.
    assert launches(decode_rows=2, rows=2, width=1000)[0].grid == (8, 2 + 33, 1)
    assert launches(decode_rows=2, rows=2, width=20)[0].grid == (8, 2 + 2 * 3, 1)
    assert launches(decode_rows=2, rows=2, width=20, chunk=100)[0].grid == (8, 2 + 2 * 4, 1)


def test_fp8_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncinfer.kernels.triton.kv_layout.device_capability", lambda _: 80)
    with pytest.raises(
        ValueError, match=r"fp8 cache needs a GPU of compute capability 8\.9, this one has 8\.0"
    ):
        launches(cache_dtype=FP8)


def test_tilings_do_not_depend_on_the_batch() -> None:
    for head_dim in (64, 80, 96, 128, 256):
        small = attention_tiling.decode_tiling(4, head_dim, BF16, BF16, SHARED[90])
        assert small.m == 16
        assert attention_tiling.prefill_tiling(head_dim, BF16, BF16, SHARED[90]).m == 128
