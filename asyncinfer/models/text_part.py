"""Reading the text part of a `config.json` that has one for images too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from asyncinfer.models.reader import JsonReader

__all__ = ["TEXT_ALONE", "text_values"]

#: A remark for whoever loads such a model.
TEXT_ALONE: Final = "images are not supported: only text is read"
_TEXT = "text_config"
#: Keys that stand beside `text_config` and hold for the text part too.
_OF_ALL = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")


def text_values(values: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The content of `text_config`, and what stands beside it for all parts. Raises
    `ModelLoadError` where there is none."""
    whole = JsonReader(values, file)
    text = whole.object(_TEXT)
    if text is None:
        raise whole.refuse(_TEXT, "is required")
    of_all = {key: values[key] for key in _OF_ALL if values.get(key) is not None}
    return {**text.values, **of_all}
