"""Rows of tables and the largest number of each row in code that LLVM makes, against torch."""

from __future__ import annotations

import pytest
import torch
from kernels.hosts import host_with_lanes

from asyncinfer.kernels.native import Arena, Recording, row_kernels
from asyncinfer.kernels.native import ends as module
from asyncinfer.kernels.native.ends import EndKernels, end_kernels, is_right
from asyncinfer.kernels.native.ends_code import ends_code
from asyncinfer.kernels.native.threads import parallel_region

FLOAT, HALF = torch.float32, torch.bfloat16
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.skipif(end_kernels(FLOAT) is None, reason="no code for this machine")


def numbers(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(params=[(8, FLOAT), (8, HALF), (16, FLOAT), (16, HALF)], ids=str)
def kernels(request: pytest.FixtureRequest) -> EndKernels:
    lanes, dtype = request.param
    region = parallel_region()
    assert region is not None
    return EndKernels(dtype, host_with_lanes(lanes), region)


def dtype_of(kernels: EndKernels) -> torch.dtype:
    return FLOAT if kernels.plain(torch.empty(1)) else HALF


@pytest.mark.parametrize("size", [16, 17, 63, 64, 65, 129, 1000])
def test_largest_is_torchs(kernels: EndKernels, size: int) -> None:
    x = numbers(9, size + 5, dtype=dtype_of(kernels))
    for row, (place, value) in enumerate(
        [(0, 8), (size - 1, 8), (size // 2, INF), (size - 1, NAN)]
    ):
        x[row, place] = value
    # What comes after a row is not looked at. In the last two rows all numbers are equal.
    x[:, size:] = 100
    x[7], x[8] = 3, -INF
    found = kernels.largest(x[:, :size])
    assert found is not None
    values, places = x[:, :size].float().max(dim=-1)
    torch.testing.assert_close(found[0], values, rtol=0, atol=0, equal_nan=True)
    assert found[1].dtype is torch.int64
    assert 0 <= found[1][3] < size
    finite = values.isfinite() | values.isinf()
    assert torch.equal(found[1][finite], places[finite])


def test_each_place_is_found(kernels: EndKernels) -> None:
    """The first of two that are equal."""
    dtype = dtype_of(kernels)
    x = torch.zeros(150, 150, dtype=dtype).fill_diagonal_(1)
    x[:, 149] = 1
    found = kernels.largest(x)
    assert found is not None
    assert found[1].tolist() == list(range(150))


def test_what_is_left_to_torch(kernels: EndKernels) -> None:
    x = numbers(4, 64, dtype=dtype_of(kernels))
    for each in (x[:, :7], x.half(), x[:, ::2], x.clone().requires_grad_()):
        assert kernels.largest(each) is None
    places = torch.tensor([1, 2])
    for table, into in ((x, x[:2, :32]), (x, numbers(2, 32)), (x[:, ::2], x[:2, ::2])):
        assert not kernels.take(into, table, places)
    assert not kernels.take(x[:2], x.double(), places)
    assert not kernels.take(x[:2], x, torch.arange(4)[::2])


@pytest.mark.parametrize("dtype", [FLOAT, HALF, torch.float16], ids=str)
def test_rows_are_copied(dtype: torch.dtype) -> None:
    kernels = end_kernels(FLOAT)
    assert kernels is not None
    places = torch.tensor([3, 0, 3, 6])
    for shape in ((1,), (33,), (2, 20), (1, 768)):
        table = numbers(7, *shape, dtype=dtype)
        into = torch.zeros(6, *shape, dtype=dtype)
        assert kernels.take(into[1:5], table, places)
        assert torch.equal(into[1:5], table[places])
        assert not into[::5].any()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_recording_takes_the_threads_of_its_replay(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    kernels = end_kernels(FLOAT)
    assert kernels is not None
    monkeypatch.setattr(row_kernels, "_ALONE", 0)
    table, places = numbers(50, 64), torch.arange(0, 41)
    taken, recording = torch.empty(41, 64), Recording(Arena(), 2)
    with recording.begun():
        assert kernels.take(taken, table, places)
        found = kernels.largest(taken)
    assert found is not None
    calls = recording.made()
    for step in range(3):
        places += step
        calls.replay(threads, 1)
        assert torch.equal(taken, table[places])
        assert all(map(torch.equal, found, taken.max(dim=-1)))


@pytest.mark.parametrize(
    ("triple", "processor", "lanes"),
    [("aarch64-unknown-linux-gnu", "", 8), ("x86_64-unknown-linux-gnu", "sapphirerapids", 16)],
)
def test_code_for_other_processors_is_compiled(
    monkeypatch: pytest.MonkeyPatch, triple: str, processor: str, lanes: int
) -> None:
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    monkeypatch.setattr(binding, "get_process_triple", lambda: triple)
    target = binding.Target.from_triple(triple)
    machine = target.create_target_machine(cpu=processor, opt=2)
    for dtype in ("float32", "bfloat16"):
        made = machine.emit_assembly(binding.parse_assembly(ends_code(dtype, lanes)))
        assert ("zmm" in made) is (lanes == 16)


@pytest.mark.parametrize("name", ["take", "largest"])
def test_code_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kernels = end_kernels(FLOAT)
    assert kernels is not None
    assert is_right(kernels, FLOAT)
    right = getattr(EndKernels, name)

    def wrong(self: EndKernels, x: torch.Tensor, *more: torch.Tensor) -> object:
        found = right(self, x, *more)
        (x if name == "take" else found[1]).add_(1)
        return found

    monkeypatch.setattr(EndKernels, name, wrong)
    assert not is_right(kernels, FLOAT)
    monkeypatch.setattr(module, "host", lambda: None)
    assert end_kernels(FLOAT) is None
