"""A trial in a process of its own: kernels that end it, leave it hanging or spoil it leave this
process as it was."""

from __future__ import annotations

import os
import re
import select
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncinfer.kernels.figures import KernelFigures
from asyncinfer.kernels.layouts import WeightLayout
from asyncinfer.kernels.trial import Fault, TrialShapes
from asyncinfer.kernels.trial_process import NoProcess, find_fault_in_child

CPU = torch.device("cpu")
SHAPES = TrialShapes(
    hidden=16,
    heads=2,
    kv_heads=1,
    head_dim=16,
    vocab=50,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    layouts=(WeightLayout("int4", 32, offsets=True),),
)
#: A second kernel that does what its name says; the first one is right.
PLANTED = """
import os, signal, threading
from asyncinfer.kernels.reference import *

def silu_mul(x):
    print("a compiler's note")
    {fault}
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a module of kernels where the other process finds it, too."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(fault: str) -> str:
        (tmp_path / "planted_kernels.py").write_text(PLANTED.format(fault=fault))
        return "planted_kernels"

    return write


def test_kernels_that_are_right(planted: Any) -> None:
    right = "from asyncinfer.kernels import reference; return reference.silu_mul(x)"
    heard: list[KernelFigures] = []
    kernels = planted(right)
    assert find_fault_in_child(SHAPES, CPU, kernels=kernels, measured=heard.append) is None
    assert {"rms_norm", "silu_mul", "sample"} <= {each.kernel for each in heard}
    assert all(each.seconds and each.floor for each in heard)


def test_a_kernel_that_ends_its_process(planted: Any) -> None:
    kernels = planted("os.kill(os.getpid(), signal.SIGSEGV)")
    fault = find_fault_in_child(SHAPES, CPU, kernels=kernels)
    assert fault == Fault("silu_mul: its trial was ended by signal 11", lasting=True)


def test_a_kernel_that_never_ends(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is up once it hangs, however long this machine takes until then."""
    processes: list[subprocess.Popen[bytes]] = []
    communicate, told = subprocess.Popen.communicate, bytearray()

    def until_it_hangs(
        process: subprocess.Popen[bytes], data: bytes = b"", timeout: float | None = None
    ) -> tuple[bytes, bytes]:
        processes.append(process)
        if timeout is None:
            rest, errors = communicate(process)
            return bytes(told) + rest, errors
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(data)
        process.stdin.close()
        process.stdin = None
        while b"silu_mul" not in told:
            assert select.select([process.stdout], [], [], 120)[0]
            told.extend(os.read(process.stdout.fileno(), 4096))
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", until_it_hangs)
    kernels = planted("threading.Event().wait()")
    fault = find_fault_in_child(SHAPES, CPU, kernels=kernels, time_limit=250)
    assert fault == Fault("silu_mul: its trial took longer than 250 seconds", lasting=True)
    assert processes[0].returncode == -9


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have a shell script take the place of the other Python."""

    def write(script: str) -> None:
        path = tmp_path / "python3"
        path.write_text(f"#!/bin/sh\nread request\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("echo rms_norm; exit 7", Fault("rms_norm: its trial ended with exit status 7", True)),
        ("echo rms_norm", Fault("rms_norm: its trial ended with exit status 0", True)),
        # A system without memory ends what it likes.
        ("echo rms_norm; kill -9 $$", Fault("rms_norm: its trial was ended by signal 9", False)),
        ("echo '{\"fault\": null}'", None),
        (
            'echo \'{"fault": {"reason": "rope is wrong", "lasting": true}}\'',
            Fault("rope is wrong", True),
        ),
    ],
)
def test_what_a_process_tells(process: Any, script: str, fault: Fault | None) -> None:
    process(script)
    assert find_fault_in_child(SHAPES, CPU) == fault


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 1", "exit status 1 before it tried a kernel"),
        ('echo \'{"unavailable": "all CUDA devices are busy"}\'', "all CUDA devices are busy"),
    ],
)
def test_a_process_that_cannot_try_them(process: Any, script: str, why: str) -> None:
    process(script)
    with pytest.raises(NoProcess, match=why):
        find_fault_in_child(SHAPES, CPU)


@pytest.mark.parametrize("executable", ["", "/usr/bin/uwsgi", "/nowhere/python3"])
def test_a_program_that_is_no_interpreter_is_not_started(
    executable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(NoProcess, match=re.escape(executable) or "''"):
        find_fault_in_child(SHAPES, CPU)
