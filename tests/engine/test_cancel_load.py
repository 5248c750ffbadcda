"""A checkpoint is loaded beside the event loop, and no further than somebody wants it."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import anyio
import pytest
from adapters.embedded import CONFIG, random_tensors
from huggingface_hub import constants
from support import Until
from weights.hub import SilentHub

from asyncinfer import Engine, LoadProgress
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.weights import hub as hub_module

pytestmark = pytest.mark.anyio

#: The thread of a call of the hub's client.
CALL = "asyncinfer-call"


def open_shards() -> int:
    """How many files of weights the process has open."""
    files = Path("/proc/self/fd")
    links = [os.readlink(file) for file in files.iterdir() if file.is_symlink()]
    return sum(link.endswith(".safetensors") for link in links)


def threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name.startswith("asyncinfer")}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
async def test_cancelled_while_it_loads(until: Until) -> None:
    gc.collect()
    before, others = open_shards(), threads()
    go_on = threading.Event()
    seen: list[LoadProgress] = []

    def progress(step: LoadProgress) -> None:
        seen.append(step)
        if len(seen) == 3:
            assert go_on.wait(120)

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                # The loop turns while a tensor is read.
                await until(lambda: len(seen) == 3)
                assert open_shards() == before + 1
                scope.cancel()

            tasks.start_soon(cancel)
            async with Engine(MODEL_PATH, device="cpu", progress=progress):
                raise AssertionError("opened")
    # Who cancelled has not waited for the loader.
    assert not go_on.is_set()
    go_on.set()
    await until(lambda: threads() <= others)
    assert len(seen) == 3
    assert 0 < seen[-1].bytes_done < seen[-1].bytes_total
    gc.collect()
    assert open_shards() == before


async def test_cancelled_while_it_is_fetched(
    until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that says nothing keeps no thread of an engine that nobody waits for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    others = threads()
    with SilentHub().serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                await until(lambda: hub.accepted)
                tasks.cancel_scope.cancel()

            tasks.start_soon(cancel)
            async with Engine("org/name", device="cpu"):
                raise AssertionError("opened")
        # The client's own thread ends with its patience.
        await until(lambda: not {one for one in threads() - others if one.name != CALL})


async def test_a_load_of_an_adapter_that_was_left_keeps_no_other_waiting(
    until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    # In turns it would wait for the hub's whole patience.
    monkeypatch.setattr(hub_module, "ANSWER_SECONDS", 1e6)
    with SilentHub().serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        async with Engine(MODEL_PATH, device="cpu") as engine:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(engine.adapters.load, "a", "org/name")
                await until(lambda: hub.accepted)
                tasks.cancel_scope.cancel()
            with anyio.fail_after(120):
                await engine.adapters.load("b", random_tensors(0), config=CONFIG)
            assert [info.name for info in engine.adapters.list()] == ["b"]
