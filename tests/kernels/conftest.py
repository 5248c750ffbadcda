"""The fixture that runs a test where Triton kernels run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernels.interpreted import interpreted
from kernels.targets import TARGETS, Target


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, seed: int) -> Iterator[Target]:
    """Tests that take it run once in Triton's interpreter per dtype, and once on a GPU."""
    torch.manual_seed(seed)
    if request.param.device == "cuda":
        yield request.param
        return
    with interpreted():
        yield request.param
