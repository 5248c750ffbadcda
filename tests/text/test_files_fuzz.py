"""Tokenizer files that are corrupt: refused with a clear error, or read; never a panic."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from text import backends

from asyncinfer.errors import InvalidRequest, ModelLoadError
from asyncinfer.text import ChatTemplate, Detokenizer, Tokenizer

FILES = [
    json.loads(backend.to_str())
    for backend in (backends.byte_level(), backends.sentencepiece(), backends.OTHERS["wordpiece"]())
]
CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "added_tokens_decoder": {"5": {"content": "<tool>", "special": True}},
    "extra_special_tokens": {"image_token": "<i>"},
    "additional_special_tokens": ["<j>"],
    "chat_template": [{"name": "default", "template": "{{ messages|length }}"}],
    "eos_token_id": [1, 2],
}
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 2**33),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["BPE", "ByteLevel", "Sequence", "▁", "<0x41>", "(?", "type", "Strip"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, but few of long lists and mappings."""
    yield path
    if isinstance(value, dict):
        names = list(value)
        for name in [*names[:6], *names[-2:]]:
            yield from places(value[name], (*path, name))
    elif isinstance(value, list):
        for index in {0, len(value) - 1} if value else ():
            yield from places(value[index], (*path, index))


def changed(value: Any, path: tuple[Any, ...], new: Any, drop: bool) -> Any:
    if not path:
        return new
    value = copy.deepcopy(value)
    *way, last = path
    at = value
    for step in way:
        at = at[step]
    if drop:
        del at[last]
    else:
        at[last] = new
    return value


def use(folder: Path) -> None:
    """What an engine does with a folder that it could read."""
    try:
        tokenizer = Tokenizer.from_folder(folder)
        template = ChatTemplate.from_folder(folder, tokenizer.shield)
    except ModelLoadError as error:
        named = error.file
        assert named is not None
        assert named.startswith(str(folder))
        return
    try:
        ids = tokenizer.encode("aé <s> <tool>☃")
        tokenizer.bad_word_ids("a")
        text = template.render([{"role": "user", "content": "</s> é"}])
        ids += tokenizer.encode_chat(text)
    except InvalidRequest:
        ids = []
    ids = [*ids, *range(0, tokenizer.vocab_size, 17), tokenizer.vocab_size + 1]
    shown = Detokenizer(tokenizer, ids[:5]).decode(ids)
    tokenizer.decode(ids).encode()
    shown.encode()


@given(data=st.data(), new=JSON, drop=st.booleans())
@fuzz(150)
def test_a_changed_tokenizer_file(data: st.DataObject, new: Any, drop: bool) -> None:
    whole = data.draw(st.sampled_from(FILES))
    path = data.draw(st.sampled_from(list(places(whole))))
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(changed(whole, path, new, drop))
        Path(folder, "tokenizer.json").write_text(text)
        use(Path(folder))


@given(data=st.data(), new=JSON, drop=st.booleans())
@fuzz(150)
def test_a_changed_config(data: st.DataObject, new: Any, drop: bool) -> None:
    name = data.draw(
        st.sampled_from(["tokenizer_config.json", "special_tokens_map.json", "config.json"])
    )
    path = data.draw(st.sampled_from(list(places(CONFIG))))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_text(json.dumps(FILES[0]))
        Path(folder, name).write_text(json.dumps(changed(CONFIG, path, new, drop)))
        use(Path(folder))


@given(start=st.integers(0, 4000), bytes_=st.binary(max_size=8), cut=st.booleans())
@fuzz(100)
def test_changed_bytes(start: int, bytes_: bytes, cut: bool) -> None:
    whole = json.dumps(FILES[1]).encode()
    rest = b"" if cut else whole[start + len(bytes_) :]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.json").write_bytes(whole[:start] + bytes_ + rest)
        use(Path(folder))
