"""Which implementation of a kernel runs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from asyncinfer.kernels import dispatch, ops, reference, triton


class OnGpu:
    """All of a CUDA tensor that the choice looks at."""

    is_cuda = True


def test_torch_runs_on_a_cpu() -> None:
    assert dispatch.kernel_for(reference.rms_norm, torch.ones(1)) is reference.rms_norm
    assert not dispatch.has_triton_kernel("rms_norm", torch.ones(1))


def test_triton_runs_on_a_gpu() -> None:
    tensor: torch.Tensor = OnGpu()  # type: ignore[assignment]
    assert dispatch.kernel_for(reference.rms_norm, tensor) is triton.rms_norm
    assert dispatch.has_triton_kernel("rms_norm", tensor)
    assert not dispatch.has_triton_kernel("no_kernel", tensor)


def test_every_kernel_has_one_signature() -> None:
    for name in ops.__all__:
        operator, plain = getattr(ops, name), getattr(reference, name)
        assert operator.__wrapped__ is plain
        if name not in triton.__all__:
            # Layers with a state run on a CPU only.
            assert name in ("causal_conv", "gated_delta_rule", "state_space_dual")
            continue
        ours, theirs = (inspect.signature(one).parameters for one in (plain, getattr(triton, name)))
        assert list(ours.values()) == list(theirs.values()), name


def test_the_arguments_are_checked_first() -> None:
    with pytest.raises(ValueError, match="kernel rms_norm: shapes or dtypes that do not fit"):
        ops.rms_norm(torch.ones(2, 3), torch.ones(2), 1e-6)


def test_without_triton_torch_runs_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_triton", lambda: None)
    tensor: torch.Tensor = OnGpu()  # type: ignore[assignment]
    assert dispatch.kernel_for(reference.rms_norm, tensor) is reference.rms_norm
    assert not dispatch.has_triton_kernel("rms_norm", tensor)


def test_triton_is_not_imported_where_there_is_no_gpu() -> None:
    program = """
import sys, torch
import asyncinfer.attention, asyncinfer.quantization
from asyncinfer.kernels import ops
ops.rms_norm(torch.ones(1, 2), torch.ones(2), 1e-5)
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
