"""A GGUF file of a repository on the hub."""

from __future__ import annotations

from pathlib import Path

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.gguf import find_gguf, is_gguf, split_names
from asyncinfer.weights.hub import HubModel, NotKept, Unreachable

__all__ = ["cached_gguf", "resolve_gguf"]


def resolve_gguf(hub: HubModel, file: str) -> Path:
    """Fetch the file of the repository that is named `file`, or is the only one with `file` in its
    name; of a split model all parts. Returns the (first) file. The copy in the cache is taken if
    the hub does not answer, if the cache cannot keep a newer one, or if the revision is a commit.
    Raises `ModelLoadError`."""
    # Refuses a later part of a split model by its number.
    split_names(file)
    cached = cached_gguf(hub, file)
    if cached is not None and (hub.offline or (hub.is_commit and str(cached).endswith(f"/{file}"))):
        return cached
    if hub.offline:
        raise hub.refused(f"{file} is not there, or is a part of several names")
    try:
        commit, files = hub.listing(needed=cached is None)
    except Unreachable as error:
        return hub.instead(cached, error)
    name = find_gguf([one for one in files if is_gguf(one)], file, hub.model)
    folder = hub.snapshot()
    if folder is not None and folder.name == commit and _is_whole(folder, name):
        return folder / name
    try:
        if cached is not None:
            hub.download(commit, split_names(name))
        # By the branch, not by the commit, so that the cache learns the branch's commit.
        return hub.download(hub.revision, split_names(name)) / name
    except NotKept as error:
        return hub.instead(cached, error)


def cached_gguf(hub: HubModel, file: str) -> Path | None:
    """The file in the cache that `find_gguf` finds at the revision, if all parts of its model are
    there."""
    folder = hub.snapshot()
    if folder is None:
        return None
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if is_gguf(path))
    try:
        name = find_gguf(names, file, hub.model)
    except ModelLoadError:
        # The hub may have what is not here.
        return None
    return folder / name if _is_whole(folder, name) else None


def _is_whole(folder: Path, name: str) -> bool:
    """Whether the file is there, and every other part of a split model."""
    return all((folder / part).is_file() for part in split_names(name))
