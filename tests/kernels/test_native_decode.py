"""Decode attention in code that LLVM makes, against torch in float64, on pages poisoned wherever
nobody may read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from kernels.hosts import host_without

from asyncinfer.kernels.native import decode as module
from asyncinfer.kernels.native import decode_kernel
from asyncinfer.kernels.native.decode import DecodeKernel
from asyncinfer.kernels.native.decode_code import SPARE, decode_code, heads_at_once
from asyncinfer.kernels.native.host import Host, host, host_of
from asyncinfer.kernels.native.threads import parallel_region

pytestmark = pytest.mark.skipif(
    decode_kernel(torch.float32, 64, 1, 1.0) is None, reason="no kernel for this machine"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Shorter and longer than a page and than a vector, and at their bounds.
LENGTHS = [1, 4, 5, 15, 16, 17, 40, 2]
KV_HEADS, PAGE, SCALE = 2, 4, 0.3


@dataclass
class Rows:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor

    def attend(self, kernel: DecodeKernel, *rows: int) -> torch.Tensor:
        """Of these rows; all without any."""
        some = torch.tensor(rows or range(len(self.q)))
        lengths = self.lengths[some]
        longest = int(lengths.max())
        return kernel(self.q[some], self.k, self.v, self.tables[some], lengths, longest)

    def right(self) -> torch.Tensor:
        found = []
        for q, table, length in zip(self.q, self.tables, self.lengths.tolist(), strict=True):
            pages = table[: -(-length // PAGE)].long()
            k, v = (
                pages_of[pages].transpose(0, 1).flatten(1, 2)[:, :length].double()
                for pages_of in (self.k, self.v)
            )
            scores = q.view(KV_HEADS, -1, q.shape[-1]).double() @ k.mT * SCALE
            found.append((scores.softmax(-1) @ v).flatten())
        return torch.stack(found)


def rows_of(dtype: torch.dtype, head_dim: int, group: int, lengths: list[int] = LENGTHS) -> Rows:
    generator = torch.Generator().manual_seed(head_dim + group)
    most = -(-max(lengths) // PAGE)
    pages = torch.randperm(len(lengths) * most, generator=generator)
    tables = pages.view(len(lengths), most).int()
    shape = len(lengths) * most, KV_HEADS, PAGE, head_dim
    k, v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    for row, length in enumerate(lengths):
        for token in range(length):
            page = tables[row, token // PAGE]
            for cache in (k, v):
                new = torch.randn(KV_HEADS, head_dim, generator=generator)
                cache[page, :, token % PAGE] = new.to(dtype)
    q = torch.randn(len(lengths), KV_HEADS * group, head_dim, generator=generator).to(dtype)
    return Rows(q, k, v, tables, torch.tensor(lengths, dtype=torch.int32))


def kernel_for(
    rows: Rows, group: int, target: Host | None = None, scale: float = SCALE
) -> DecodeKernel:
    target, region = target or host(), parallel_region()
    assert target is not None
    assert region is not None
    return DecodeKernel(rows.k.dtype, rows.k.shape[-1], group, scale, target, region)


def lanes() -> int:
    here = host()
    assert here is not None
    return here.lanes


def close(found: torch.Tensor, right: torch.Tensor) -> None:
    assert not found.isnan().any()
    bound = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}[found.dtype]
    torch.testing.assert_close(found.double(), right, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("head_dim", "group"), [(16, 1), (64, 3), (64, 8), (80, 4), (128, 7), (256, 2)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_out_as_in_torch(dtype: torch.dtype, head_dim: int, group: int) -> None:
    rows = rows_of(dtype, head_dim, group)
    close(rows.attend(kernel_for(rows, group)), rows.right())


@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (72, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrower_vectors(dtype: torch.dtype, head_dim: int, group: int) -> None:
    narrow = host_without("avx512")
    assert narrow.lanes == 8
    rows = rows_of(dtype, head_dim, group)
    close(rows.attend(kernel_for(rows, group, narrow)), rows.right())


def test_neither_threads_nor_other_rows_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARED", 0)
    rows = rows_of(torch.float32, 64, 3)
    kernel = kernel_for(rows, 3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([rows.attend(kernel, row) for row in range(len(rows.q))])
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for _ in range(5):
                assert torch.equal(rows.attend(kernel), alone)
    finally:
        torch.set_num_threads(before)
    close(alone, rows.right())


@pytest.mark.parametrize("span", [1, 8, 64])
def test_rows_that_are_taken_in_spans(span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a row's scores take does not grow with it: only a span's are held at once."""
    rows = rows_of(torch.bfloat16, 64, 4, [1, 7, 8, 9, 63, 64, 65, 200])
    rows.q *= 10
    kernel = kernel_for(rows, 4)
    monkeypatch.setattr(module, "_SPAN", span)
    monkeypatch.setattr(module, "_SHARED", 0)
    close(rows.attend(kernel), rows.right())
    held = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda size, **options: held.append(size) or empty(size, **options)
    )
    rows.attend(kernel, 7)
    most = max(span, PAGE) + SPARE
    # The others hold the rows' queries and results.
    scratch = [size for size in held if len(size) == 1]
    assert scratch == [(torch.get_num_threads() * heads_at_once(4, 64, lanes()) * most,)]


@pytest.mark.parametrize("span", [256, 1024])
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_scores_of_all_sizes(size: float, span: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest one alone counts where others are far below, and all count where they are alike:
    exp neither overflows nor loses what is small."""
    monkeypatch.setattr(module, "_SPAN", span)
    rows = rows_of(torch.float32, 64, 2, [300, 700])
    rows.q *= size
    found, right = rows.attend(kernel_for(rows, 2)), rows.right()
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("span", [8, 1024])
def test_numbers_that_are_none_stay_in_their_row(
    span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SPAN", span)
    rows = rows_of(torch.float32, 64, 2)
    kernel = kernel_for(rows, 2)
    before = rows.attend(kernel)
    # One key of a row, and the query of another.
    rows.k[rows.tables[6, 3].long(), 0, 1, 5] = float("nan")
    rows.q[2, 0, 0] = float("nan")
    found = rows.attend(kernel).isnan().view(len(LENGTHS), KV_HEADS, 2, 64)
    assert found[6, 0].all()
    assert found[2, 0, 0].all()
    assert found.any(-1).sum() == 3
    rest = [row for row in range(len(LENGTHS)) if row not in (2, 6)]
    assert torch.equal(rows.attend(kernel)[rest], before[rest])


def test_heads_share_what_is_read() -> None:
    assert heads_at_once(3, 64, 16) == 3
    assert heads_at_once(8, 64, 16) == 4
    assert heads_at_once(7, 64, 16) == 1
    assert heads_at_once(4, 256, 16) == 1
    assert heads_at_once(4, 64, 8) == 1
    assert heads_at_once(4, 32, 8) == 2


def test_code_for_arm_is_what_llvm_reads() -> None:
    from llvmlite import binding

    target = host_of("aarch64", {"neon": True})
    assert target is not None
    for dtype in ("float32", "bfloat16", "float16"):
        binding.parse_assembly(decode_code(dtype, 64, 1, target.lanes, 1.0)).verify()


def test_what_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, head_dim in ((torch.float64, 64), (torch.float32, 20)):
        assert decode_kernel(dtype, head_dim, 1, 1.0) is None
    monkeypatch.setattr(module, "host", lambda: None)
    assert decode_kernel.__wrapped__(torch.float32, 64, 1, 1.0) is None


def test_a_kernel_that_is_wrong_is_not_used() -> None:
    rows = rows_of(torch.float32, 64, 1)
    target, region = host(), parallel_region()
    assert target is not None
    assert region is not None
    right = kernel_for(rows, 1, scale=1.0)
    assert module.is_right(right, torch.float32, 64, 1, 1.0)
    assert not module.is_right(right, torch.float32, 64, 1, 1.1)
