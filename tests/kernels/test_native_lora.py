"""Low-rank adapters in code that LLVM makes, against the operator's plain form."""

from __future__ import annotations

import pytest
import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.native import LoraKernel, lora_kernel
from asyncinfer.kernels.native import lora as module
from asyncinfer.kernels.native.host import host, host_of
from asyncinfer.kernels.native.lora_code import lora_code
from asyncinfer.kernels.native.threads import parallel_region

pytestmark = pytest.mark.skipif(
    lora_kernel(torch.float32) is None, reason="no kernel for this machine"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: No rank, less and more than are read at once, and the most.
RANKS = [3, 20, 0, 1, 8]
SLOTS = [3, 0, -1, 1, 2, 1, 4]
#: Outputs of the projections, and inputs.
SHAPES = [((5,), 7), ((130, 64), 300), ((96, 33, 33), 64)]


def some(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("sizes", "inputs"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_out_as_in_torch(
    dtype: torch.dtype, sizes: tuple[int, ...], inputs: int, threads: int
) -> None:
    kernel, most = lora_kernel(dtype), max(RANKS)
    assert kernel is not None
    down = some(len(RANKS), most * len(sizes), inputs, dtype=dtype) * inputs**-0.5
    up = some(len(RANKS), most, sum(sizes), dtype=dtype) * most**-0.5
    for slot, own in enumerate(RANKS):
        # What is beyond a slot's rank may hold anything.
        down[slot, own * len(sizes) :] = float("nan")
        up[slot, own:] = float("nan")
    # Rows that lie apart, as those of a packed projection do.
    x = some(len(SLOTS), inputs + 9, dtype=dtype)[:, 4:-5]
    y = some(len(SLOTS), sum(sizes) + 3, dtype=dtype)[:, 1:-2]
    ranks, slots = torch.tensor(RANKS, dtype=torch.int32), torch.tensor(SLOTS)
    right = reference.lora_add(y.clone(), x, down, up, ranks, slots.int(), sizes=sizes)
    rows = torch.tensor([6, 3, 5, 0, 1, 4])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # Both ways that a call may run are tried, one after the other.
        for _ in range(3):
            found = y.clone()
            kernel(found, x, down, up, ranks, slots[rows], rows, sizes=sizes)
            torch.testing.assert_close(found, right)
            alone = y.clone()
            for row in rows:
                one = row[None]
                kernel(alone, x, down, up, ranks, slots[one], one, sizes=sizes)
            assert torch.equal(found, alone)
    finally:
        torch.set_num_threads(before)


def test_code_for_arm_is_what_llvm_reads() -> None:
    from llvmlite import binding

    target = host_of("aarch64", {"neon": True})
    assert target is not None
    for dtype in ("float32", "bfloat16", "float16"):
        binding.parse_assembly(lora_code(dtype, target.lanes)).verify()


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LoraKernel.__call__

    def wrong(
        self: LoraKernel, y: torch.Tensor, *args: torch.Tensor, **sizes: tuple[int, ...]
    ) -> None:
        right(self, y, *args, **sizes)  # type: ignore[arg-type]
        y.mul_(1.05)

    monkeypatch.setattr(LoraKernel, "__call__", wrong)
    target, region = host(), parallel_region()
    assert target is not None
    assert region is not None
    assert module.trusted_kernel.__wrapped__(torch.float32, target, region) is None
    monkeypatch.setattr(module, "host", lambda: None)
    assert lora_kernel(torch.float32) is None
