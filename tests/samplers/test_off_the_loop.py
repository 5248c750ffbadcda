"""A sampler's name costs an event loop nothing: what is looked for, imported or made for it by an
installed package, is so on a worker thread."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncinfer import InvalidRequest, plugins
from asyncinfer.plugins import installed

pytestmark = pytest.mark.anyio

SOURCE = """
import threading
from dataclasses import dataclass
from typing import ClassVar

THREADS = [threading.get_ident()]


@dataclass(frozen=True)
class Seen:
    a: int = 1
    changes_argmax: ClassVar[bool] = True

    def __post_init__(self):
        THREADS.append(threading.get_ident())

    def open(self, slots, vocab_size, device):
        raise OSError("not today")
"""


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.samplers, "_loaded", {})


@pytest.mark.parametrize("sampler", ["nobody", ("nobody", {}), ["dry", "nobody"]])
async def test_an_unknown_name(
    open_tiny: Any, monkeypatch: pytest.MonkeyPatch, sampler: Any
) -> None:
    looked: list[int] = []
    read, stamp = importlib.metadata.distributions, installed._stamp

    def distributions() -> Any:
        looked.append(threading.get_ident())
        return read()

    async with open_tiny() as engine:
        monkeypatch.setattr(installed, "distributions", distributions)
        monkeypatch.setattr(installed, "_stamp", lambda: (*stamp(), ("", len(looked))))
        for _ in range(3):
            with pytest.raises(InvalidRequest, match="nobody"):
                await engine.generate("abc", sampler=sampler, max_tokens=1)
    assert looked
    assert threading.get_ident() not in looked


async def test_what_is_installed(
    open_tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "seen_module.py").write_text(SOURCE)
    info = tmp_path / "seen-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seen\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[asyncinfer.samplers]\nseen = seen_module:Seen\n")
    async with open_tiny() as engine:
        for sampler in ("seen", ("seen", {"a": 2}), ["dry", "seen"]):
            with pytest.raises(Exception, match="not today"):
                await engine.generate("abc", sampler=sampler, max_tokens=1)
    threads = sys.modules.pop("seen_module").THREADS
    assert len(threads) == 4
    assert threading.get_ident() not in threads


async def test_a_built_in_is_imported_off_the_loop_and_then_made_on_it(
    open_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    factory = plugins.samplers.source

    def noted(name: str) -> Any:
        found.append(threading.get_ident())
        return factory(name)

    monkeypatch.setattr(plugins.samplers, "source", noted)
    async with open_tiny() as engine:
        for _ in range(3):
            await engine.generate("abc", sampler="dry", max_tokens=1)
    here = threading.get_ident()
    assert [each == here for each in found] == [False, True, True]
