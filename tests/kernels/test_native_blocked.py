"""Products with weights in oneDNN's layout in code that LLVM makes, against torch in float64."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernels.emulated_bfloat16 import compiled_or_emulated, emulate_bfloat16
from kernels.hosts import assembly_for_units, host_with_lanes

from asyncinfer.kernels import onednn
from asyncinfer.kernels.native import (
    BLOCK_OUTPUTS,
    BlockedWeight,
    blocked,
    in_blocks,
    own_blocks,
    read_own_blocks,
)
from asyncinfer.kernels.native.blocked import BlockedKernel, blocked_kernel
from asyncinfer.kernels.native.blocked_code import FIELDS, blocked_code, turns_of
from asyncinfer.kernels.native.blocked_tiles_code import Method
from asyncinfer.kernels.native.host import Host, compiled, host
from asyncinfer.kernels.native.team_code import CLAIMED, FREE, READY, STORING, team_code
from asyncinfer.kernels.native.threads import parallel_region

pytestmark = pytest.mark.skipif(
    blocked_kernel(torch.float32, 64, 64) is None or not onednn.available(torch.float32),
    reason="no kernel for this machine",
)

#: Outputs and inputs: one block and several, and inputs that fill no block of oneDNN's.
SHAPES = [(64, 16), (256, 80), (128, 36), (320, 512), (64, 288)]
#: Of one tile, of several, of more than a thread takes at a time.
ROWS = (1, 2, 3, 4, 5, 6, 7, 16, 17, 32, 60, 96, 101, 300)


def needs_layout(dtype: torch.dtype) -> None:
    """Skip a test where oneDNN does not lay out weights of this dtype as native code reads them."""
    # oneDNN lays bfloat16 out in another way for AVX-512 without its instructions for bfloat16.
    if not onednn.available(dtype) or onednn._block_outputs(dtype) is None:
        pytest.skip(f"a processor without {dtype}")


def needs_matrix_units() -> None:
    """Skip a test where no matrix units multiply what oneDNN has laid out."""
    if not blocked.matrix_units():
        pytest.skip("a processor without matrix units")
    # They are there, but oneDNN can be kept from using them.
    needs_layout(torch.bfloat16)


def laid_out(
    shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, BlockedWeight]:
    """A weight, the same as native code reads it, which has to be kept, and what does: in oneDNN's
    layout where it has one, else in blocks of our own."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).to(dtype)
    if not onednn.available(dtype) or onednn._block_outputs(dtype) is None:
        blocks = in_blocks(weight).view(torch.uint8).flatten()
        own = read_own_blocks(blocks, shape, dtype)
        assert own is not None
        return weight, blocks, own
    reordered = onednn.reorder(weight)
    found = onednn.blocked(reordered, shape)
    assert found is not None
    return weight, reordered, found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, _kept, found = laid_out(shape, dtype)
    for rows in ROWS:
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        y, right = found(x), x.double() @ weight.double().T
        assert y.dtype is dtype
        bound = 3e-6 if dtype is torch.float32 else 1e-2
        assert (y.double() - right).abs().amax() <= bound * right.abs().amax()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_neither_threads_nor_other_rows_change_a_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(blocked, "_SHARED", 0)
    _, _kept, found = laid_out((320, 512), dtype)
    x = torch.randn(ROWS[-1], 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([found(row[None]) for row in x])
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for _ in range(5):
                assert torch.equal(found(x), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inputs_that_are_a_view(dtype: torch.dtype) -> None:
    _, _kept, found = laid_out((64, 16), dtype)
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).to(dtype)[:, 7:23]
    assert torch.equal(found(x), found(x.clone()))


@pytest.mark.parametrize("outputs", BLOCK_OUTPUTS)
@pytest.mark.parametrize(
    ("method", "inputs"),
    [*itertools.product(("widened", "pairs"), (512, 84)), ("units", 512)],
)
def test_every_method_of_products_of_bfloat16(
    monkeypatch: pytest.MonkeyPatch, method: Method, inputs: int, outputs: int
) -> None:
    emulate_bfloat16(monkeypatch)
    here = host()
    assert here is not None
    compare_products(here, method, inputs, outputs)


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("inputs", [512, 84])
def test_widened_numbers_without_instructions_for_bfloat16(lanes: int, inputs: int) -> None:
    compare_products(replace(host_with_lanes(lanes), rounds=False), "widened", inputs, 64)


def compare_products(here: Host, method: Method, inputs: int, outputs: int) -> None:
    """Compare products of bfloat16 numbers with those of float64, and rows by themselves with rows
    among others."""
    region = parallel_region()
    assert region is not None
    weight = torch.randn(320, inputs, generator=torch.Generator().manual_seed(2)).bfloat16()
    laid = in_blocks(weight, outputs)
    place = laid.data_ptr()
    kernel = BlockedKernel(torch.bfloat16, outputs, here, region, method)
    assert laid.nbytes == 320 // outputs * kernel.block_bytes(inputs)

    def product(x: torch.Tensor) -> torch.Tensor:
        return kernel(x, place, 320, inputs, kernel.block_bytes(inputs), most_rows=1 << 62)

    x = torch.randn(101, inputs, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, right = product(x), x.double() @ weight.double().T
    assert found.dtype is torch.bfloat16
    assert (found.double() - right).abs().amax() <= 1e-2 * right.abs().amax()
    assert torch.equal(found[::10], torch.cat([product(row[None]) for row in x[::10]]))
    if method == "widened":
        # Sums of products that are not rounded, in the same order.
        laid, alike = (
            in_blocks(weight.float(), outputs),
            BlockedKernel(torch.float32, outputs, here, region, "floats"),
        )
        sizes = 320, inputs, alike.block_bytes(inputs)
        sums = alike(x.float(), laid.data_ptr(), *sizes, most_rows=1 << 62)
        assert torch.equal(found, sums.bfloat16())


def test_what_is_read_of_x_ends_where_it_does() -> None:
    """Its last row ends at the end of a page, behind which there is no memory."""
    here, region = host(), parallel_region()
    assert here is not None
    assert region is not None
    weight = torch.randn(64, 20, generator=torch.Generator().manual_seed(2)).bfloat16()
    laid = in_blocks(weight, 64)
    kernel = BlockedKernel(torch.bfloat16, 64, here, region, "widened")
    with memory_before_a_gap() as page:
        x = torch.frombuffer(page, dtype=torch.bfloat16)[-3 * 20 :].view(3, 20)
        x.copy_(torch.randn(3, 20, generator=torch.Generator().manual_seed(1)))
        found = kernel(x, laid.data_ptr(), 64, 20, kernel.block_bytes(20), most_rows=1 << 62)
        right = x.double() @ weight.double().T
        assert (found.double() - right).abs().amax() <= 1e-2 * right.abs().amax()


@pytest.mark.parametrize("inputs", [16, 512, 1280, 4096])
@pytest.mark.parametrize("cache", [0, 2 << 20])
@pytest.mark.parametrize("method", ["floats", "widened", "units"])
def test_turns_of_as_many_rows_as_a_cache_holds(method: Method, cache: int, inputs: int) -> None:
    turns = turns_of(method, 8, cache)
    number = 4 if method == "floats" else 2
    for rows in (1, 96, 97, 252, 257, 300, 1024):
        longest = -(-rows // turns.count(rows, inputs))
        assert longest <= turns.most
        fits = longest * number * inputs <= 1 << 20
        assert longest <= 96 or (cache and fits)


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize(("inputs", "outputs"), [(512, 64), (84, 128)])
def test_what_is_prefetched_and_kept_in_caches_changes_no_bit(
    inputs: int, outputs: int, lanes: int
) -> None:
    here, region = host_with_lanes(lanes), parallel_region()
    assert region is not None
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(2))
    laid = in_blocks(weight, 64)
    x = torch.randn(257, inputs, generator=torch.Generator().manual_seed(1))
    found = []
    for cache, reads_ahead in itertools.product((0, 2 << 20), (False, True)):
        target = replace(here, cache_bytes=cache, tiles=reads_ahead)
        kernel = BlockedKernel(torch.float32, 64, target, region, "floats")
        sizes = outputs, inputs, kernel.block_bytes(inputs)
        # Of one tile, of several that share what they prefetch, and of more than share it.
        for rows in (6, 8, 20, 40, 257):
            y = kernel(x[:rows], laid.data_ptr(), *sizes, most_rows=1 << 62)
            found.append(y)
    right = x.double() @ weight.double().T
    torch.testing.assert_close(found[-1].double(), right, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(each, found[-1][: len(each)]) for each in found)


@pytest.mark.parametrize("rows", [1, 6, 8, 16, 20, 40, 96])
@pytest.mark.parametrize("lanes", [8, 16])
def test_tiles_prefetch_the_next_weights_together(lanes: int, rows: int) -> None:
    here, region = host_with_lanes(lanes), parallel_region()
    assert region is not None
    inputs = 512
    fetched: list[int] = []
    record = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int] * 3)(
        lambda place, *_: fetched.append(place)
    )
    symbols = {"GOMP_parallel": region, "recorded": ctypes.cast(record, ctypes.c_void_p).value or 0}

    def text() -> str:
        return blocked_code("float32", lanes, 64).replace("llvm.prefetch.p0", "recorded")

    (address,) = compiled(f"recorded, {lanes}", text, here, ("product_share",), symbols)
    weight, x, y = torch.zeros(inputs, 64), torch.zeros(rows, inputs), torch.zeros(rows, 64)
    begin = weight.data_ptr()
    places = (each.data_ptr() for each in (weight, x, y))
    task = np.array([*places, 64, inputs, weight.nbytes, rows, 1, 0, 0])
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(task.ctypes.data)
    # The first weights of the next block, which is this one, are fetched with the last ones.
    lines = {(place - begin) // 64 for place in fetched}
    assert lines == set(range(weight.nbytes // 64))
    # The last tile may fetch more than its share, and one of narrow vectors fetches a fourth.
    assert len(fetched) <= (2.5 if lanes == 16 else 4) * len(lines)


@contextmanager
def memory_before_a_gap() -> Iterator[memoryview]:
    """A page of memory; a program that reads behind it is ended."""
    both = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    first = (ctypes.c_char * (2 * mmap.PAGESIZE)).from_buffer(both)
    system = ctypes.CDLL(None)
    behind = ctypes.c_void_p(ctypes.addressof(first) + mmap.PAGESIZE)
    assert system.mprotect(behind, mmap.PAGESIZE, 0) == 0
    yield memoryview(both)[: mmap.PAGESIZE]


class Shared:
    """One thread's share of a product with 320 outputs, of five rows more than a thread takes at a
    time, with a state for each part."""

    def __init__(self, method: Method, outputs: int) -> None:
        here, region = host(), parallel_region()
        assert here is not None
        assert region is not None
        self.outputs = outputs
        dtype = torch.float32 if method == "floats" else torch.bfloat16
        weight = torch.randn(320, 512, generator=torch.Generator().manual_seed(2)).to(dtype)
        self._weight = in_blocks(weight, outputs)
        cache = 2 << 20
        turns = turns_of(method, here.lanes, cache)
        rows = turns.most + 5
        # Two turns, which are about as long as each other.
        self.turn = -(-rows // 2 // turns.step) * turns.step
        name = str(dtype).removeprefix("torch.")
        sizes = name, here.lanes, outputs
        text = functools.partial(blocked_code, *sizes, method=method, cache_bytes=cache)
        compile_ = compiled if method == "floats" else compiled_or_emulated
        symbols = {"GOMP_parallel": region}
        what = f"share {sizes}, {method}, {cache}"
        (address,) = compile_(what, text, here, ("product_share",), symbols)
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(rows, 512, generator=generator).to(dtype)
        self.right = (self._x.double() @ weight.double().T).to(dtype)
        self.y = torch.zeros(rows, 320, dtype=dtype)
        assert turns.count(rows, 512) == 2
        self.states = np.full(2 * 320 // outputs, FREE)
        block = 512 * outputs * dtype.itemsize
        places = (each.data_ptr() for each in (self._weight, self._x, self.y))
        self.task = np.array([*places, 320, 512, block, rows, 1, self.states.ctypes.data, 0])

    def run(self) -> None:
        self.call(self.task.ctypes.data)

    def is_right(self) -> torch.Tensor:
        """bool `[parts]`: which parts are in the result."""
        off = 1e-4 if self.y.dtype is torch.float32 else 2e-2
        close = torch.isclose(self.y, self.right, rtol=off, atol=off)
        turns = close.split(self.turn)
        return torch.cat([turn.unflatten(1, (-1, self.outputs)).all(2).all(0) for turn in turns])


@pytest.fixture(params=[("floats", 64), ("units", 64), ("units", 32)], ids=str)
def shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shared:
    method, outputs = request.param
    if method == "units":
        emulate_bfloat16(monkeypatch)
    return Shared(method, outputs)


def test_without_states_one_thread_does_all_parts(shared: Shared) -> None:
    shared.task[FIELDS.index("states")] = 0
    shared.run()
    assert shared.is_right().all()


def test_a_part_that_another_thread_holds_for_long_is_computed_here_too(shared: Shared) -> None:
    # One of the others began these, and is not running. They are the only ones of which this
    # thread cannot know how long they take.
    shared.states[[2, 7, 9]] = CLAIMED
    shared.run()
    assert shared.is_right().all()
    assert (shared.states == READY).all()


def test_parts_that_another_thread_chose_and_did_not_begin_are_computed_here(
    shared: Shared,
) -> None:
    shared.task[-1] = 8
    shared.run()
    assert shared.is_right().all()
    assert (shared.states == READY).all()


def test_a_thread_that_comes_late_stores_nothing(shared: Shared) -> None:
    """By then the memory of the result may be that of another one."""
    shared.states[:] = READY
    shared.run()
    assert not shared.y.any()


def test_a_part_that_is_stored_by_another_thread_is_waited_for(shared: Shared) -> None:
    shared.states[4] = STORING
    with ThreadPoolExecutor() as pool:
        run = pool.submit(shared.run)
        try:
            while (np.delete(shared.states, 4) != READY).any():
                assert not run.done()
                # Emulated units are Python's, which one thread runs at a time.
                time.sleep(0)
            part = slice(shared.turn), slice(4 * shared.outputs, 5 * shared.outputs)
            shared.y[part] = shared.right[part]
            assert not run.done()
        finally:
            # The thread would wait for ever, and the pool for the thread.
            shared.states[4] = READY
        run.result(timeout=60)
    assert shared.is_right().all()


@pytest.mark.parametrize("product", [True, False])
def test_code_for_arm_is_compiled(monkeypatch: pytest.MonkeyPatch, product: bool) -> None:
    """Waiting threads have other instructions there."""
    from llvmlite import binding

    triple = "aarch64-unknown-linux-gnu"
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    monkeypatch.setattr(binding, "get_process_triple", lambda: triple)
    text = blocked_code("float32", 8, 64) if product else team_code()
    machine = binding.Target.from_triple(triple).create_target_machine(opt=2)
    made = machine.emit_assembly(binding.parse_assembly(text))
    assert "yield" in made
    assert ("cntvct_el0" in made.lower()) is product


def test_weights_that_the_kernel_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((65, 16), (64, 18)):
        assert onednn.blocked(onednn.reorder(torch.randn(shape)), shape) is None
    assert BlockedWeight.of(0, 64 * 16 * 4 + 1, (64, 16), torch.float32, 64, 6) is None
    monkeypatch.setattr(blocked, "host", lambda: None)
    assert BlockedWeight.of(0, 64 * 16 * 4, (64, 16), torch.float32, 64, 6) is None


def test_a_layout_that_is_another_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch promises none: a product of each weight is tried."""
    reordered = onednn.reorder(torch.randn(128, 64))
    assert onednn.blocked(reordered, (128, 64)) is not None
    right = BlockedWeight.__call__
    monkeypatch.setattr(BlockedWeight, "__call__", lambda self, x: right(self, x).flip(1))
    assert onednn.blocked(reordered, (128, 64)) is None


def test_code_is_what_llvm_reads() -> None:
    from llvmlite import binding

    for lanes in (8, 16):
        binding.parse_assembly(blocked_code("float32", lanes, 64)).verify()
    for rounds in (False, True):
        text = blocked_code("bfloat16", 8, 64, method="widened", rounds=rounds)
        binding.parse_assembly(text).verify()
    for method, outputs, streams in itertools.product(
        ("widened", "pairs"), (32, 64), (False, True)
    ):
        text = blocked_code("bfloat16", 16, outputs, method=method, streams=streams)
        binding.parse_assembly(text).verify()


@pytest.mark.parametrize("outputs", [32, 64])
def test_code_for_matrix_units_is_compiled(outputs: int) -> None:
    """Its results are compared where the processor has them: see `test_products`."""
    made = assembly_for_units(blocked_code("bfloat16", 16, outputs, method="units"))
    products, stores = made.count("tdpbf16ps"), made.count("tilestored")
    # For half and for all of the rows, 32 outputs at a time.
    assert products == stores == (2 + 4) * outputs // 32
    assert made.count("ldtilecfg") == made.count("tilerelease") == 2


@pytest.mark.parametrize("planned", [1, 16])
def test_matrix_units_read_blocks_of_either_size(planned: int) -> None:
    """oneDNN's depends on how many rows it plans for."""
    needs_matrix_units()
    weight = torch.randn(320, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, planned)
    place, nbytes = onednn.place_of(reordered) or (0, 0)
    x = torch.randn(ROWS[-1], 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    right = x.double() @ weight.double().T
    off = []
    for outputs in BLOCK_OUTPUTS:
        found = BlockedWeight.of(place, nbytes, (320, 512), torch.bfloat16, outputs, 1 << 62)
        assert found is not None
        assert found.method == "units"
        assert torch.equal(found(x), torch.cat([found(row[None]) for row in x]))
        off.append(float((found(x).double() - right).abs().amax() / right.abs().amax()))
    assert min(off) <= 1e-2 < max(off)


@pytest.mark.parametrize(
    ("about", "method"),
    [
        ({}, "widened"),
        ({"fast": True}, "pairs"),
        ({"units": True}, "units"),
        ({"units": True, "inputs": 80}, "widened"),
        ({"rounds": False}, "widened"),
        ({"dtype": torch.float32, "units": True}, "floats"),
    ],
)
def test_the_method_that_is_fastest_is_taken(
    monkeypatch: pytest.MonkeyPatch, about: dict[str, Any], method: Method
) -> None:
    """Matrix units multiply what fills them."""
    here = host()
    assert here is not None
    target = replace(here, lanes=16, rounds=about.get("rounds", True))
    monkeypatch.setattr(blocked, "host", lambda: target)
    monkeypatch.setattr(blocked, "matrix_units", lambda: about.get("units", False))
    monkeypatch.setattr(blocked, "pairs_are_fast", lambda _: about.get("fast", False))
    taken: list[Method] = []
    monkeypatch.setattr(blocked, "_made", lambda *given: taken.append(given[-1]))
    blocked_kernel(about.get("dtype", torch.bfloat16), 32, about.get("inputs", 64))
    assert taken == [method]


def test_matrix_units_that_linux_does_not_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    here = host()
    assert here is not None
    monkeypatch.setattr(blocked, "host", lambda: replace(here, tiles=True, rounds=True))
    granted = iter([-1, 0])
    system = SimpleNamespace(syscall=lambda *_: next(granted))
    monkeypatch.setattr(blocked.ctypes, "CDLL", lambda _: system)
    monkeypatch.setattr(blocked.sys, "platform", "linux")
    assert not blocked.matrix_units.__wrapped__()
    assert blocked.matrix_units.__wrapped__()
    monkeypatch.setattr(blocked, "host", lambda: replace(here, tiles=False))
    assert not blocked.matrix_units.__wrapped__()


def test_how_many_outputs_a_block_has_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def laid(outputs: int, inputs: int) -> torch.Tensor:
        """The numbers of a weight in blocks of so many outputs, each with so many inputs side by
        side."""
        rows = torch.arange(outputs).float().repeat_interleave(inputs)
        return rows.repeat(4)[:128]

    for dtype, inputs in ((torch.float32, 1), (torch.bfloat16, 2)):
        if not onednn.available(dtype):
            continue
        found = {}
        for outputs in (16, 32, 48, 64):
            numbers = laid(outputs, inputs).to(dtype)
            monkeypatch.setattr(onednn, "first_numbers", lambda *_, numbers=numbers: numbers)
            found[outputs] = onednn._block_outputs.__wrapped__(dtype)
        assert found == {16: None, 32: 32, 48: None, 64: 64}
        monkeypatch.setattr(onednn, "first_numbers", lambda *_: None)
        assert onednn._block_outputs.__wrapped__(dtype) is None


@pytest.mark.parametrize(
    ("faster", "most"), [([True, True], 1 << 62), ([True, False], 96), ([False], 6)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_code_has_as_many_rows_as_it_is_faster_for(
    dtype: torch.dtype, faster: list[bool], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_layout(dtype)
    left = [*faster]
    monkeypatch.setattr(onednn, "_faster", lambda *_: left.pop(0))
    assert onednn._native_rows.__wrapped__(dtype) == most
    assert not left


@pytest.mark.parametrize(
    ("about", "own"),
    [
        ({}, True),
        ({"available": True}, True),
        ({"available": True, "faster": [True, False]}, False),
        ({"available": True, "faster": [False]}, False),
        ({"available": True, "block": 64}, False),
        ({"dtype": torch.float32}, False),
        ({"inputs": 66}, False),
        ({"wrong": True}, False),
    ],
)
def test_blocks_of_our_own_are_for_bfloat16_that_onednn_is_slow_at(
    monkeypatch: pytest.MonkeyPatch, about: dict[str, Any], own: bool
) -> None:
    left = [*about.get("faster", [True, True])]
    monkeypatch.setattr(onednn, "_faster", lambda *_: left.pop(0))
    monkeypatch.setattr(onednn, "available", lambda _: about.get("available", False))
    monkeypatch.setattr(onednn, "_block_outputs", lambda _: about.get("block"))
    monkeypatch.setattr(onednn, "reorder", lambda weight: weight)
    monkeypatch.setattr(own_blocks, "_is_right", lambda _: not about.get("wrong", False))
    onednn._own_blocks_win.cache_clear()
    weight = torch.zeros(64, about.get("inputs", 64), dtype=about.get("dtype", torch.bfloat16))
    assert onednn.native_is_faster(weight) is own
    onednn._own_blocks_win.cache_clear()


def test_a_product_in_blocks_of_our_own_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = blocked_kernel(torch.bfloat16, 64, 64)
    assert own_blocks._is_right.__wrapped__(kernel)
    right = BlockedKernel.__call__
    monkeypatch.setattr(BlockedKernel, "__call__", lambda *given, **more: 2 * right(*given, **more))
    assert not own_blocks._is_right.__wrapped__(kernel)


def test_rows_that_no_cache_holds_are_multiplied_by_onednn() -> None:
    needs_matrix_units()
    rows = {}
    for inputs in (512, 4096, 4128):
        reordered = onednn.reorder(torch.zeros(64, inputs, dtype=torch.bfloat16))
        found = onednn.read_blocked(reordered, (64, inputs))
        assert found is not None
        rows[inputs] = found.most_rows
    assert rows[4096] == rows[512]
    assert rows[4128] <= 96
