"""Reading a checkpoint's tokenizer files. Raises `ModelLoadError` for a bad one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from asyncinfer import files
from asyncinfer.errors import ModelLoadError
from asyncinfer.text.panic import panicked
from asyncinfer.text.tiktoken_files import read_tiktoken

__all__ = [
    "ROLES",
    "file_of",
    "load_backend",
    "named_ids",
    "read_json",
    "special_tokens",
    "with_tokens_below",
]

#: Far above the few megabytes of a `tokenizer_config.json` that describes every added token.
MAX_JSON_BYTES = 64 << 20
#: Several times the largest `tokenizer.json`, of some tens of megabytes.
_MOST_BYTES = 256 << 20
#: Names under which `tokenizer_config.json` lists special tokens.
ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
#: Digits of a token's id. Python makes no integer of thousands.
_MOST_DIGITS = 20
#: What the files say of an added token beside its text.
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")
#: Keys of further special tokens, which are in a list or by name.
_EXTRA = ("additional_special_tokens", "extra_special_tokens")


def load_backend(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of `folder`, in which every token that a file calls special is marked so."""
    from asyncinfer.models.remote_code import tiktoken_file, tokenizer_code

    tokenizer_code(folder)
    listed = tiktoken_file(folder)
    if listed is None:
        backend = _fast_backend(folder)
    else:
        backend = read_tiktoken(listed, token_settings(folder))
    _add_lacking(folder, backend)
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for name in dict.fromkeys(_special_names(folder)):
        known = added.get(name)
        if known is None and backend.token_to_id(name) is not None:
            backend.add_special_tokens([name])
        elif known is not None and not known.special:
            known.special = True
            backend.add_special_tokens([known])
    return backend


def _add_lacking(folder: Path, backend: tokenizers.Tokenizer) -> None:
    """Add the tokens that other files list with the ids behind the last one of `backend`."""
    listed: dict[object, object] = {
        index: {"content": name}
        for name, index in read_json(folder, "added_tokens.json").items()
        if isinstance(index, int)
    }
    more = read_json(folder, "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(more, dict):
        ids = (index for index in more if index.isdecimal() and len(index) <= _MOST_DIGITS)
        listed |= {int(index): more[index] for index in ids}
    index = 1 + max(backend.get_added_tokens_decoder(), default=-1)
    index = max(index, backend.get_vocab_size(with_added_tokens=False))
    while isinstance(token := listed.get(index), dict):
        name = token_content(token)
        if not name or backend.token_to_id(name) is not None:
            break
        flags = {flag: token.get(flag) is True for flag in _FLAGS}
        backend.add_tokens([tokenizers.AddedToken(name, **flags)])
        index += 1


def _fast_backend(folder: Path) -> tokenizers.Tokenizer:
    path = file_of(folder, "tokenizer.json")
    if path is None:
        raise ModelLoadError(
            "not found; a model needs its fast tokenizer beside its weights",
            file=str(folder / "tokenizer.json"),
        )
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ModelLoadError(f"{size} bytes, more than {_MOST_BYTES}", file=str(path))
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        if not panicked(error):
            raise
        raise ModelLoadError(f"not a tokenizer: {error}", file=str(path)) from error


def with_tokens_below(
    backend: tokenizers.Tokenizer, most: int
) -> tuple[tokenizers.Tokenizer, tuple[str, ...]]:
    """The tokenizer without its added tokens from the id `most` on, and their texts."""
    added = backend.get_added_tokens_decoder()
    beyond = tuple(token.content for index, token in sorted(added.items()) if index >= most)
    if not beyond:
        return backend, ()
    content = json.loads(backend.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < most]
    return tokenizers.Tokenizer.from_str(json.dumps(content)), beyond


def named_ids(folder: Path, backend: tokenizers.Tokenizer) -> tuple[int | None, frozenset[int]]:
    """`(bos_id, eos_ids)`: those of `generation_config.json`, or else of `config.json`, together
    with the tokenizer's own tokens of that name."""
    settings = token_settings(folder)
    bos = token_content(settings.get("bos_token"))
    bos_id = backend.token_to_id(bos) if bos is not None else None
    eos = token_content(settings.get("eos_token"))
    eos_id = backend.token_to_id(eos) if eos is not None else None
    eos_ids = set() if eos_id is None else {eos_id}
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        config = read_json(folder, name)
        if bos_id is None:
            bos_id = next(iter(_ids(path, config, "bos_token_id")), None)
        found = _ids(path, config, "eos_token_id")
        eos_ids.update(found)
        if found:
            break
    return bos_id, frozenset(eos_ids)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    path = file_of(folder, name)
    return {} if path is None else files.read_json(path, MAX_JSON_BYTES)


def file_of(folder: Path, name: str, within: str = "") -> Path | None:
    """A regular file of the checkpoint (a link out of it is refused); None if absent."""
    return files.checkpoint_file(folder, name, within)


def token_settings(folder: Path) -> dict[str, Any]:
    """The content of `tokenizer_config.json`; if it lists no tokens, together with that of
    `special_tokens_map.json`, where older checkpoints list them."""
    settings = read_json(folder, "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    older = read_json(folder, "special_tokens_map.json")
    merged = settings | older
    for name in _EXTRA:
        both = [values.get(name) for values in (settings, older)]
        if all(isinstance(value, list) for value in both):
            merged[name] = [token for value in both for token in value or ()]
    return merged


def special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that templates know by name: the common ones, such as `bos_token`, and a model's
    own, such as `image_token`."""
    settings = token_settings(folder)
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    for name in (*_EXTRA, "model_specific_special_tokens"):
        extra = settings.get(name)
        if isinstance(extra, dict):
            named |= extra
    tokens = ((name, token_content(value)) for name, value in named.items())
    return {name: token for name, token in tokens if token is not None}


def token_content(value: object) -> str | None:
    """A token as `tokenizer_config.json` writes it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_names(folder: Path) -> Iterator[str]:
    settings = token_settings(folder)
    yield from special_tokens(folder).values()
    values: list[object] = []
    for name in _EXTRA:
        extra = settings.get(name)
        values += extra if isinstance(extra, list) else []
    added = settings.get("added_tokens_decoder")
    if isinstance(added, dict):
        values += [token for token in added.values() if _marked_special(token)]
    for value in values:
        token = token_content(value)
        if token:
            yield token


def _marked_special(token: object) -> bool:
    return isinstance(token, dict) and token.get("special") is True


def _ids(path: Path, config: dict[str, Any], name: str) -> list[int]:
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelLoadError(
                f"{name}={value!r}: must be a token id or a list of them", file=str(path)
            )
    return ids
