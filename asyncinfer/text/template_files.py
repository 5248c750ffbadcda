"""Reading the chat templates of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asyncinfer.errors import ModelLoadError
from asyncinfer.text.tokenizer_files import file_of, read_json

__all__ = ["response_template", "template_sources"]

_FOLDER: Final = "additional_chat_templates"
#: Templates of a folder, and bytes of one.
_MOST: Final = 64
_MOST_BYTES: Final = 4 << 20


def template_sources(path: Path) -> dict[str, str]:
    """Templates by name, "default" and "tool_use" among them. If there are template files
    (`chat_template.jinja`, `additional_chat_templates/*.jinja`), those of `tokenizer_config.json`
    are ignored. If there is none in there either, `chat_template.json` has it, where models of
    images and text kept theirs. Raises `ModelLoadError` if one cannot be read."""
    sources: dict[str, str] = {}
    own = file_of(path, "chat_template.jinja")
    if own is not None:
        sources["default"] = _read(own)
    folder = path / _FOLDER
    if folder.is_dir():
        files = sorted(folder.glob("*.jinja"))
        if len(files) > _MOST:
            raise ModelLoadError(f"{len(files)} templates: at most {_MOST}", file=str(folder))
        for each in files:
            file = file_of(path, each.name, _FOLDER)
            if file is not None:
                sources[each.stem] = _read(file)
    if sources:
        return sources
    for name in ("tokenizer_config.json", "chat_template.json"):
        sources = _named(path / name, read_json(path, name).get("chat_template"))
        if sources:
            break
    return sources


def response_template(path: Path) -> Mapping[str, Any] | None:
    """How the checkpoint describes its answers, in `tokenizer_config.json`; None where it does not.
    Raises `ModelLoadError`."""
    config = path / "tokenizer_config.json"
    found = read_json(path, config.name).get("response_template")
    if found is not None and not isinstance(found, Mapping):
        raise ModelLoadError("response_template must be an object", file=str(config))
    return found


def _read(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > _MOST_BYTES:
            raise ModelLoadError(f"{size} bytes: at most {_MOST_BYTES}", file=str(file))
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"not readable: {error}", file=str(file)) from error


def _named(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = value if isinstance(value, list) else [value]
    named: dict[str, str] = {}
    for entry in entries:
        match entry:
            case {"name": str(name), "template": str(source)}:
                named[name] = source
            case _:
                raise ModelLoadError(
                    "chat_template must be a string or a list of {name, template}", file=str(path)
                )
    return named
