"""A prompt of 100 MB is refused for its length alone."""

from __future__ import annotations

from typing import Any

import pytest

from asyncinfer import Engine, InvalidRequest
from asyncinfer.testing import FakeModel, Tokenizer

pytestmark = pytest.mark.anyio


# fault 40
async def test_it_is_never_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *arguments: Any, **options: Any) -> Any:
        tokenised.append(len(text))
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match=r"^prompt="):
            await engine.generate("x" * 100_000_000, max_tokens=1)
        assert not tokenised
        assert (await engine.generate("fine", max_tokens=1)).usage.prompt_tokens == 4
        assert tokenised == [4]
