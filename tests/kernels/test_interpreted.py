"""The interpreter of kernels leaves the compiler as it was."""

from __future__ import annotations

import torch
from kernels.interpreted import PATCHED, interpreted

from asyncinfer.kernels.triton.rms_norm import rms_norm


def test_what_it_changes_is_put_back() -> None:
    before = [dict(vars(owner)) for owner in PATCHED]
    with interpreted():
        rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
        assert [dict(vars(owner)) for owner in PATCHED] != before
    for owner, old in zip(PATCHED, before, strict=True):
        assert dict(vars(owner)) == old, owner
