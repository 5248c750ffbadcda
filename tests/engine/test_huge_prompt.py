"""A prompt of 100 MB is refused for its length alone; what one of a megabyte takes comes back."""

from __future__ import annotations

import random
import time
from typing import Any

import anyio
import pytest

from asyncinfer import Engine, InvalidRequest
from asyncinfer.bench.soak.process import kept_mib, rss_mib
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.engine.heap import trim_heap
from asyncinfer.testing import FakeModel, Tokenizer

pytestmark = pytest.mark.anyio


# fault 40
async def test_it_is_never_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *arguments: Any, **options: Any) -> Any:
        tokenised.append(len(text))
        # One that is tokenised after all fails the test as it begins, rather than minutes later.
        assert len(text) < 100_000_000
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match=r"^prompt="):
            await engine.generate("x" * 100_000_000, max_tokens=1)
        assert not tokenised
        assert (await engine.generate("fine", max_tokens=1)).usage.prompt_tokens == 4
        assert tokenised == [4]


#: MiB that stay resident for two prompts of a megabyte, with what the prefix cache holds of them.
#: 190 to 206 stay if malloc keeps all it can.
MOST_KEPT = 130.0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_memory_of_tokenising_comes_back() -> None:
    if kept_mib() is None:
        pytest.skip("the C library is not glibc")
    choose = random.Random(3)
    words = ["".join(choose.choices("etaoinshrdlu", k=choose.randint(2, 9))) for _ in range(999)]
    text = " ".join(choose.choices(words, k=300_000))
    tokenizer = Tokenizer.from_folder(MODEL_PATH)
    model = FakeModel(blocks=70_000, max_context=1_000_032, strict=False, tokenizer=tokenizer)
    async with Engine(model, max_step_tokens=16_384) as engine:
        await engine.generate("warm up", max_tokens=1)
        trim_heap()
        before = rss_mib()
        for prompt in ("one", "two"):
            await engine.generate(f"{prompt} {text}"[:1_000_000], max_tokens=1)
        until = time.monotonic() + 120
        # The worker gives it back after it has handed the prompt on.
        while rss_mib() - before > MOST_KEPT and time.monotonic() < until:
            await anyio.sleep(0.01)
        assert rss_mib() - before < MOST_KEPT
