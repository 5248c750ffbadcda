"""Hubs that do not answer, and models that are in the cache: nothing is waited for that is not
needed, and what is needed is not waited for without end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from safetensors.torch import save
from weights.hub import COMMIT, Hub, SilentHub

from asyncinfer.errors import ModelLoadError
from asyncinfer.runtime import cancellable
from asyncinfer.weights import hub as hub_module
from asyncinfer.weights import resolve, resolve_config

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors": save({"w": torch.ones(2)}),
}
EVENT = tuple[str, dict[str, Any]]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[EVENT]:
    told: list[EVENT] = []
    monkeypatch.setattr(hub_module, "emit", lambda event, **more: told.append((event, more)))
    return told


@pytest.fixture
def silent() -> Iterator[SilentHub]:
    with SilentHub().serve() as hub:
        yield hub


@pytest.fixture
def shorten(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every patience a short one, once what is to be fetched was fetched."""

    def act() -> None:
        ticks = count()
        # Time goes on by a tenth of a second whenever it is asked for.
        clock = SimpleNamespace(monotonic=lambda: next(ticks) / 10)
        monkeypatch.setattr(hub_module, "time", clock)
        monkeypatch.setattr(hub_module, "ANSWER_SECONDS", 0.4)
        monkeypatch.setattr(hub_module, "FRESHNESS_SECONDS", 0.3)
        monkeypatch.setattr(hub_module, "SILENT_SECONDS", 0.4)
        monkeypatch.setattr(hub_module, "TELL_SECONDS", 0.1)
        for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
            monkeypatch.setattr(constants, name, 0)

    return act


def fetched(cache: Path, files: dict[str, bytes] = FILES) -> Path:
    with Hub("org/name", files).serve() as hub:
        return resolve("org/name", cache_dir=cache, endpoint=hub.url)


@pytest.mark.parametrize("take", [resolve, resolve_config])
@pytest.mark.parametrize("revision", [None, COMMIT])
def test_one_that_never_answers(
    take: Any,
    revision: str | None,
    silent: SilentHub,
    tmp_path: Path,
    events: list[EVENT],
    shorten: Callable[[], None],
) -> None:
    shorten()
    with pytest.raises(ModelLoadError) as caught:
        take("tinylm", revision=revision, cache_dir=tmp_path, endpoint=silent.url)
    says = str(caught.value)
    assert says.startswith("model 'tinylm': there is no such folder in ")
    assert "did you mean" not in says
    for part in (silent.url, "has not answered", "'org/name'", "path of a checkpoint's folder"):
        assert part in says
    assert silent.accepted <= 1
    name, fields = events[0]
    assert (name, fields["model"], fields["hub"]) == ("hub_silent", "tinylm", silent.url)


def test_what_is_cached_is_taken_where_the_hub_is_silent(
    silent: SilentHub, tmp_path: Path, events: list[EVENT], shorten: Callable[[], None]
) -> None:
    folder = fetched(tmp_path)
    shorten()
    assert resolve("org/name", cache_dir=tmp_path, endpoint=silent.url) == folder
    assert silent.accepted <= 1
    config = resolve_config("org/name", cache_dir=tmp_path, endpoint=silent.url)
    assert config == folder / "config.json"
    assert [name for name, _ in events if name != "hub_silent"] == ["hub_unreachable"] * 2


def test_nobody_is_asked_for_a_cached_commit(silent: SilentHub, tmp_path: Path) -> None:
    folder = fetched(tmp_path)
    for take, found in ((resolve, folder), (resolve_config, folder / "config.json")):
        assert take("org/name", revision=COMMIT, cache_dir=tmp_path, endpoint=silent.url) == found
    assert silent.accepted == 0


@pytest.mark.parametrize("take", [resolve, resolve_config])
def test_nobody_is_asked_offline(
    take: Any, silent: SilentHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    there = partial(take, cache_dir=tmp_path, endpoint=silent.url)
    assert there("org/name").is_relative_to(tmp_path)
    with pytest.raises(ModelLoadError, match=r"hub's cache \(.*offline nothing else is asked"):
        there("org/other")
    assert silent.accepted == 0


def test_one_question_for_what_is_cached_and_current(tmp_path: Path) -> None:
    folder = fetched(tmp_path)
    with Hub("org/name", FILES).serve() as hub:
        assert resolve("org/name", cache_dir=tmp_path, endpoint=hub.url) == folder
    assert hub.asked == ["/api/models/org/name"]


def test_a_file_that_the_cache_lacks_is_fetched(tmp_path: Path) -> None:
    """Whoever filled the cache may not have taken the template."""
    more = {**FILES, "chat_template.jinja": b"{{ messages }}"}
    folder = fetched(tmp_path, more)
    (folder / "chat_template.jinja").unlink()
    with Hub("org/name", more).serve() as hub:
        assert resolve("org/name", cache_dir=tmp_path, endpoint=hub.url) == folder
    assert (folder / "chat_template.jinja").read_bytes() == b"{{ messages }}"


def test_templates_of_a_subfolder_are_fetched(tmp_path: Path) -> None:
    """Then nothing is missing, and the hub is asked once."""
    name = "additional_chat_templates/tool_use.jinja"
    more = {**FILES, name: b"{{ tools }}", "additional_chat_templates/readme.txt": b"no"}
    folder = fetched(tmp_path, more)
    assert (folder / name).read_bytes() == b"{{ tools }}"
    assert not (folder / "additional_chat_templates" / "readme.txt").exists()
    with Hub("org/name", more).serve() as hub:
        assert resolve("org/name", cache_dir=tmp_path, endpoint=hub.url) == folder
    assert hub.asked == ["/api/models/org/name"]


def test_a_newer_commit_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched(tmp_path)
    monkeypatch.setattr("weights.hub.COMMIT", "f" * 40)
    with Hub("org/name", {**FILES, "config.json": b'{"new": 1}'}).serve() as hub:
        folder = resolve("org/name", cache_dir=tmp_path, endpoint=hub.url)
    assert folder.name == "f" * 40
    assert json.loads((folder / "config.json").read_text()) == {"new": 1}


def test_what_killed_processes_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = fetched(tmp_path).parent.parent / "blobs"
    locks = tmp_path / ".locks" / "models--org--name"
    begun, left, locked = (blobs / f"{name}.c0ffee.incomplete" for name in ("a1", "b2", "c3"))
    for path in (begun, left, locked):
        path.write_bytes(b"part")
    for path in (left, locked):
        os.utime(path, (1, 1))
    monkeypatch.setattr("weights.hub.COMMIT", "f" * 40)
    with WeakFileLock(locks / "c3.lock"), Hub("org/name", FILES).serve() as hub:
        resolve("org/name", cache_dir=tmp_path, endpoint=hub.url)
    assert sorted(blobs.glob("*.incomplete")) == [begun, locked]


class Stuck:
    """The client in the middle of a download: it gives a sign `signs` times, each as late as may
    be, then no more. It has the clock."""

    def __init__(self, signs: int) -> None:
        self.signs = signs
        self.go_on = threading.Event()
        self.given = 0
        self.now = 0.0
        self.looked = threading.Semaphore(0)

    def monotonic(self) -> float:
        self.looked.release()
        return self.now

    def __call__(self, model: str, *, tqdm_class: Any, **options: Any) -> str:
        bar = tqdm_class(total=100)
        for _ in range(self.signs):
            bar.update(1)
            self.given += 1
            self.be_seen()
            self.now += 0.015
        bar.close()
        self.be_seen()
        self.now += 1000.0
        self.go_on.wait(120)
        return ""

    def be_seen(self) -> None:
        """Wait for two looks that began after this. Each takes one time or two."""
        while self.looked.acquire(blocking=False):
            pass
        for _ in range(5):
            self.looked.acquire()


def test_a_download_that_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes slowly is waited for; silence is not."""
    stuck = Stuck(signs=22)
    monkeypatch.setattr(hub_module, "time", stuck)
    monkeypatch.setattr(hub_module, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", stuck)
    try:
        with Hub("org/name", FILES).serve() as hub:
            with pytest.raises(ModelLoadError, match=r"has not answered for 0\.02 s") as caught:
                resolve("org/name", cache_dir=tmp_path, endpoint=hub.url)
    finally:
        stuck.go_on.set()
        for thread in threading.enumerate():
            if thread.name == "asyncinfer-call":
                thread.join(120)
    assert stuck.given == 22
    assert "model 'org/name'" in str(caught.value)


class Left(Exception):
    """Whoever wanted a model has gone."""


def test_a_download_that_nobody_wants_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who wanted it waits no longer, and the client ends with the next part of the file: its lock
    is free for the next one, who gets the file."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    files = {**FILES, "model.safetensors": save({"w": torch.zeros(50_000)})}
    begun, left = threading.Event(), threading.Event()

    def part(name: str) -> None:
        if name == "model.safetensors":
            begun.set()
            assert left.wait(120)

    def check() -> None:
        if begun.is_set():
            raise Left

    with Hub("org/name", files, part=part).serve() as hub:
        with pytest.raises(Left), cancellable(check):
            resolve("org/name", cache_dir=tmp_path, endpoint=hub.url)
        calls = [one for one in threading.enumerate() if one.name == "asyncinfer-call"]
        assert calls
        left.set()
        for call in calls:
            call.join(120)
        assert not any(call.is_alive() for call in calls)
        # Nobody fetched the file to its end, and nothing of it is in the way.
        assert not [*tmp_path.rglob("model.safetensors")]
        folder = resolve("org/name", cache_dir=tmp_path, endpoint=hub.url)
        assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_silent_hub_that_nobody_waits_for(silent: SilentHub, tmp_path: Path) -> None:
    def check() -> None:
        if silent.accepted:
            raise Left

    with pytest.raises(Left), cancellable(check):
        resolve("org/name", cache_dir=tmp_path, endpoint=silent.url)


def test_a_broken_index_in_the_cache_heals(tmp_path: Path) -> None:
    folder = fetched(tmp_path)
    (folder / "model.safetensors.index.json").write_text("[]")
    with Hub("org/name", FILES).serve() as hub:
        with pytest.raises(ModelLoadError, match="must hold a JSON object"):
            resolve("org/name", cache_dir=tmp_path, endpoint=hub.url)
    assert len(hub.asked) > 1
