"""Verdicts on kernels are kept between opens, and only those that last."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncinfer.kernels import trust, verdicts
from asyncinfer.kernels.trial import Fault, TrialShapes
from asyncinfer.kernels.trial_process import NoProcess
from asyncinfer.kernels.trust import find_triton_fault
from asyncinfer.kernels.verdicts import Verdicts

CPU = torch.device("cpu")
SHAPES = TrialShapes(
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=500,
    dtype=torch.float16,
    kv_dtype=torch.int8,
)
WRONG = Fault("rms_norm is wrong", lasting=True)
MISSING = Fault("RuntimeError: no C compiler", lasting=False)


class Trials:
    """Stand in the place of both kinds of trial, and count them."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.no_process = False
        self.apart = self.inline = 0

    def find_fault_in_child(self, *_: Any, measured: Any) -> Fault | None:
        self.apart += 1
        if self.no_process:
            raise NoProcess("no")
        return self.fault

    def find_fault(self, *_: Any, measured: Any) -> Fault | None:
        self.inline += 1
        return self.fault


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    fake = Trials()
    monkeypatch.setattr(trust, "triton_is_missing", lambda: None)
    for name in ("find_fault_in_child", "find_fault"):
        monkeypatch.setattr(trust, name, getattr(fake, name))
    return fake


@pytest.fixture
def kept(tmp_path: Path) -> Verdicts:
    return Verdicts(tmp_path / "cache" / "trials")


@pytest.mark.parametrize("fault", [None, WRONG])
def test_a_verdict_that_lasts_is_found_once(
    trials: Trials, kept: Verdicts, fault: Fault | None
) -> None:
    trials.fault = fault
    reason = None if fault is None else fault.reason
    assert find_triton_fault(SHAPES, CPU, "cached", kept) == reason
    again = find_triton_fault(SHAPES, CPU, "cached", kept)
    # The second one says which file to delete.
    assert again == (reason and f"{reason} (found before: {kept.path(SHAPES, CPU)})")
    assert (trials.apart, trials.inline) == (1, 0)
    # Whoever wants a trial has one, and what it finds is kept.
    trials.fault = WRONG if fault is None else None
    find_triton_fault(SHAPES, CPU, "process", kept)
    assert trials.apart == 2
    assert (find_triton_fault(SHAPES, CPU, "cached", kept) is None) == (fault is not None)
    assert trials.apart == 2


def test_what_may_be_mended_is_tried_again(trials: Trials, kept: Verdicts) -> None:
    for _ in range(2):
        trials.fault = MISSING
        assert find_triton_fault(SHAPES, CPU, "cached", kept) == MISSING.reason
    trials.fault = None
    assert find_triton_fault(SHAPES, CPU, "cached", kept) is None
    assert trials.apart == 3
    # A verdict is not outlived by a fault that may be mended.
    trials.fault = MISSING
    find_triton_fault(SHAPES, CPU, "process", kept)
    assert not kept.path(SHAPES, CPU).exists()


def test_where_a_trial_runs(trials: Trials, kept: Verdicts) -> None:
    find_triton_fault(SHAPES, CPU, "inline", kept)
    assert (trials.apart, trials.inline) == (0, 1)
    trials.no_process = True
    find_triton_fault(SHAPES, CPU, "process", kept)
    assert (trials.apart, trials.inline) == (1, 2)
    trials.fault = WRONG
    assert find_triton_fault(SHAPES, CPU, "off", kept) is None
    assert (trials.apart, trials.inline) == (1, 2)


def test_all_that_decides_a_trial_is_in_the_key(
    kept: Verdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {kept.path(SHAPES, CPU).name, kept.path(SHAPES, torch.device("meta")).name}
    for field in dataclasses.fields(SHAPES):
        other = torch.bfloat16 if "dtype" in field.name else 7
        names.add(kept.path(dataclasses.replace(SHAPES, **{field.name: other}), CPU).name)
    monkeypatch.setattr(verdicts, "driver_version", lambda: "another one")
    names.add(kept.path(SHAPES, CPU).name)
    monkeypatch.setattr(verdicts, "version", lambda library: "0.0")
    names.add(kept.path(SHAPES, CPU).name)
    monkeypatch.setattr(torch, "__version__", "0.0")
    names.add(kept.path(SHAPES, CPU).name)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    names.add(kept.path(SHAPES, CPU).name)
    assert len(names) == 2 + len(dataclasses.fields(SHAPES)) + 4


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\x00",
        b"{",
        b"[" * 10_000,
        b"[]",
        b"null",
        b"{}",
        b'{"key": {}, "fault": null}',
        b" " * 1_000_000,
    ],
)
def test_a_file_that_is_not_ours_counts_as_none(
    trials: Trials, kept: Verdicts, data: bytes
) -> None:
    path = kept.path(SHAPES, CPU)
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    assert kept.read(SHAPES, CPU) == (False, None)
    assert find_triton_fault(SHAPES, CPU, "cached", kept) is None
    assert trials.apart == 1
    # It is replaced.
    assert kept.read(SHAPES, CPU) == (True, None)


@pytest.mark.parametrize("fault", [7, ["x"], "x" * 2_000])
def test_a_reason_that_is_not_ours_counts_as_none(kept: Verdicts, fault: object) -> None:
    kept.keep(SHAPES, CPU, None)
    path = kept.path(SHAPES, CPU)
    path.write_text(json.dumps({**json.loads(path.read_text()), "fault": fault}))
    assert kept.read(SHAPES, CPU) == (False, None)


def test_a_folder_that_cannot_be_written_to_keeps_nothing(trials: Trials, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = Verdicts(tmp_path / "file" / "trials")
    assert find_triton_fault(SHAPES, CPU, "cached", kept) is None
    assert kept.read(SHAPES, CPU) == (False, None)


def test_nothing_half_written_is_left(kept: Verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*paths: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fails)
    kept.keep(SHAPES, CPU, None)
    assert list(kept.path(SHAPES, CPU).parent.iterdir()) == []
