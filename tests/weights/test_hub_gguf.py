"""GGUF files of the hub, against one on localhost: what is fetched, and what the cache is enough
for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from weights.hub import COMMIT, Hub

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights import resolve, resolve_config

SPLIT = ["Q4_K_M/m-00001-of-00002.gguf", "Q4_K_M/m-00002-of-00002.gguf"]
FILES = {"README.md": b"hello", SPLIT[0]: b"first", SPLIT[1]: b"second", "m-Q8_0.gguf": b"eight"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("org/name", dict(FILES)).serve() as hub:
        yield hub


@pytest.mark.parametrize("file", [SPLIT[0], "q4_k", "m-00001"])
def test_what_was_fetched_is_there_without_the_hub(file: str, hub: Hub, tmp_path: Path) -> None:
    """Also in a folder of the repository, and by a part of its name."""
    take = partial(resolve, f"org/name:{file}", cache_dir=tmp_path, endpoint=hub.url)
    with pytest.raises(ModelLoadError, match="not there, or is a part of several names"):
        take(offline=True)
    path = take()
    assert path.is_file()
    assert path == path.parents[1] / SPLIT[0]
    assert sorted(hub.fetched) == SPLIT
    hub.fetched.clear()
    assert take() == take(revision=COMMIT) == take(offline=True) == path
    assert resolve_config(f"org/name:{file}", cache_dir=tmp_path) == path
    assert hub.fetched == []
    path.with_name("m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match="not there"):
        take(offline=True)


def test_a_file_of_the_cache_is_not_taken_for_another(hub: Hub, tmp_path: Path) -> None:
    """A part of a name may fit one file in the cache, and more of the hub."""
    take = partial(resolve, cache_dir=tmp_path, endpoint=hub.url)
    eight = take("org/name:Q8")
    assert take("org/name:m", offline=True) == eight
    for revision in (None, COMMIT):
        with pytest.raises(ModelLoadError, match="holds several files named like 'm'"):
            take("org/name:m", revision=revision)


@pytest.mark.parametrize("file", ["../m.gguf", "x.gguf", "*.gguf"])
def test_a_file_that_is_not_there(file: str, hub: Hub, tmp_path: Path) -> None:
    take: Any = partial(resolve, f"org/name:{file}", cache_dir=tmp_path, endpoint=hub.url)
    with pytest.raises(ModelLoadError, match="holds no file named like"):
        take()
    with pytest.raises(ModelLoadError, match="is not there"):
        take(offline=True)


def test_a_later_part_is_refused_by_its_number(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="is file 2 of 2: name the first of them"):
        resolve(f"org/name:{SPLIT[1]}", cache_dir=tmp_path, endpoint=hub.url)


def test_a_repository_of_gguf_files(hub: Hub, tmp_path: Path) -> None:
    """Of several the error names each; the only one is taken, as it is of a folder."""
    take = partial(resolve, "org/name", cache_dir=tmp_path, endpoint=hub.url)
    with pytest.raises(ModelLoadError, match=rf"several files of GGUF; name one of: {SPLIT[0]}, m"):
        take()
    assert hub.fetched == []
    for name in SPLIT:
        del hub.files[name]
    # Such a repository may have the config of the model that it was made of.
    hub.files = {**hub.files, "config.json": b"{}"}
    path = take()
    assert path.name == "m-Q8_0.gguf"
    assert take(offline=True) == path
    hub.url = ""
    assert resolve("org/name", cache_dir=tmp_path, endpoint="http://127.0.0.1:9") == path
