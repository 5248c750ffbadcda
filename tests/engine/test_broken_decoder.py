"""A tokenizer that cannot decode an answer: that request fails, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from asyncinfer import RequestFailed
from asyncinfer.testing import FakeModel, InlineEngine
from asyncinfer.text import Detokenizer


class PanicException(BaseException):
    """What a library in Rust raises when it panics."""


@pytest.mark.parametrize("error", [KeyError("no such piece"), PanicException("index out of range")])
@pytest.mark.parametrize("method", ["push", "flush"])
@pytest.mark.parametrize("stops", [(), ("\u2603",)])
def test_only_the_answer_that_cannot_be_decoded_fails(
    method: str, stops: tuple[str, ...], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = InlineEngine(FakeModel())
    streams = [
        engine.submit(f"prompt {i}", max_tokens=20, temperature=0.0, stop=stops, n=2)
        for i in range(3)
    ]
    engine.pump(5)
    broken = streams[1].request.outputs[1].detokenizer
    real = getattr(Detokenizer, method)

    def decode(self: Detokenizer, *arguments: Any) -> str:
        if self is broken:
            raise error
        text: str = real(self, *arguments)
        return text

    monkeypatch.setattr(Detokenizer, method, decode)
    if method == "flush":
        streams[1].stop()
    engine.run()
    for stream in streams:
        stream.read()
    assert isinstance(streams[1].error, RequestFailed)
    assert streams[1].error.__cause__ is error
    assert [stream.error for stream in streams[::2]] == [None, None]
    assert [len(stream.token_ids(i)) for stream in streams[::2] for i in (0, 1)] == [20] * 4
    stats = engine.stats()
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert engine.admission.held == 0
