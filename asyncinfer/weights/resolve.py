"""From what the user names, a folder or a hub id, to a folder with a checkpoint in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.checkpoint import INDEX, SINGLE, read_index
from asyncinfer.weights.folder import checkpoint_file

__all__ = ["resolve", "resolve_config"]

_CONFIG = "config.json"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
#: Everything an engine reads beside the weights. What is not here is never downloaded.
_SMALL_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    _CONFIG,
    "generation_config.json",
    INDEX,
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: str | Path | None = None,
    endpoint: str | None = None,
    show_progress: bool = False,
) -> Path:
    """The local folder of `model`: a folder as it is, or a hub id (`"org/name"`), downloaded into
    the hub's cache with only the files an engine needs.

    `revision` is a branch, tag or commit of the hub; `offline` takes what the cache holds;
    `show_progress` lets the hub's client draw its bars. Raises `ModelLoadError`.
    """
    local = _local(model)
    if local is not None:
        if not local.is_dir():
            raise ModelLoadError("is a file; name the checkpoint's folder", file=str(model))
        return local
    hub_id = _hub_id(model)
    client = _client(offline, cache_dir, endpoint, show_progress)
    folder = _download(hub_id, revision, _SMALL_FILES, client)
    # The weights come from the very commit the index came from, even if the branch moves on.
    weights = [SINGLE]
    if checkpoint_file(folder, INDEX) is not None:
        weights = sorted(set(read_index(folder).values()))
    folder = _download(hub_id, folder.name, weights, client)
    for name in weights:
        # A cache may hold less than the hub does.
        if checkpoint_file(folder, name) is None:
            where = "the hub's cache" if offline else "the hub, or its cache"
            raise ModelLoadError(f"{where} does not have its {name}", file=hub_id)
    return folder


def resolve_config(
    model: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: str | Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The `config.json` of `model`: in a folder, the file itself, or of a hub id, of which nothing
    else is fetched. Arguments and errors are those of `resolve`."""
    folder = _local(model)
    if folder is not None and folder.is_file():
        return folder
    if folder is None:
        client = _client(offline, cache_dir, endpoint, show_progress=False)
        folder = _download(_hub_id(model), revision, (_CONFIG,), client)
    found = checkpoint_file(folder, _CONFIG)
    if found is None:
        raise ModelLoadError("no such file", file=str(folder / _CONFIG))
    return found


def _local(model: str | Path) -> Path | None:
    """The folder or regular file that `model` names; None if there is none."""
    path = Path(model).expanduser()
    try:
        # Path("") is the current folder, which nobody meant.
        if not str(model) or not path.exists():
            return None
        if path.is_dir() or path.is_file():
            return path
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot be opened: {error}", file=str(model)) from error
    raise ModelLoadError("is neither a folder nor a regular file", file=str(model))


def _hub_id(model: str | Path) -> str:
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise ModelLoadError("no such folder, and no hub id either", file=str(model))
    return model


def _client(
    offline: bool, cache_dir: str | Path | None, endpoint: str | None, show_progress: bool
) -> dict[str, Any]:
    return {
        "cache_dir": cache_dir,
        "endpoint": endpoint,
        "local_files_only": offline,
        "tqdm_class": None if show_progress else _silent_bar(),
    }


def _download(
    model: str, revision: str | None, files: list[str] | tuple[str, ...], client: dict[str, Any]
) -> Path:
    from huggingface_hub import snapshot_download

    # Names with the wildcards of fnmatch would match other files.
    patterns = [re.sub(r"([*?[])", r"[\1]", file) for file in files]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns, **client))
    except Exception as error:  # The client's transport errors differ from version to version.
        at = f" at revision {revision}" if revision else ""
        raise ModelLoadError(f"cannot be had from the hub{at}: {error}", file=model) from error


def _silent_bar() -> type[Any]:
    """The hub's progress bar, which would write to the host's stderr, drawing nothing."""
    import huggingface_hub.utils as hub

    bar: Any = hub.tqdm  # type: ignore[attr-defined]

    def silent(self: Any, *args: Any, **options: Any) -> None:
        bar.__init__(self, *args, **{**options, "disable": True})

    return type("SilentBar", (bar,), {"__init__": silent})
