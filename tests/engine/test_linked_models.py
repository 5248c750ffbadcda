"""A folder of links to files elsewhere, as volumes that models share have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from asyncinfer import Engine, EngineConfig
from asyncinfer.builtin import DRAFT_PATH
from asyncinfer.errors import ModelLoadError
from asyncinfer.models import examine


def link(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for file in DRAFT_PATH.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


@pytest.mark.anyio
async def test_links_are_followed_where_the_user_says_so(tmp_path: Path) -> None:
    folder = link(tmp_path / "model")
    with pytest.raises(ModelLoadError, match="follow_symlinks=True"):
        await Engine.open(folder, device="cpu")
    with pytest.raises(ModelLoadError, match="follow_symlinks=True"):
        examine(folder)
    assert not examine(folder, follow_symlinks=True).problems
    async with Engine(folder, device="cpu", follow_symlinks=True, kv_bytes=1 << 22) as engine:
        assert (await engine.generate("def ", max_tokens=3)).token_ids


@pytest.mark.anyio
async def test_links_of_the_hub_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever filled the repository is not whom the user trusts."""  # fault 48
    commit = "0" * 40
    repository = tmp_path / "models--org--name"
    link(repository / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="is a link out of the checkpoint's folder"):
        await Engine.open("org/name", revision=commit, device="cpu", follow_symlinks=True)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_it_is_yes_or_no(value: object) -> None:
    with pytest.raises(ValueError, match=r"follow_symlinks=.*must be True or False"):
        EngineConfig(follow_symlinks=value)  # type: ignore[arg-type]
