"""`resolve`: from a path, a hub id or the name of a model to a checkpoint on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from asyncinfer.errors import ModelLoadError
from asyncinfer.files import QUANT_JSON, checkpoint_file
from asyncinfer.weights.checkpoint import INDEX, SINGLE, read_index, without_weights
from asyncinfer.weights.gguf import find_gguf, is_gguf
from asyncinfer.weights.hub import HubModel, NotKept, Unreachable, is_hub_id
from asyncinfer.weights.hub_gguf import cached_gguf, resolve_gguf
from asyncinfer.weights.named import NAMED_MODELS
from asyncinfer.weights.pull import pull

__all__ = ["resolve", "resolve_config"]

_CONFIG = "config.json"
#: Files of a tokenizer, of which a model has at least one.
_TOKENIZERS = ("hy.tiktoken", "tiktoken.model", "tokenizer.json")
#: Every file that an engine reads beside the weights. No other is downloaded.
_SMALL_FILES = (
    "added_tokens.json",
    "*_Dense/config.json",
    "*_Dense/model.safetensors",
    "*_Pooling/config.json",
    "additional_chat_templates/*.jinja",
    "chat_template.jinja",
    "chat_template.json",
    _CONFIG,
    "config_sentence_transformers.json",
    "generation_config.json",
    INDEX,
    QUANT_JSON,
    "modules.json",
    "sentence_bert_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    *_TOKENIZERS,
)


def resolve(
    model: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: str | Path | None = None,
    endpoint: str | None = None,
    show_progress: bool = False,
    check: Callable[[Path], object] = lambda folder: None,
) -> Path:
    """The local checkpoint of `model`, a folder or a GGUF file: a path as it is; a hub id
    (`"org/name"`), downloaded into the hub's cache with only the files an engine needs, or the only
    GGUF file if it has no safetensors; a GGUF file of the hub (`"org/name:file.gguf"`, or a part of
    its name that no other file there has, as `"org/name:Q4_K_M"`); or one of `NAMED_MODELS`,
    fetched by `pull`.

    `revision` is a branch, tag or commit of the hub. `offline` takes what the cache holds, as
    `HF_HUB_OFFLINE` does. `show_progress` lets the hub's client draw its bars. A model that is
    whole in the cache is opened without the hub if that does not answer at once, or if the revision
    is a commit. `check` is called with the folder of the small files before safetensors are
    fetched, which may be for nothing. Raises `ModelLoadError`, and what `check` does.
    """
    local = _local(model)
    if local is not None:
        return _local_checkpoint(local)
    if model in NAMED_MODELS and revision is None:
        return pull(
            NAMED_MODELS[str(model)],
            offline=offline,
            cache_dir=cache_dir,
            endpoint=endpoint,
            show_progress=show_progress,
        )
    hub_id, file = (model, "") if isinstance(model, Path) else _parts(model)
    hub = HubModel(
        _hub_id(hub_id),
        revision,
        offline=offline,
        cache_dir=cache_dir,
        endpoint=endpoint,
        show_progress=show_progress,
    )
    if file:
        return resolve_gguf(hub, file)
    cached = hub.cached()
    if not hub.offline:
        folder = _fetch(hub, cached if cached is not None and _is_whole(cached) else None, check)
    elif cached is not None:
        folder = cached
    else:
        found = cached_gguf(hub, "")
        if found is None:
            raise hub.refused("it is not there")
        return found
    if is_gguf(folder):
        return folder
    for name in _weights(folder):
        # A cache may hold a part of the model only.
        if checkpoint_file(folder, name) is None:
            where = "the hub's cache" if hub.offline else "the hub, or its cache"
            raise ModelLoadError(f"{where} does not have its {name}", file=hub.model)
    return folder


def resolve_config(
    model: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: str | Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The `config.json` of `model`: the file itself, in a folder, or of a hub id, of which nothing
    else is fetched. Of a model in GGUF it is the GGUF file, which has to be here already. Arguments
    and errors are those of `resolve`."""
    folder = _local(model)
    if folder is not None and folder.is_file():
        return folder
    if folder is None:
        file = _gguf_here(model, revision, cache_dir, endpoint)
    else:
        file = _local_checkpoint(folder)
    if file is not None and is_gguf(file):
        return file
    if folder is None:
        hub = HubModel(
            _hub_id(model),
            revision,
            offline=offline,
            cache_dir=cache_dir,
            endpoint=endpoint,
            show_progress=False,
        )
        folder = _config_folder(hub)
    found = checkpoint_file(folder, _CONFIG)
    if found is None:
        raise ModelLoadError("no such file", file=str(folder / _CONFIG))
    return found


def _gguf_here(
    model: str | Path,
    revision: str | None,
    cache_dir: str | Path | None,
    endpoint: str | None,
) -> Path | None:
    """The GGUF file that a name or `"org/name:file"` stands for, if `model` is one. It is
    not fetched, since it has the weights too. Raises `ModelLoadError`."""
    hub_id, file = _parts(str(model))
    try:
        if model in NAMED_MODELS and revision is None:
            named = NAMED_MODELS[str(model)]
            return pull(named, offline=True, cache_dir=cache_dir, endpoint=endpoint)
        if isinstance(model, Path) or not file or not is_hub_id(hub_id):
            return None
        hub = HubModel(
            hub_id,
            revision,
            offline=True,
            cache_dir=cache_dir,
            endpoint=endpoint,
            show_progress=False,
        )
        return resolve_gguf(hub, file)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"is not here yet; fetch it first: asyncinfer pull {model}", file=str(model)
        ) from error


def _local_checkpoint(path: Path) -> Path:
    """A folder or a GGUF file; of a folder without a `config.json` its only GGUF file."""
    if path.is_file():
        if not is_gguf(path):
            raise ModelLoadError(
                "is a file: name a .gguf, or a checkpoint's folder", file=str(path)
            )
        return path
    try:
        if (path / _CONFIG).exists():
            return path
        found = [name for name in sorted(os.listdir(path)) if is_gguf(name)]
    except OSError as error:
        raise ModelLoadError(f"cannot be opened: {error}", file=str(path)) from error
    name = find_gguf(found, "", str(path)) if found else None
    file = None if name is None else checkpoint_file(path, name)
    return file or path


def _local(model: str | Path) -> Path | None:
    """The folder or regular file that `model` names; None if there is none."""
    # Not by `Path`, which fails for users that are not known.
    path = Path(os.path.expanduser(model))
    try:
        # Path("") would be the current folder, which an empty name does not mean.
        if not str(model) or not path.exists():
            return None
        if path.is_dir() or path.is_file():
            return path
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"model {str(model)!r}: cannot be opened: {error}") from error
    raise ModelLoadError(f"model {str(model)!r} is neither a folder nor a regular file")


def _is_small(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _SMALL_FILES)


def _parts(model: str) -> tuple[str, str]:
    """The hub id of `"org/name:file"`, and the file; of an address and of a path on Windows all
    and nothing."""
    hub_id, _, file = model.partition(":")
    return (model, "") if file.startswith(("/", "\\")) else (hub_id, file)


def _hub_id(model: str | Path) -> str:
    if "://" in str(model):
        raise ModelLoadError(
            f"model {model!r} is an address; of a model on the hub give the id, such as 'org/name'"
        )
    if isinstance(model, Path) or not is_hub_id(model):
        what = "file" if is_gguf(model) else "folder"
        raise ModelLoadError(f"model {str(model)!r}: no such {what}, and no hub id either")
    return model


def _fetch(hub: HubModel, whole: Path | None, check: Callable[[Path], object]) -> Path:
    """The revision's folder, or its only GGUF file. `whole` is the folder in the cache if that
    lacks nothing, and is taken if it is the newest commit, if the hub does not answer, or if the
    cache cannot keep a newer one."""
    if whole is not None and hub.is_commit:
        return whole
    try:
        commit, files = hub.listing(needed=whole is None)
    except Unreachable as error:
        return hub.instead(whole or cached_gguf(hub, ""), error)
    gguf = [name for name in files if is_gguf(name)]
    if not files & {SINGLE, INDEX}:
        if gguf:
            return resolve_gguf(hub, find_gguf(gguf, "", hub.model))
        if whole is None:
            raise without_weights(files, hub.model)
    if whole is not None and whole.name == commit:
        wanted = [PurePosixPath(name) for name in files if _is_small(name)]
        if all(checkpoint_file(whole, it.name, str(it.parent)) is not None for it in wanted):
            return whole
    small = [name for name in files if _is_small(name)]
    # The branch keeps a copy that is whole until the newer one is, too.
    try:
        folder = hub.download(hub.revision if whole is None else commit, small)
        check(folder)
        # By the index' commit, so that index and weights match even if the branch moves on.
        folder = hub.download(folder.name, _weights(folder))
        if whole is not None:
            hub.download(hub.revision, small)
    except NotKept as error:
        return hub.instead(whole, error)
    return folder


def _config_folder(hub: HubModel) -> Path:
    cached = hub.cached()
    if hub.offline and cached is None:
        raise hub.refused("it is not there")
    if cached is not None and (hub.offline or hub.is_commit):
        return cached
    try:
        commit, _ = hub.listing(needed=cached is None)
        whole = cached is not None and _is_whole(cached)
        return hub.download(commit if whole else hub.revision, (_CONFIG, QUANT_JSON))
    except (NotKept, Unreachable) as error:
        return hub.instead(cached, error)


def _weights(folder: Path) -> list[str]:
    """The files of the weights: those that the index names, or the single one."""
    if checkpoint_file(folder, INDEX) is None:
        return [SINGLE]
    return sorted(set(read_index(folder).values()))


def _is_whole(folder: Path) -> bool:
    """Whether a cached folder has every file that loading a model needs."""
    try:
        needed = (_CONFIG, *_weights(folder))
        return all(checkpoint_file(folder, name) is not None for name in needed) and any(
            checkpoint_file(folder, name) is not None for name in _TOKENIZERS
        )
    except ModelLoadError:
        # Fetching again may mend it.
        return False
