"""From what the user names, a folder or a hub id, to a folder with a checkpoint in it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from asyncinfer.errors import ModelLoadError
from asyncinfer.weights.checkpoint import INDEX, SINGLE, read_index
from asyncinfer.weights.folder import checkpoint_file

__all__ = ["resolve"]

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
#: Everything an engine reads beside the weights. What is not here is never downloaded.
_SMALL_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
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
    folder = Path(model).expanduser()
    name = str(model)
    try:
        if name and folder.is_dir():  # Path("") is the current folder, which nobody meant
            return folder
        if folder.is_file():
            raise ModelLoadError("is a file; name the checkpoint's folder", file=name)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot be opened: {error}", file=name) from error
    if isinstance(model, Path) or not _HUB_ID.fullmatch(model):
        raise ModelLoadError("no such folder, and no hub id either", file=name)

    client = {
        "cache_dir": cache_dir,
        "endpoint": endpoint,
        "local_files_only": offline,
        "tqdm_class": None if show_progress else _silent_bar(),
    }
    folder = _download(model, revision, _SMALL_FILES, client)
    # The weights come from the very commit the index came from, even if the branch moves on.
    weights = [SINGLE]
    if checkpoint_file(folder, INDEX) is not None:
        weights = sorted(set(read_index(folder).values()))
    return _download(model, folder.name, weights, client)


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
