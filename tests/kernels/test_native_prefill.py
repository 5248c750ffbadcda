"""Causal attention of a prompt's tokens in code that LLVM makes, against torch in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from kernels.emulated_bfloat16 import emulate_bfloat16
from kernels.hosts import assembly_for_units, host_with_lanes, host_without

from asyncinfer.kernels.native import prefill as module
from asyncinfer.kernels.native import prefill_kernel
from asyncinfer.kernels.native.host import Host, host, host_of
from asyncinfer.kernels.native.prefill import PrefillKernel, PrefillMethod, is_right
from asyncinfer.kernels.native.prefill_code import prefill_code
from asyncinfer.kernels.native.prefill_rows_code import SPAN, TILE
from asyncinfer.kernels.native.prefill_units_code import units_code
from asyncinfer.kernels.native.threads import parallel_region
from asyncinfer.kernels.threads import set_thread_count

pytestmark = pytest.mark.skipif(prefill_kernel(64, 1, 1.0) is None, reason="no kernel here")

KV_HEADS, SCALE = 2, 0.3


HALVES = ["pairs", "widened", "units"]
METHODS = ["floats", *HALVES]


@pytest.fixture(autouse=True)
def bfloat16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of methods that take instructions run on processors without them, too."""
    given = getattr(request.node, "callspec", None)
    if given is not None and given.params.get("method", "floats") in ("pairs", "units"):
        emulate_bfloat16(monkeypatch)


@dataclass
class Prompt:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    start: int

    def attend(self, kernel: PrefillKernel, first: int = 0) -> torch.Tensor:
        """Of the tokens from this one on."""
        out = torch.full(self.q[first:].shape, float("nan"), dtype=self.q.dtype)
        kernel(self.q[first:], self.k, self.v, self.start + first, out)
        return out

    def right(self) -> torch.Tensor:
        tokens, heads, head_dim = self.q.shape
        ours = self.q.double().view(tokens, KV_HEADS, -1, head_dim).permute(1, 2, 0, 3)
        scores = ours @ self.k.double()[:, None].mT * SCALE
        scores += torch.full(scores.shape[-2:], float("-inf")).triu_(self.start + 1)
        found = scores.softmax(-1) @ self.v.double()[:, None]
        return found.permute(2, 0, 1, 3).reshape(tokens, heads, head_dim)


def prompt(
    tokens: int,
    start: int,
    head_dim: int,
    group: int,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Prompt:
    generator = torch.Generator().manual_seed(tokens + start)
    q, k, v = (
        (size * torch.randn(*shape, head_dim, generator=generator)).to(dtype)
        for shape in ((tokens, KV_HEADS * group), *[(KV_HEADS, start + tokens)] * 2)
    )
    return Prompt(q, k, v, start)


def dtype_of(method: PrefillMethod) -> torch.dtype:
    return torch.float32 if method == "floats" else torch.bfloat16


def kernel_for(
    head_dim: int,
    group: int,
    target: Host | None = None,
    method: PrefillMethod = "floats",
) -> PrefillKernel:
    target, region = target or host(), parallel_region()
    assert target is not None
    assert region is not None
    return PrefillKernel(head_dim, group, SCALE, target, region, method)


@pytest.mark.parametrize(
    ("head_dim", "group", "wide"),
    [(64, 3, True), (80, 1, True), (128, 7, True), (64, 3, False), (80, 1, False)],
)
def test_tokens_are_torchs(head_dim: int, group: int, wide: bool) -> None:
    kernel = kernel_for(head_dim, group, None if wide else host_without("avx512"))
    # One token, a tile and more, keys of a span and at its bounds.
    for tokens, start in ((1, 0), (5, 0), (TILE + 1, 0), (40, SPAN - 20), (3, SPAN), (70, 450)):
        given = prompt(tokens, start, head_dim, group)
        torch.testing.assert_close(
            given.attend(kernel).double(), given.right(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("method", HALVES)
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (96, 1), (128, 7), (256, 2)])
def test_tokens_in_bfloat16(head_dim: int, group: int, method: PrefillMethod) -> None:
    kernel = kernel_for(head_dim, group, method=method)
    # Among them odd numbers of keys, of a span and of a whole prompt.
    for tokens, start in ((1, 0), (6, 1), (TILE + 1, 0), (41, SPAN - 20), (3, SPAN), (70, 451)):
        given = prompt(tokens, start, head_dim, group, dtype=torch.bfloat16)
        found = given.attend(kernel)
        assert found.dtype is torch.bfloat16
        right = given.right()
        # The results' rounding, and that of the weights.
        torch.testing.assert_close(found.double(), right, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("lanes", [8, 16])
def test_widened_heads_that_are_no_multiple_of_pairs(lanes: int) -> None:
    """And rounded without an instruction for it."""
    kernel = kernel_for(80, 2, replace(host_with_lanes(lanes), rounds=False), method="widened")
    given = prompt(70, 451, 80, 2, dtype=torch.bfloat16)
    found = given.attend(kernel).double()
    torch.testing.assert_close(found, given.right(), rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("method", METHODS)
def test_other_tokens_and_threads_do_not_change_a_bit(method: PrefillMethod) -> None:
    given = prompt(300, 30, 64, 3, dtype=dtype_of(method))
    kernel = kernel_for(64, 3, method=method)
    count = torch.get_num_threads()
    whole = given.attend(kernel)
    # Keys that no token before them sees.
    assert torch.equal(given.attend(kernel, 101), whole[101:])
    earlier = Prompt(given.q[:90], given.k[:, :120], given.v[:, :120], 30)
    assert torch.equal(earlier.attend(kernel), whole[:90])
    try:
        for threads in (1, 3):
            set_thread_count(threads)
            assert torch.equal(given.attend(kernel), whole)
    finally:
        set_thread_count(count)


@pytest.mark.parametrize("method", METHODS)
def test_strided_heads_and_large_scores(method: PrefillMethod) -> None:
    given = prompt(130, 200, 64, 3, 2.0, dtype_of(method))
    kernel = kernel_for(64, 3, method=method)
    whole = given.attend(kernel)
    off = 1e-4 if method == "floats" else 2e-2
    torch.testing.assert_close(whole.double(), given.right(), rtol=off, atol=off)
    # As a cache and packed projections have them.
    given.k = given.k.transpose(0, 1).contiguous().transpose(0, 1)
    given.v = torch.cat((given.v, given.v), 1)[:, : given.k.shape[1]]
    given.q = torch.cat((given.q, given.q), 1)[:, : given.q.shape[1]]
    assert torch.equal(given.attend(kernel), whole)
    given.q = given.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(given.attend(kernel), whole)


@pytest.mark.parametrize("method", METHODS)
def test_a_kernel_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, method: PrefillMethod
) -> None:
    kernel, dtype = kernel_for(64, 1, method=method), dtype_of(method)
    assert is_right(kernel, 64, 1, SCALE, dtype)
    assert not is_right(kernel, 64, 1, 1.1 * SCALE, dtype)
    monkeypatch.setattr(module, "is_right", lambda *_: False)
    assert prefill_kernel(64, 1, 0.77) is None


def test_what_there_is_no_code_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for about in ((60, 1, 1.0), (64, TILE + 1, 1.0), (64, 1, 0.0)):
        assert prefill_kernel(*about) is None
    here = host()
    assert here is not None
    arm64 = replace(here, rounds=False, features="+bf16,+neon")
    monkeypatch.setattr(module, "host", lambda: arm64)
    assert prefill_kernel(64, 1, 0.78, torch.bfloat16) is None
    monkeypatch.setattr(module, "host", lambda: None)
    assert prefill_kernel(64, 1, 0.78) is None


@pytest.mark.parametrize(
    ("about", "fastest"),
    [
        ({}, "widened"),
        ({"fast": True}, "pairs"),
        ({"fast": True, "units": True}, "units"),
        ({"head_dim": 80}, "widened"),
        ({"units": True, "head_dim": 80}, None),
        ({"rounds": False}, "widened"),
        ({"dtype": torch.float32, "units": True}, "floats"),
    ],
)
def test_the_method_that_is_fastest_is_taken(
    about: dict[str, Any], fastest: PrefillMethod | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = host()
    assert here is not None
    target = replace(here, lanes=16, rounds=about.get("rounds", True))
    monkeypatch.setattr(module, "host", lambda: target)
    monkeypatch.setattr(module, "matrix_units", lambda: about.get("units", False))
    monkeypatch.setattr(module, "pairs_are_fast", lambda _: about.get("fast", False))
    taken: list[str] = []
    monkeypatch.setattr(module, "trusted_kernel", lambda *given: taken.append(given[-1]))
    dtype = about.get("dtype", torch.bfloat16)
    prefill_kernel.__wrapped__(about.get("head_dim", 64), 1, 1.0, dtype)
    assert taken == ([] if fastest is None else [fastest])


def test_code_for_matrix_units_is_compiled() -> None:
    made = assembly_for_units(units_code(64, 3, 16, SCALE))
    # Two parts of a head for scores, and two for sums of values, each of four registers.
    assert made.count("tdpbf16ps") == 16
    assert made.count("ldtilecfg") == made.count("tilerelease") == 1


def test_code_for_arm_is_what_llvm_reads() -> None:
    from llvmlite import binding

    target = host_of("aarch64", {"neon": True})
    assert target is not None
    binding.parse_assembly(prefill_code(64, 3, target.lanes, SCALE)).verify()
