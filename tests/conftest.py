"""What every test shares: the event loops, waiting without sleeping, a seed that is printed."""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Generator
from typing import Any

from platformdirs import user_cache_path

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores. Before anything reads it; programs that tests start inherit it.
    os.environ["OMP_NUM_THREADS"] = "1"

# What commands take without --model: tests need no network. Programs that tests start inherit it.
os.environ["ASYNCINFER_MODEL"] = "embedded"

if "PYTEST_XDIST_WORKER" not in os.environ:
    # What earlier runs kept must not decide a test, nor tests fill the user's folder; models that
    # the user has pulled are there. Workers and programs that tests start inherit it.
    models = user_cache_path("asyncinfer") / "models"
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="asyncinfer-tests-")
    own = user_cache_path("asyncinfer", ensure_exists=True) / "models"
    # Not every system's folder depends on it.
    if own != models:
        own.symlink_to(models)

import anyio

# Before objects are frozen (below): Hypothesis asks the collector who refers to a generator.
import hypothesis  # noqa: F401
import numpy as np
import pytest
import torch
from gpu_summary import check_workers, gpu_summary, machine_lines
from support import Until

from asyncinfer.engine import preparer
from asyncinfer.kernels import onednn

BACKENDS = [
    pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    pytest.param(("trio", {}), id="trio"),
]


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Async tests marked `anyio` run once per event loop."""
    return request.param


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> int:
    """Equal in every run; a failing test prints it. Requests without a seed get theirs from it."""
    value = 20_261_120
    random.seed(value)
    np.random.seed(value)
    monkeypatch.setattr(preparer, "randbits", random.Random(value).getrandbits)
    print(f"seed={value}")
    return value


@pytest.fixture
def laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in oneDNN's layout, also where torch's own products are as fast."""
    if not onednn.available(torch.float32):
        pytest.skip("torch is built without oneDNN")
    monkeypatch.setattr(onednn, "reorder_is_faster", lambda _: True)


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Adds a line to what a run prints at its end."""
    return lambda line: record_property("report", line)


def pytest_configure(config: pytest.Config) -> None:
    check_workers(config.option.markexpr, len(config.getoption("tx", ())))
    if not hasattr(config, "workerinput"):
        config.add_cleanup(lambda: shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What imports and collection make lives as long as the run. It is a million objects: with them
    each full collection of a test takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.unfreeze = refuse_to_thaw


def refuse_to_thaw() -> None:
    """In the place of `gc.unfreeze`. To count what is frozen after each test, in the place of this,
    would go through all of it."""
    pytest.fail("gc.unfreeze() has each full collection of the tests that follow take a second")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and nextitem.path != item.path:
        # What a file's tests have imported lives as long.
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Reports of tests on a GPU say so; their keywords are folders' names as well."""
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.user_properties.append(("gpu", True))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = (
        done for outcome in ("passed", "failed") for done in terminalreporter.getreports(outcome)
    )
    lines = [line for done in reports for name, line in done.user_properties if name == "report"]
    if lines:
        terminalreporter.section("report")
        for line in lines:
            terminalreporter.write_line(str(line))
    outcomes = ("passed", "failed", "error", "skipped")
    seen = [done for outcome in outcomes for done in terminalreporter.getreports(outcome)]
    if found := gpu_summary(seen):
        terminalreporter.section("GPU: please send this")
        for line in (*machine_lines(), *found):
            terminalreporter.write_line(line)


@pytest.fixture
def until() -> Until:
    """Yield to other tasks and threads until a condition holds; 120 s are for a test that fails."""

    async def wait(condition: Callable[[], object]) -> None:
        with anyio.fail_after(120):
            while not condition():
                # A turn of the loop; the engine's thread runs meanwhile.
                await anyio.sleep(0.001)

    return wait
