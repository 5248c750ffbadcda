"""A checkpoint is loaded beside the event loop, and no further than somebody wants it."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import anyio
import pytest
from support import Until

from asyncinfer import Engine, LoadProgress
from asyncinfer.builtin import MODEL_PATH

pytestmark = pytest.mark.anyio


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
            assert go_on.wait(30)

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
