"""The memory of KV pages is there before a step writes to them."""

from __future__ import annotations

import ctypes
import mmap
import threading
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncinfer import Engine
from asyncinfer.attention import KVCache, StateCache
from asyncinfer.runner import pages_ahead as module
from asyncinfer.runner.pages_ahead import PagesAhead, populate
from asyncinfer.scheduler import PageChanges

SHAPE: Any = SimpleNamespace(num_kv_heads=2, head_dim=16, num_layers=3, kv_parts=2)
PAGES, SIZE = 40, 4
#: Bytes of a page of one layer's keys or values.
PAGE = 2 * SIZE * 16 * 4


def cache() -> KVCache:
    return KVCache.allocate(SHAPE, PAGES, SIZE, torch.float32, "cpu")


def provided(ahead: PagesAhead, asked: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What it asks for until it has no more to do."""
    before = len(asked)
    while ahead.provide():
        assert len(asked) < 1000
    return asked[before:]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []

    def note(address: int, nbytes: int) -> bool:
        found.append((address, nbytes))
        return True

    monkeypatch.setattr(module, "populate", note)
    return found


def test_the_pages_that_come_next_are_provided_once(asked: list[tuple[int, int]]) -> None:
    kv = cache()
    ahead = PagesAhead([(1, kv)], ahead=8 * 6 * PAGE)
    regions = [part for layer in kv.storage for part in layer]
    starts = [region.data_ptr() for region in regions]
    assert provided(ahead, asked) == [(start, 8 * PAGE) for start in starts]
    none = PageChanges()
    ahead.used([none, none])
    ahead.used([])
    assert provided(ahead, asked) == []
    # Six are in use, the highest of which is the last but one to be listed.
    ahead.used([none, PageChanges(grown=[(0, 0, 2), (3, 1, 5), (0, 1, 4)])])
    assert provided(ahead, asked) == [(start + 8 * PAGE, 6 * PAGE) for start in starts]
    ahead.used([none, PageChanges(grown=[(0, 2, 3)])])
    assert provided(ahead, asked) == []
    # Those that came into use before they were provided are there, and the last page has none next.
    ahead.used([none, PageChanges(grown=[(0, 3, 34)])])
    assert provided(ahead, asked) == [(start + 35 * PAGE, 5 * PAGE) for start in starts]
    ahead.used([none, PageChanges(grown=[(0, 3, PAGES - 1)])])
    assert provided(ahead, asked) == []


def test_little_is_provided_at_a_time(
    asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 3 * PAGE)
    ahead = PagesAhead([(0, cache()), (1, cache())])
    sizes = [nbytes for _, nbytes in provided(ahead, asked)]
    assert max(sizes) == 3 * PAGE
    assert sum(sizes) == 2 * 6 * PAGES * PAGE


def test_it_ends_where_the_system_does_not_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count()

    def refuse(*_: int) -> bool:
        next(calls)
        return False

    monkeypatch.setattr(module, "populate", refuse)
    ahead = PagesAhead([(0, cache())])
    assert not ahead.provide()
    ahead.used([PageChanges(grown=[(0, 0, 5)])])
    assert not ahead.provide()
    assert next(calls) == 1


def test_states_and_caches_without_layers_have_nothing_to_provide(
    asked: list[tuple[int, int]],
) -> None:
    states: Any = object.__new__(StateCache)
    empty = KVCache.allocate(SHAPE, PAGES, SIZE, torch.float32, "cpu", layers=())
    ahead = PagesAhead([(0, states), (1, empty)])
    ahead.used([PageChanges(), PageChanges(grown=[(0, 0, 5)])])
    assert not ahead.provide()
    assert not asked


def test_memory_is_there_and_keeps_what_it_holds() -> None:
    pages = 16
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[3 * mmap.PAGESIZE] = 7
    # From within the second page to within the fifth.
    if not populate(place + mmap.PAGESIZE + 100, 3 * mmap.PAGESIZE):
        pytest.skip("a system that provides no memory")
    assert memory[3 * mmap.PAGESIZE] == 7
    there = (ctypes.c_ubyte * pages)()
    address, size = ctypes.c_void_p(place), ctypes.c_size_t(len(memory))
    assert ctypes.CDLL(None).mincore(address, size, there) == 0
    assert [each & 1 for each in there] == [0, 1, 1, 1, 1] + [0] * 11


def test_memory_that_is_not_the_processs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not populate(0, 1)
    monkeypatch.setattr(module, "_advise", None)
    assert not populate(ctypes.addressof(ctypes.create_string_buffer(8)), 8)


@pytest.mark.anyio
async def test_an_engine_provides_it_while_it_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On its own thread, and no longer than until something is posted."""
    threads: set[str] = set()
    several = threading.Event()
    calls = count()

    def endless(self: PagesAhead) -> bool:
        threads.add(threading.current_thread().name)
        if next(calls) > 3:
            several.set()
        return True

    monkeypatch.setattr(PagesAhead, "provide", endless)
    async with Engine(kv_bytes=8 << 20, max_context=256, max_running=2) as engine:
        assert several.wait(60)
        done = await engine.generate("def add(a, b):", max_tokens=2)
        assert done.usage.completion_tokens == 2
    assert threads == {"asyncinfer-decode"}
