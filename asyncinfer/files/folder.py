"""A checkpoint's folder: which files in it may be opened."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Final

from asyncinfer.errors import ModelLoadError

__all__ = ["checkpoint_file", "following_links", "plain_name"]

#: Pointers of Git LFS have fewer.
_POINTER_BYTES: Final = 1024
#: The file by which the hub's client marks `<cache>/blobs` as its own.
_SHARED: Final = ".huggingface-shared-blobs"
_follow: ContextVar[bool] = ContextVar("asyncinfer_follow_links", default=False)


@contextmanager
def following_links(follow: bool = True) -> Iterator[None]:
    """Have `checkpoint_file` follow links out of a folder, to regular files only, in the `with`
    block. Only for folders whose maker is trusted, since a link may name any file."""
    token = _follow.set(follow)
    try:
        yield
    finally:
        _follow.reset(token)


def plain_name(name: str) -> bool:
    """Whether `name` names a file directly in a folder, on every system."""
    parts = (PurePosixPath(name).parts, PureWindowsPath(name).parts)
    return (
        all(part == (name,) for part in parts) and name not in ("", ".", "..") and "\0" not in name
    )


def checkpoint_file(folder: Path, name: str, within: str = "") -> Path | None:
    """The regular file `name` in `folder` (or in its subfolder `within`); None if there is no such
    name.

    `ModelLoadError` for a name or a symlink that leads out of the folder, for a pointer of Git LFS,
    and for anything but a regular file: opening a FIFO would wait for ever, and a device has side
    effects. Followed are the hub cache's own symlinks, `snapshots/<commit>/<name>` to the
    `blobs/<hash>` of the repository or of the cache, and in a block of `following_links` all.
    """
    if not plain_name(name):
        raise ModelLoadError("the name leads out of the checkpoint's folder", file=name)
    path = folder / within / name
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        # Of a folder that may not be entered nobody knows what is in it.
        raise ModelLoadError(f"cannot be opened: {error.strerror}", file=str(path)) from error
    try:
        real = path.resolve(strict=True)
        status = real.stat()
        mode, size = status.st_mode, status.st_size
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"cannot be opened: {error}", file=str(path)) from error
    if not _follow.get() and not any(real.is_relative_to(root) for root in _roots(folder)):
        raise ModelLoadError(
            f"is a link out of the checkpoint's folder, to {real}; if you trust who made the "
            "folder, follow_symlinks=True follows its links",
            file=str(path),
        )
    if not stat.S_ISREG(mode):
        raise ModelLoadError("is not a regular file", file=str(path))
    if size < _POINTER_BYTES and _is_pointer(real):
        raise ModelLoadError(
            "is a pointer of Git LFS, not the file itself: `git lfs pull` in its folder fetches it",
            file=str(path),
        )
    return path


def _is_pointer(path: Path) -> bool:
    """Whether Git wrote a file that stands for a large one, as it does without Git LFS."""
    try:
        return path.read_bytes().startswith(b"version https://git-lfs.github.com/")
    except OSError:
        # Whoever opens it says so.
        return False


def _roots(folder: Path) -> tuple[Path, ...]:
    """The folders that a checkpoint's links may lead to."""
    real = folder.resolve()
    repository = real.parent.parent
    if real.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return (real,)
    # Files that several repositories may have, such as all large ones of the hub.
    shared = repository.parent / "blobs"
    own = (real, repository / "blobs")
    return (*own, shared) if (shared / _SHARED).is_file() else own
