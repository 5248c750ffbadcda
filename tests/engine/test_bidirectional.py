"""Models whose tokens see those after them, as EmbeddingGemma's do. The oracle is transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from models.families import random_model
from models.gguf_files import write_gguf
from transformers import AutoModel, Gemma3TextConfig, Gemma3TextModel

from asyncinfer import Engine, InvalidRequest, ModelLoadError
from asyncinfer.builtin import MODEL_PATH

pytestmark = pytest.mark.asyncio

#: The longest is of more tokens than the window and, with the next one, than a step.
TEXTS = ["a", "def add(a, b): return a + b", "Hello, world. " * 3, "x = 1", "a b"]
STEP = 40
WINDOW = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bidirectional")
    torch.manual_seed(20261124)
    config = Gemma3TextConfig(
        vocab_size=json.loads((Path(MODEL_PATH) / "config.json").read_text())["vocab_size"],
        hidden_size=36,
        intermediate_size=44,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        query_pre_attn_scalar=10,
        max_position_embeddings=96,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_bidirectional_attention=True,
        pad_token_id=0,
    )
    Gemma3TextModel(config).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL_PATH) / file, folder / file)
    return folder


def by_hand(folder: Path, ids: list[list[int]], pooling: str) -> np.ndarray[Any, Any]:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(torch.tensor([each])).last_hidden_state[0] for each in ids]
    rows = [each.mean(0) if pooling == "mean" else each[-1] for each in states]
    return torch.stack(rows).numpy()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(checkpoint: Path) -> AsyncIterator[Engine]:
    async with Engine(checkpoint, dtype="float32", max_step_tokens=STEP, max_running=3) as engine:
        yield engine


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("pooling", ["mean", "last"])
async def test_every_token_sees_every_other(engine: Engine, checkpoint: Path, pooling: Any) -> None:
    ids = [engine.tokenizer.encode(text) for text in TEXTS]
    assert max(map(len, ids)) > WINDOW
    assert sum(map(len, ids)) > STEP >= max(map(len, ids))
    want = by_hand(checkpoint, ids, pooling)
    for _ in range(2):  # The second time nothing comes from a cache.
        before = engine.stats().cached_tokens
        done = await engine.embed(TEXTS, pooling=pooling, normalize=False)
        np.testing.assert_allclose(done.vectors, want, rtol=0, atol=1e-4)
        assert engine.stats().cached_tokens == before
    for row, text in enumerate(TEXTS):
        alone = await engine.embed([text], pooling=pooling, normalize=False)
        np.testing.assert_allclose(alone.vectors[0], want[row], rtol=0, atol=1e-4)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_longest_text_is_that_of_a_step(engine: Engine) -> None:
    fits = await engine.embed([[5] * STEP])
    assert np.isfinite(fits.vectors).all()
    says = rf"{STEP + 1} tokens.*at most {STEP} fit .*max_step_tokens={STEP}: .* in one step"
    with pytest.raises(InvalidRequest, match=says):
        await engine.embed([[5] * (STEP + 1)])


@pytest.mark.asyncio(loop_scope="module")
async def test_answers_and_scores_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"max_tokens=4: must be 0, .*vectors of texts"):
        await engine.generate("a", max_tokens=4)
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs=0: must be None, .*vectors"):
        await engine.score("a", ["b"])
    with pytest.raises(InvalidRequest, match="max_tokens"):
        async with engine.session() as chat:
            await chat.send("a")
    assert engine.stats().running == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"deterministic": True}, "deterministic=True: .*see each other"),
        ({"max_context": 80, "max_step_tokens": 40}, "max_context=80: .*max_step_tokens=40"),
        ({"kv_bytes": 1, "max_context": 97}, "max_context=97: this model's is 96"),
    ],
)
async def test_what_it_cannot_be_is_refused(
    checkpoint: Path, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelLoadError, match=says):
        async with Engine(checkpoint, **options):
            pass


@pytest.mark.parametrize("kind", ["plain", "windows"])
@pytest.mark.parametrize("in_gguf", [False, True])
async def test_attention_that_is_not_causal(kind: str, in_gguf: bool, tmp_path: Path) -> None:
    """`is_causal` of any family, and what GGUF files call it. They have no windows of Qwen2."""
    windows = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
    size = json.loads((Path(MODEL_PATH) / "config.json").read_text())["vocab_size"]
    given: dict[str, Any] = {} if kind == "plain" or in_gguf else windows
    model = random_model("qwen2", "plain", is_causal=False, vocab_size=size, **given)
    ids = [list(range(2, 2 + count)) for count in (3, 30)]
    path = tmp_path / "model"
    if in_gguf:
        path = write_gguf(
            random_model("qwen2", "plain", is_causal=False),
            tmp_path / "model.gguf",
            **{"qwen2.attention.causal": False},
        )
    else:
        model.save_pretrained(path)
        shutil.copy(Path(MODEL_PATH) / "tokenizer.json", path)
    want = by_hand(tmp_path / "published" if in_gguf else path, ids, "mean")
    async with Engine(path, dtype="float32", max_context=64) as engine:
        done = await engine.embed(ids, pooling="mean", normalize=False)
    np.testing.assert_allclose(done.vectors, want, rtol=0, atol=1e-4)


async def test_it_drafts_for_nobody(checkpoint: Path) -> None:
    with pytest.raises(ModelLoadError, match="see each other cannot be a draft model"):
        async with Engine(draft=str(checkpoint)):
            pass


async def test_no_memory_is_kept_for_keys_and_values(checkpoint: Path) -> None:
    async with Engine(checkpoint, kv_bytes=1) as engine:
        done = await engine.embed(TEXTS)
        assert done.vectors.shape == (len(TEXTS), 36)
