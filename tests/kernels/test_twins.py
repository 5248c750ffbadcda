"""Which twin of a kernel runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from asyncinfer.kernels import reference, triton, twins


class OnGpu:
    """All of a CUDA tensor that the choice looks at."""

    is_cuda = True


def test_torch_runs_on_a_cpu() -> None:
    assert twins.twin("rms_norm", torch.ones(1)) is reference.rms_norm
    assert not twins.has_triton_twin("rms_norm", torch.ones(1))


def test_triton_runs_on_a_gpu_unless_the_reference_is_asked_for() -> None:
    tensor: torch.Tensor = OnGpu()  # type: ignore[assignment]
    assert twins.twin("rms_norm", tensor) is triton.rms_norm
    assert twins.twin("rms_norm", tensor, True) is reference.rms_norm
    assert twins.has_triton_twin("rms_norm", tensor)
    assert not twins.has_triton_twin("no_kernel", tensor)


def test_without_triton_torch_runs_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "_triton", lambda: None)
    tensor: torch.Tensor = OnGpu()  # type: ignore[assignment]
    assert twins.twin("rms_norm", tensor) is reference.rms_norm
    assert not twins.has_triton_twin("rms_norm", tensor)


def test_triton_is_not_imported_where_there_is_no_gpu() -> None:
    program = """
import sys, torch
import asyncinfer.attention, asyncinfer.quantization
from asyncinfer.kernels import ops
ops.rms_norm(torch.ones(1, 2), torch.ones(2), 1e-5)
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
