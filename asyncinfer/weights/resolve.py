"""From what a user calls a model to a folder: a local path, or a snapshot from the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from asyncinfer.errors import ModelLoadError

__all__ = ["resolve"]

#: All an engine reads. Weights in other formats and remote code are never fetched.
_NEEDED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
)


def resolve(model: str | Path, *, revision: str | None = None) -> Path:
    """The folder of `model`: itself if it is one, else the snapshot of that hub id, downloaded
    unless it is cached. The hub's own settings apply (cache, token, offline mode).

    Raises `ModelLoadError` saying what was looked for and where.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    name = str(model)
    if isinstance(model, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError("is not a folder", file=name)
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(_NEEDED))
        )
    except HFValidationError as error:
        raise ModelLoadError(f"is neither a folder nor a hub id: {error}", file=name) from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            "is no local folder, is not in the hub's cache, and the hub cannot be reached",
            file=name,
        ) from error
    except HfHubHTTPError as error:
        raise ModelLoadError(f"the hub refused it: {error}", file=name) from error
    except OSError as error:
        raise ModelLoadError(f"cannot be fetched from the hub: {error}", file=name) from error
