"""What is submitted at once is computed together: a thread that a long prompt wakes waits for
more."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from asyncinfer.engine.core import Core
from asyncinfer.engine.inbox import Command, Inbox
from asyncinfer.engine.thread import LONG_PROMPT, DecodeThread


def request(tokens: int) -> Any:
    return SimpleNamespace(prompt_len=tokens)


class Naps:
    """In the place of `time.sleep`: posts so many requests in each nap."""

    def __init__(self, inbox: Inbox, posts: list[int], patch: pytest.MonkeyPatch) -> None:
        self.taken = 0
        self._inbox = inbox
        self._posts = posts
        patch.setattr(time, "sleep", self._nap)

    def _nap(self, seconds: float) -> None:
        assert 0.0 < seconds <= 0.001
        for _ in range(self._posts[self.taken] if self.taken < len(self._posts) else 0):
            self._inbox.post(Command.SUBMIT, request(1))
        self.taken += 1


def test_it_waits_as_long_as_more_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox()
    inbox.post(Command.SUBMIT, request(1))
    naps = Naps(inbox, [2, 1, 0, 5], monkeypatch)
    inbox.settle()
    assert naps.taken == 3
    assert len(list(inbox.read())) == 4


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = Inbox()
    naps = Naps(inbox, [1] * 100, monkeypatch)
    inbox.settle()
    assert naps.taken == 10


@pytest.mark.parametrize(
    ("command", "tokens", "waits"),
    [
        (Command.SUBMIT, 100, True),
        (Command.SUBMIT, 99, False),
        (Command.ABORT, 100, False),
        (None, 0, False),
    ],
)
def test_a_thread_waits_for_more_where_the_prompt_takes_long(
    command: Command | None, tokens: int, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox = Inbox()
    if command is not None:
        inbox.post(command, request(tokens))
    naps = Naps(inbox, [3], monkeypatch)
    thread_of(inbox).wait(0.0)
    assert naps.taken == (2 if waits else 0)
    assert len(list(inbox.read())) == (command is not None) + 3 * waits


def thread_of(
    inbox: Inbox,
    prepare: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> DecodeThread:
    """One whose prompts take a hundredth of `LONG_PROMPT` for each token."""
    pace = SimpleNamespace(seconds=lambda tokens: tokens * LONG_PROMPT / 100)
    scheduler = SimpleNamespace(planner=SimpleNamespace(pace=pace))
    none: Any = None
    runtime: Any = SimpleNamespace(clock=clock)
    thread = DecodeThread(none, none, none, runtime, 1.0)
    runner = SimpleNamespace(prepare=prepare)
    thread.core = cast("Core", SimpleNamespace(inbox=inbox, scheduler=scheduler, runner=runner))
    return thread


class NotedInbox(Inbox):
    """Does not wait, and notes for how long it would have."""

    waited = -1.0

    def wait(self, seconds: float) -> None:
        self.waited = seconds


@pytest.mark.parametrize(
    ("enough", "posts", "calls"),
    [(3, 99, 3), (99, 5, 5), (99, 99, 10)],
    ids=["no more", "posted", "time over"],
)
def test_how_long_a_runner_prepares(enough: int, posts: int, calls: int) -> None:
    inbox = NotedInbox()
    prepared = 0

    def prepare() -> bool:
        nonlocal prepared
        prepared += 1
        if prepared == posts:
            inbox.post(Command.ABORT, None)
        return prepared < enough

    # Each time takes a second.
    thread_of(inbox, prepare, lambda: 100.0 + prepared).wait(10.0)
    assert prepared == calls
    assert inbox.waited == 10.0 - calls


def test_the_command_that_woke_is_dropped_with_the_others() -> None:
    inbox = Inbox()
    for tokens in (1, 2):
        inbox.post(Command.RELEASE, request(tokens))
    inbox.wait(1.0)
    assert [each.prompt_len for each in inbox.close()] == [1, 2]
    assert inbox.empty()
