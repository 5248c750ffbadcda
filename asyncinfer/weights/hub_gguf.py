"""A GGUF file of a repository on the hub."""

from __future__ import annotations

from pathlib import Path

from asyncinfer.weights.gguf import find_gguf, is_gguf, split_names
from asyncinfer.weights.hub import HubModel, Unreachable

__all__ = ["resolve_gguf"]


def resolve_gguf(hub: HubModel, file: str) -> Path:
    """Fetch the file of the repository that is named `file`, or is the only one with `file` in its
    name; of a split model all parts. Returns the (first) file. The copy in the cache is taken if
    the hub does not answer, or if the revision is a commit. Raises `ModelLoadError`."""
    cached = _cached(hub, file)
    if cached is not None and (hub.offline or hub.is_commit):
        return cached
    if hub.offline:
        raise hub.refused(f"{file} is not there")
    try:
        commit, files = hub.listing(needed=cached is None)
    except Unreachable as error:
        if cached is None:
            raise hub.refused(str(error)) from error
        hub.log_unreachable(error)
        return cached
    name = find_gguf([one for one in files if is_gguf(one)], file, hub.model)
    if cached is not None and cached.parent.name == commit:
        return cached
    # By the branch, not by the commit, so that the cache learns the branch's commit.
    return hub.download(hub.revision, split_names(name)) / name


def _cached(hub: HubModel, file: str) -> Path | None:
    """The file in the cache, if all parts of its model are there."""
    if not is_gguf(file):
        return None
    names = split_names(file)
    folders = [hub.cached(name) for name in names]
    found = [folder for folder in folders if folder is not None]
    return found[0] / names[0] if len(found) == len(names) else None
