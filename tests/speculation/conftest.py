"""Fixtures of tests with drafts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.speculation import DraftCost, StepCosts


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    use_cpu_threads(1)
    yield
    use_cpu_threads(before)


@pytest.fixture
def drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever steps take, so that there are many drafts of every length."""
    monkeypatch.setattr(StepCosts, "cost", lambda *args: DraftCost(0.02))
