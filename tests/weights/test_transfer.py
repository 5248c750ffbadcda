"""Calls of the hub's client that are given up, and what they tell until then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download
from weights.hub import Hub

from asyncinfer.weights.transfer import PART_BYTES, Transfer


def test_a_file_tells_of_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow connection brings less than the client's own 10 MB in a minute."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10 << 20)
    transfer = Transfer()
    with Hub("org/name", {"model.gguf": bytes(4 * PART_BYTES)}).serve() as hub:
        transfer.run(
            lambda: snapshot_download(
                "org/name",
                cache_dir=tmp_path,
                endpoint=hub.url,
                tqdm_class=transfer.bar(shown=False),
            )
        )
    assert transfer.updates >= 4
    # The program's own downloads are as they were.
    assert constants.DOWNLOAD_CHUNK_SIZE == 10 << 20


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Tells when what comes from Xet's storage was ended."""
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "hf_xet", threading)
    abort = "huggingface_hub.utils._xet.abort_xet_session"
    monkeypatch.setattr(abort, lambda: calls.append("ended"), raising=False)
    return calls


def test_what_comes_from_xet_ends_at_once(ended: list[str]) -> None:
    transfer, other = Transfer(), Transfer()
    other.run(lambda: transfer.run(transfer.give_up))
    # Another one's would end, too.
    assert not ended
    transfer.run(transfer.give_up)
    assert ended == ["ended"]
    transfer.give_up()
    assert ended == ["ended"]


@pytest.mark.parametrize("touch", ["update", "refresh"])
def test_no_part_and_no_file_more_once_it_was_given_up(touch: str) -> None:
    transfer = Transfer()
    bar = transfer.bar(shown=False)(total=2)
    act: Callable[[], object] = getattr(bar, touch)
    act()
    transfer.give_up()
    with pytest.raises(BaseException, match=r"^$") as caught:
        act()
    assert not isinstance(caught.value, Exception)
    # An error on a thread that is not Python's would be printed.
    alien = threading.Thread(target=act, name="Dummy-1")
    alien.start()
    alien.join()
