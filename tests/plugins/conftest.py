"""Distributions that a test installs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncinfer.plugins import registries

Install = Callable[..., None]


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers or loads by a name, no other one finds there."""
    for registry in registries():
        monkeypatch.setattr(registry, "_registered", {})
        monkeypatch.setattr(registry, "_loaded", {})
        monkeypatch.setattr(registry, "_hung", {})


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may keep observers waiting: a close waits for them unless a test says not."""
    monkeypatch.setattr("asyncinfer.telemetry.observers.CLOSE_SECONDS", 60.0)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with an entry point, and its module, on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = set(sys.modules)

    def write(group: str, name: str, target: str, source: str, dist: str = "greetings") -> None:
        module = target.partition(":")[0] or "nameless"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{dist}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")

    yield write
    for name in set(sys.modules) - modules:
        del sys.modules[name]
