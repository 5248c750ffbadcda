"""Every kernel under compute-sanitizer, where there is a GPU and the tool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer"),
]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_touch_what_is_theirs(tool: str) -> None:
    """`bench kernels` runs each of them and holds it against float64. Without torch's cache every
    tensor has memory of its own, so that what lies beyond one is nobody's."""
    kernels = ["-m", "asyncinfer", "bench", "kernels", "--quick", "--device", "cuda"]
    done = subprocess.run(
        ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, *kernels],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
