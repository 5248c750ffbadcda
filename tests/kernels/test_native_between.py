"""Norms, gates, rotations and KV writes in code that LLVM makes, against torch in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from kernels.hosts import host_with_lanes

from asyncinfer.kernels import ops, reference
from asyncinfer.kernels.native import between as module
from asyncinfer.kernels.native import row_kernels
from asyncinfer.kernels.native.between import BetweenKernels, between_kernels, is_right
from asyncinfer.kernels.native.between_code import between_code
from asyncinfer.kernels.native.calls import Arena, Recording
from asyncinfer.kernels.native.host import host_of
from asyncinfer.kernels.native.threads import parallel_region

pytestmark = pytest.mark.skipif(between_kernels() is None, reason="no kernel for this machine")

NAN, INF = float("nan"), float("inf")


FLOAT, HALF = torch.float32, torch.bfloat16


def numbers(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def kernels_of(lanes: int, dtype: torch.dtype, *, rounds: bool = True) -> BetweenKernels:
    """For vectors of so many numbers, which one instruction rounds where the processor has it."""
    target, region = host_with_lanes(lanes), parallel_region()
    assert region is not None
    return BetweenKernels(dtype, replace(target, rounds=rounds and target.rounds), region)


def close(found: torch.Tensor | None, right: torch.Tensor) -> None:
    assert found is not None
    off = 2e-6 if found.dtype is FLOAT else 2**-8
    torch.testing.assert_close(found.double(), right, rtol=off, atol=off, equal_nan=True)


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("dtype", "rounds"), [(FLOAT, False), (HALF, False), (HALF, True)], ids=str
)
def test_functions_are_torchs(lanes: int, rows: int, dtype: torch.dtype, rounds: bool) -> None:
    kernels = kernels_of(lanes, dtype, rounds=rounds)
    some = partial(numbers, dtype=dtype)
    for size in (lanes, 48, 576):
        x, weight, eps = some(rows, size), some(size), 1e-5
        right = reference.rms_norm(x.double(), weight.double(), eps)
        close(kernels.rms_norm(x, weight, eps), right)
        # The heads of a token, of which each has a norm.
        close(kernels.rms_norm(x[None], weight, eps), right[None])
        gates = 5 * some(rows, 2 * size)
        close(kernels.silu_mul(gates), reference.silu_mul(gates.double()))
    for half in (lanes, 32):
        cos, sin = numbers(rows, 1, 2 * half), numbers(rows, 1, 2 * half).neg()
        # Values lie behind the heads that are rotated.
        heads = some(rows, 7, 2 * half)[:, :4]
        close(kernels.rope(heads, cos, sin), reference.rope(heads.double(), cos, sin).double())
        assert torch.equal(kernels.widen(heads), heads.float())
        floats = numbers(rows, 4, 2 * half)
        assert torch.equal(kernels.narrow(floats), floats.to(dtype))
        assert kernels.narrow(heads[:, ::2]) is kernels.widen(heads.mT) is None


def test_sizes_of_all_kinds_and_numbers_that_are_none() -> None:
    kernels = between_kernels()
    assert kernels is not None
    gates = torch.tensor([[-INF, -1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 88.0] * 2])
    gates = torch.cat((gates, gates.neg(), torch.ones(1, 32)), dim=1)
    gates[0, 1] = NAN
    close(kernels.silu_mul(gates), reference.silu_mul(gates.double()))
    rows = torch.stack((torch.zeros(32), 1e12 * numbers(32), 1e-12 * numbers(32), numbers(32)))
    rows[3, 9] = NAN
    found = kernels.rms_norm(rows, torch.ones(32), 1e-6)
    close(found, reference.rms_norm(rows.double(), torch.ones(32).double(), 1e-6))
    assert found is not None
    assert not found[:3].isnan().any()


def test_other_rows_do_not_change_a_bit() -> None:
    x, weight, gates = numbers(9, 64), numbers(64), numbers(9, 128)
    assert torch.equal(
        ops.rms_norm(x, weight, 1e-5),
        torch.cat([ops.rms_norm(row[None], weight, 1e-5) for row in x]),
    )
    assert torch.equal(ops.silu_mul(gates), torch.cat([ops.silu_mul(row[None]) for row in gates]))


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = numbers(4, 64), numbers(64)
    assert module.rms_norm(x, weight, 1e-5) is not None
    assert module.rms_norm(x, weight, 1e-5, plus_one=True) is None
    left = (
        *(x[:, :60], x.half(), x[:, ::2], x[:0], x.to("meta")),
        *(x.clone().requires_grad_(), torch.nn.Parameter(x)),
    )
    for each in left:
        ones = torch.ones(each.shape[-1], dtype=each.dtype)
        assert module.rms_norm(each, ones, 1e-5) is None
        assert module.silu_mul(each) is None
        heads = each.unsqueeze(1)
        cos = torch.ones(len(each), 1, each.shape[-1])
        assert module.rope(heads, cos, cos) is None
    assert module.rms_norm(x, torch.nn.Parameter(weight), 1e-5) is None
    # Not the heads of one token after the other.
    heads = numbers(8, 4, 64)
    cos = numbers(8, 1, 64)
    assert module.rope(heads, cos, cos) is not None
    assert module.rope(heads[:, ::2], cos, cos) is None
    monkeypatch.setattr(module, "host", lambda: None)
    assert between_kernels() is None


def all_of(rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each function gives for so many rows."""
    turned, some = numbers(rows, 1, 32), partial(numbers, dtype=dtype)
    x, heads = some(rows, 64), some(rows, 6, 32)[:, 1:5]
    pages, written = torch.zeros(4 * rows, 32, dtype=dtype), some(rows, 4, 32)
    slots = torch.randperm(4 * rows, generator=torch.Generator().manual_seed(rows))
    assert module.kv_write(pages, written, slots)
    norms = module.rms_norm(x, some(64), 1e-5), module.head_norm(heads, some(4, 32), 1e-5)
    found = [*norms, module.silu_mul(some(rows, 128)), module.rope(heads, turned, turned)]
    tensors = [each for each in found if each is not None]
    assert len(tensors) == len(found)
    changed = module.widened(heads), module.narrowed(numbers(rows, 64), dtype)
    return [pages, *tensors, *changed, module.add_(some(rows, 64), some(64))]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 2, 41])
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_threads_share_the_rows(
    monkeypatch: pytest.MonkeyPatch, rows: int, threads: int, dtype: torch.dtype
) -> None:
    right = all_of(rows, dtype)
    monkeypatch.setattr(row_kernels, "_ALONE", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert all(torch.equal(a, b) for a, b in zip(all_of(rows, dtype), right, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_a_recording_of_many_rows_takes_the_threads_of_its_replay(
    monkeypatch: pytest.MonkeyPatch, threads: int, dtype: torch.dtype
) -> None:
    x, weight = numbers(41, 64, dtype=dtype), numbers(64, dtype=dtype)
    assert between_kernels(dtype) is not None
    recording = Recording(Arena(), 2)
    monkeypatch.setattr(row_kernels, "_ALONE", 0)
    with recording.begun():
        found = module.rms_norm(x, weight, 1e-5)
    assert found is not None
    calls = recording.made()
    for _ in range(2):
        x.mul_(-2)
        calls.replay(threads, 1)
        assert torch.equal(found, ops.rms_norm(x, weight, 1e-5))


def test_code_for_arm_is_what_llvm_reads() -> None:
    from llvmlite import binding

    target = host_of("aarch64", {"neon": True})
    assert target is not None
    for dtype in ("float32", "bfloat16"):
        binding.parse_assembly(between_code(dtype, target.lanes, rounds=False)).verify()


@pytest.mark.parametrize("name", ["rms_norm", "silu_mul", "rope", "kv_write"])
def test_a_kernel_that_is_wrong_is_not_used(name: str) -> None:
    kernels = between_kernels()
    assert kernels is not None
    assert is_right(kernels, FLOAT)

    class Wrong(BetweenKernels):
        def __init__(self) -> None:
            pass

        def __getattribute__(self, asked: str) -> object:
            function = getattr(kernels, asked)
            return (
                (lambda x, *more: function(1.01 * x + 0.01, *more)) if asked == name else function
            )

    assert not is_right(Wrong(), FLOAT)


def test_heads_are_written_where_slots_say() -> None:
    pages, slots = torch.zeros(6, 4, 32), torch.tensor([23, 0, 5, 9, 11, 12])
    heads = numbers(3, 6, 32)[:, 2:4]
    assert module.kv_write(pages, heads, slots)
    right = torch.zeros(24, 32).index_copy(0, slots, heads.flatten(0, 1))
    assert torch.equal(pages.view(24, 32), right)
    for other in (heads.half(), heads.bfloat16(), heads[:, ::2], heads[..., :20], heads.to("meta")):
        assert not module.kv_write(pages, other, slots)
    assert not module.kv_write(pages.bfloat16(), heads, slots)
    assert not module.kv_write(pages.mT, heads, slots)
    assert torch.equal(pages.view(24, 32), right)
