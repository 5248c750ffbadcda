"""Work that an engine's thread shares with threads of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asyncinfer.kernels import threads
from asyncinfer.kernels.threads import name_thread, set_thread_count, share, thread_name

pytestmark = pytest.mark.skipif(
    not set_thread_count(torch.get_num_threads()), reason="torch without OpenMP"
)


def on_a_thread(work: Callable[[], None], count: int) -> None:
    """Run `work` on a thread of its own, whose operators take `count` threads."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            name_thread()
            set_thread_count(count)
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def meeting(parties: int) -> Callable[[int], None]:
    """Work that goes on when as many threads are in it as there are parties."""
    barrier = threading.Barrier(parties, timeout=120)
    return lambda _: (barrier.wait(), None)[1]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("items", [0, 1, 2, 100])
def test_every_item_is_computed_once(count: int, items: int) -> None:
    done: list[int] = []

    def check() -> None:
        share(range(items), done.append)
        assert torch.get_num_threads() == count

    on_a_thread(check, count)
    assert sorted(done) == list(range(items))


@pytest.mark.parametrize("inference", [True, False])
def test_threads_compute_at_once_and_each_by_itself(inference: bool) -> None:
    meet = meeting(3)
    seen: set[tuple[int, str | None, int, bool]] = set()

    def work(item: int) -> None:
        meet(item)
        ident = threading.get_native_id()
        counted = torch.get_num_threads()
        seen.add((ident, thread_name(ident), counted, torch.is_inference_mode_enabled()))

    def run() -> None:
        with torch.inference_mode(inference):
            share(range(6), work)
            first = set(seen)
            share(range(3), work)
        assert seen == first, "the threads of the first call compute the second"

    on_a_thread(run, 3)
    assert len(seen) == 3
    ((_, counted, mode),) = {each[1:] for each in seen}
    assert (counted, mode) == (1, inference)


def test_work_that_is_not_shared_stays_on_this_thread() -> None:
    seen: set[tuple[int, int]] = set()

    def run() -> None:
        mine = threading.get_ident()
        share(
            range(20),
            lambda _: seen.add((threading.get_ident(), torch.get_num_threads())),
            alone=True,
        )
        assert seen == {(mine, 2)}

    on_a_thread(run, 2)


def test_the_first_error_ends_it_and_is_raised() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 3:
            raise ValueError("three")
        done.append(item)

    def run() -> None:
        with pytest.raises(ValueError, match="three"):
            share(range(1000), work)
        assert torch.get_num_threads() == 2
        share(range(2), meeting(2))

    on_a_thread(run, 2)
    assert len(done) < 1000


def test_an_error_of_a_thread_that_helps_is_raised() -> None:
    def run() -> None:
        mine, meet = threading.get_ident(), meeting(2)

        def work(item: int) -> None:
            meet(item)
            if threading.get_ident() != mine:
                raise ValueError("elsewhere")

        with pytest.raises(ValueError, match="elsewhere"):
            share(range(2), work)

    on_a_thread(run, 2)


def test_where_the_system_has_no_thread_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ThreadPoolExecutor, *arguments: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    done: list[int] = []
    on_a_thread(lambda: share(range(10), done.append), 2)
    assert sorted(done) == list(range(10))


def test_threads_end_with_the_one_that_they_help() -> None:
    helpers: set[threading.Thread] = set()
    meet = meeting(2)

    def work(item: int) -> None:
        meet(item)
        helpers.add(threading.current_thread())

    on_a_thread(lambda: share(range(2), work), 2)
    for thread in helpers:
        thread.join(120)
        assert not thread.is_alive()


def test_a_forked_process_begins_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    teams = []

    def run() -> None:
        for pid in (1, 1, 2):
            monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
            teams.append(threads._team(1))

    on_a_thread(run, 2)
    assert teams[0] is teams[1] is not teams[2]
