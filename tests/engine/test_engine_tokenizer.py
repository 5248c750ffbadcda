"""`engine.tokenizer` refuses what is no text, chat or token id, by name. It outlives the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncinfer import Engine, EngineClosed, InvalidRequest
from asyncinfer.engine import EngineTokenizer

pytestmark = pytest.mark.anyio

Ask = Callable[[EngineTokenizer, Any], object]


def encode(tokenizer: EngineTokenizer, text: Any) -> object:
    return tokenizer.encode(text)


def decode(tokenizer: EngineTokenizer, ids: Any) -> object:
    return tokenizer.decode(ids)


def token_bytes(tokenizer: EngineTokenizer, token_id: Any) -> object:
    return tokenizer.token_bytes(token_id)


def detokenizer(tokenizer: EngineTokenizer, after: Any) -> object:
    return tokenizer.detokenizer(after)


def count(tokenizer: EngineTokenizer, prompt: Any) -> object:
    return tokenizer.count(prompt)


def render_chat(tokenizer: EngineTokenizer, messages: Any) -> object:
    return tokenizer.render_chat(messages)


@pytest.mark.parametrize(
    ("ask", "value", "told"),
    [
        (encode, 5, "text=5: must be a string"),
        (encode, None, "text=None: must be a string"),
        (decode, "x", "ids='x': must be token ids"),
        (decode, [5.0], r"ids=\[5.0\]: must be token ids"),
        (decode, None, "ids=None: must be token ids"),
        (decode, [-1], r"ids=\[-1\]: token ids are between 0 and"),
        (token_bytes, -1, r"token_id=\[-1\]: token ids are between"),
        (token_bytes, "x", r"token_id=\['x'\]: must be token ids"),
        (detokenizer, [2**31], "after=.*: token ids are between"),
        (count, 5, "messages=5: must be a list of messages"),
        (render_chat, None, "messages=None: must be a list of messages"),
    ],
)
async def test_what_it_cannot_read_is_named(ask: Ask, value: Any, told: str) -> None:
    async with Engine() as engine:
        with pytest.raises(InvalidRequest, match=f"^{told}"):
            ask(engine.tokenizer, value)


async def test_any_whole_numbers_are_token_ids() -> None:
    async with Engine() as engine:
        tokenizer = engine.tokenizer
        ids = tokenizer.encode("import os", add_special_tokens=False)
        assert tokenizer.decode(np.array(ids)) == tokenizer.decode(tuple(ids)) == "import os"
        assert tokenizer.decode([*ids, engine.model.vocab_size + 1]) == "import os"
        assert tokenizer.token_bytes(np.int64(ids[0])) == b"import"


async def test_it_is_there_after_a_close() -> None:
    """An answer is read then, and its logprobs need it."""
    engine = Engine()
    for name in ("tokenizer", "model", "default_params"):
        with pytest.raises(EngineClosed, match="not open"):
            getattr(engine, name)
    async with engine:
        model, ids = engine.model, engine.tokenizer.encode("import os")
    assert engine.model == model
    assert engine.tokenizer.encode("import os") == ids
