"""Products with packed weights in code that LLVM makes, against torch in float64."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from kernels.hosts import host_without

from asyncinfer.kernels.block_types import BLOCK_TYPES, block_floats
from asyncinfer.kernels.codes import TABLES
from asyncinfer.kernels.native import packed as module
from asyncinfer.kernels.native import packed_kernel
from asyncinfer.kernels.native.host import host, host_of
from asyncinfer.kernels.native.packed import PackedKernel
from asyncinfer.kernels.native.packed_blocks import Layout
from asyncinfer.kernels.native.packed_code import packed_code
from asyncinfer.kernels.native.threads import ThreadChoice, parallel_region
from asyncinfer.quantization import PackedRows, QuantisedWeight, make_linear

SEED = 20261123
FOUR = Layout("int4", 32, halves=True, offset=True)
EIGHT = Layout("int8", 32, halves=False, offset=True)
NF4 = Layout("nf4", 32, halves=True, offset=False)
E4M3 = Layout("e4m3", 32, halves=False, offset=False)
Q5_0, Q6_K, XS = Layout("q5_0", 32), Layout("q6_k", 256), Layout("iq4_xs", 256)

pytestmark = pytest.mark.skipif(packed_kernel(FOUR) is None, reason="no kernel for this machine")


def blocks_of(layout: Layout, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks `[outputs, groups, block]`, and their weight in float64."""
    generator = torch.Generator().manual_seed(SEED + outputs + inputs)
    groups = inputs // layout.group
    if layout.kind is not None:
        shape = outputs * groups, layout.block
        # With the highest bit but one of each byte off, no scale is infinite.
        blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) & 0xBF
        floats = block_floats(blocks, layout.code).double()
        return blocks.view(outputs, groups, -1), floats.view(outputs, inputs)
    numbers = torch.randint(
        0, 256, (outputs, groups, layout.numbers), generator=generator, dtype=torch.uint8
    )
    kind = torch.float16 if layout.halves else torch.float32
    ends = torch.randn(outputs, groups, 1 + layout.offset, generator=generator).to(kind)
    if layout.code == "int8":
        wide = numbers.view(torch.int8).double()
    elif layout.code == "e4m3":
        # All numbers but NaN, small ones with fewer bits among them.
        numbers[(numbers & 127) == 127] = 3
        wide = numbers.view(torch.float8_e4m3fn).double()
    else:
        values = torch.tensor(TABLES[layout.code], dtype=torch.float64)
        wide = values[torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2).int()]
    blocks = torch.cat((numbers, ends.view(torch.uint8)), dim=-1)
    weight = wide * ends[..., :1].double()
    if layout.offset:
        weight += ends[..., 1:].double()
    return blocks, weight.flatten(1)


def check(kernel: PackedKernel, layout: Layout, rows: int, outputs: int, groups: int) -> None:
    blocks, weight = blocks_of(layout, outputs, groups * layout.group)
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(SEED))
    expected = 0.5 * x.double() @ weight.T
    found = kernel(x, blocks, 0.5)
    assert found.dtype is torch.float32
    assert found.shape == (rows, outputs)
    # Each of two roundings a number, relative to the sum of sizes.
    bound = 1e-6 * (x.double().abs() @ weight.abs().T).amax()
    assert (found.double() - expected).abs().amax() <= bound
    floats, halves = kernel.floats(blocks), kernel.floats(blocks, torch.bfloat16)
    torch.testing.assert_close(floats.double(), weight, rtol=1e-6, atol=1e-6)
    # Rounded once, as torch rounds, but that an instruction has no numbers below normal ones.
    torch.testing.assert_close(halves, floats.bfloat16(), rtol=0.0, atol=2.0**-126)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-3)


LAYOUTS = [
    *(replace(FOUR, group=group) for group in (32, 128, 16, 8)),
    *(replace(EIGHT, group=group) for group in (16, 32, 200)),
    replace(EIGHT, group=576, offset=False),
    replace(EIGHT, halves=True, offset=False),
    NF4,
    replace(NF4, code="e2m1", group=16, halves=False),
    replace(NF4, code="iq4", group=8),
    E4M3,
    replace(E4M3, group=128),
    *(Layout(name, kind.numbers) for name, kind in BLOCK_TYPES.items()),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_product_is_that_in_float64(layout: Layout) -> None:
    kernel = packed_kernel(layout)
    assert kernel is not None
    for rows in (1, 2, 3, 4, 5, 8, 17):
        check(kernel, layout, rows, outputs=23, groups=3)
    check(kernel, layout, 2, outputs=1, groups=1)


@pytest.mark.parametrize("layout", [EIGHT, E4M3], ids=str)
def test_rows_of_one_group_share_a_kernel(layout: Layout) -> None:
    kernel = packed_kernel(replace(layout, group=48), 1)
    assert kernel is not None
    assert packed_kernel(replace(layout, group=4096), 1) is kernel
    for inputs in (16, 48, 208):
        for rows in (1, 4, 9):
            check(kernel, replace(layout, group=inputs), rows, outputs=23, groups=1)


def test_parts_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CACHED", 1)
    check(packed_kernel(FOUR), FOUR, 41, outputs=30, groups=2)  # type: ignore[arg-type]


#: Only tables of 4 bits are spread out, and only halves are rounded.
LACKING = [
    (NF4, "avx512vbmi"),
    (FOUR, "avx512bf16"),
    *((layout, "avx512") for layout in (FOUR, EIGHT, NF4, E4M3, Q5_0, Q6_K, XS)),
]


@pytest.mark.parametrize(("layout", "lacking"), LACKING, ids=str)
def test_other_instructions(layout: Layout, lacking: str) -> None:
    here = host()
    assert here is not None
    if not here.tables:
        pytest.skip("a processor without AVX-512")
    kernel = PackedKernel(layout, host_without(lacking), parallel_region())
    for rows in (1, 3, 4, 10):
        check(kernel, layout, rows, outputs=23, groups=3)


def test_code_for_arm_is_what_llvm_reads() -> None:
    from llvmlite import binding

    target = host_of("aarch64", {"neon": True})
    assert target is not None
    for layout in (FOUR, E4M3, Q5_0, Q6_K):
        binding.parse_assembly(packed_code(layout, target)).verify()
    for layout, code in ((NF4, "nf4"), (XS, "iq4")):
        with pytest.raises(RuntimeError, match=f"looks up {code}"):
            packed_code(layout, target)


def test_processors_without_a_kernel() -> None:
    assert host_of("x86_64", {"sse2": True}) is None
    assert host_of("riscv64", {}) is None


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_neither_threads_nor_other_rows_change_a_bit(rows: int) -> None:
    kernel = packed_kernel(FOUR)
    assert kernel is not None
    blocks, weight = blocks_of(FOUR, 515, 160)
    x = torch.randn(rows, weight.shape[1])
    with torch_threads(1):
        alone = torch.cat([kernel(row[None], blocks, 1.0) for row in x])
    for threads in (1, 2, 5):
        with torch_threads(threads):
            assert torch.equal(kernel(x, blocks, 1.0), alone)


def test_several_threads_at_once() -> None:
    kernel = packed_kernel(FOUR)
    assert kernel is not None
    blocks, weight = blocks_of(FOUR, 515, 160)
    xs = [torch.randn(9, weight.shape[1]) for _ in range(3)]
    expected = [kernel(x, blocks, 1.0) for x in xs]
    right: list[bool] = []

    def run(index: int) -> None:
        right.extend(
            torch.equal(kernel(xs[index], blocks, 1.0), expected[index]) for _ in range(10)
        )

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 30


def test_numbers_that_are_none_stay_in_their_row() -> None:
    kernel = packed_kernel(FOUR)
    assert kernel is not None
    blocks, weight = blocks_of(FOUR, 12, 64)
    x = torch.randn(6, 64)
    x[2, 5], x[4, 7] = float("inf"), float("nan")
    found = kernel(x, blocks, 1.0)
    assert not found[2].isfinite().any()
    assert found[4].isnan().all()
    fine = [0, 1, 3, 5]
    close(found[fine], x[fine].double() @ weight.T)


def test_inputs_that_are_a_view() -> None:
    kernel = packed_kernel(FOUR)
    assert kernel is not None
    blocks, weight = blocks_of(FOUR, 12, 64)
    wide = torch.randn(5, 131)
    # Neither contiguous nor at an address of whole vectors.
    for x in (wide[:, 3:67], wide[:, :128:2], wide.flatten()[1:65][None], wide[:0, :64]):
        close(kernel(x, blocks, 1.0), x.double() @ weight.T)


def some_weight() -> QuantisedWeight:
    torch.manual_seed(SEED)
    numbers = torch.randint(0, 256, (20, 48), dtype=torch.uint8)
    return QuantisedWeight(numbers, torch.rand(20, 3).half(), torch.rand(20, 3), torch.float32)


def test_a_layer_computes_the_same_without_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = some_weight(), torch.randn(7, 96)
    assert PackedRows(weight).has_kernel
    expected = make_linear(weight)(x)
    monkeypatch.setattr(module, "host", lambda: None)
    assert not PackedRows(weight).has_kernel
    torch.testing.assert_close(make_linear(weight)(x), expected, rtol=1e-5, atol=1e-5)


def test_no_llvm_is_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncinfer.kernels.native import host as host_module

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(host_module, "_llvm", lambda: missing("llvmlite"))
    assert host_module.host.__wrapped__() is None


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackedKernel.__call__

    def wrong(
        self: PackedKernel, x: torch.Tensor, blocks: torch.Tensor, factor: float
    ) -> torch.Tensor:
        return right(self, x, blocks, 1.01 * factor)

    monkeypatch.setattr(PackedKernel, "__call__", wrong)
    target, region = host(), parallel_region()
    assert target is not None
    assert region is not None
    assert module.trusted_kernel.__wrapped__(FOUR, target, region) is None


def spent(choice: ThreadChoice, calls: int, alone: float, shared: float, now: float) -> float:
    """The time after so many calls that take this long alone and on all threads."""
    for _ in range(calls):
        several = choice.shares(now)
        began, now = now, now + (shared if several else alone)
        choice.took(several, began, now)
    return now


def test_threads_are_used_while_they_are_faster() -> None:
    choice = ThreadChoice()
    now = spent(choice, 10_000, alone=2e-4, shared=1e-4, now=0.0)
    assert now <= 1.01 * 10_000 * 1e-4
    # Another program takes a core: regions wait for it.
    later = spent(choice, 10_000, alone=2e-4, shared=1e-2, now=now)
    assert later - now <= 1.10 * 10_000 * 2e-4
    # It has gone: all threads again within a second.
    later = spent(choice, 4_000, alone=2e-4, shared=1e-4, now=later)
    now = spent(choice, 10_000, alone=2e-4, shared=1e-4, now=later)
    assert now - later <= 1.01 * 10_000 * 1e-4


def test_one_slow_call_does_not_cost_the_threads() -> None:
    choice = ThreadChoice()
    now = spent(choice, 1_000, alone=2e-4, shared=1e-4, now=0.0)
    choice.took(choice.shares(now), now, now + 0.05)
    later = spent(choice, 10_000, alone=2e-4, shared=1e-4, now=now + 0.05)
    assert later - now - 0.05 <= 1.02 * 10_000 * 1e-4
