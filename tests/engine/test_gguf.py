"""Engines on GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from models.families import random_model
from models.gguf_files import write_gguf

from asyncinfer import Engine, EngineConfig, ModelLoadError
from asyncinfer.engine.gguf import load_gguf
from asyncinfer.models import NAMED_MODELS, pulled
from asyncinfer.weights.gguf import header, read_header
from asyncinfer.weights.gguf.header import GgufHeader

SMOLLM2 = pulled(NAMED_MODELS["smollm2"])
Q = gguf.GGMLQuantizationType


@pytest.mark.anyio
@pytest.mark.parametrize(
    "kind", [Q.F16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1], ids=lambda kind: kind.name
)
async def test_greedy_tokens_are_those_of_the_dequantised_model(kind: Q, tmp_path: Path) -> None:
    model = random_model("llama", "plain")
    path = write_gguf(model, tmp_path / "model.gguf", kind)
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            # Rows are rounded one by one, in whatever order they stand.
            packed = gguf.quantize(parameter.detach().numpy(), kind)
            parameter.data.copy_(torch.from_numpy(gguf.dequantize(packed, kind).copy()))
    prompt = list(range(3, 40))
    with torch.inference_mode():
        right = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )[0, len(prompt) :]
    async with Engine(path, dtype="float32", max_context=128) as engine:
        done = await engine.generate(prompt, max_tokens=24, temperature=0.0, ignore_eos=True)
        assert list(done.token_ids) == right.tolist()
        assert engine.default_params.greedy


@pytest.mark.anyio
async def test_the_file_says_how_to_sample(tmp_path: Path) -> None:
    said = {"general.sampling.temp": 0.7, "general.sampling.top_k": 40}
    path = write_gguf(random_model("llama", "plain"), tmp_path / "model.gguf", **said)
    async with Engine(path, max_context=64) as engine:
        params = engine.default_params
        assert (round(params.temperature, 6), params.top_k) == (0.7, 40)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (3, "last")])
async def test_the_file_says_how_to_embed(number: int, pooling: str, tmp_path: Path) -> None:
    """As those of Qwen3-Embedding do: a text ends with the EOS token, whose vector is taken."""
    model = random_model("qwen3", "plain")
    said = {"qwen3.pooling_type": number, "tokenizer.ggml.add_eos_token": True}
    path = write_gguf(model, tmp_path / "model.gguf", **said)
    async with Engine(path, dtype="float32", max_context=64) as engine:
        ids = engine.tokenizer.encode("ab!")
        assert ids[-1] == 1
        assert engine.tokenizer.encode("ab!", add_special_tokens=False) == ids[:-1]
        done = await engine.embed(["ab!"])
    with torch.inference_mode():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
    want = states.mean(0) if pooling == "mean" else states[-1]
    np.testing.assert_allclose(done.vectors[0], want / want.norm(), rtol=0, atol=1e-4)


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("kind", "notes"), [(4, 1), ([3], 1), ((1 << 32) - 1, 0)])
async def test_a_pooling_that_is_not_known_is_noted(kind: Any, notes: int, tmp_path: Path) -> None:
    """Rerankers say 4, and answer. A prompt of theirs does not end with the EOS token."""
    said = {"llama.pooling_type": kind, "tokenizer.ggml.add_eos_token": True}
    path = write_gguf(random_model("llama", "plain"), tmp_path / "model.gguf", **said)
    loaded = load_gguf(path, EngineConfig(device="cpu", max_context=64), None)
    loaded.runner.close()
    assert [note.startswith("llama.pooling_type=") for note in loaded.notes] == [True] * notes
    assert 1 not in loaded.tokenizer.encode("ab!")


@pytest.mark.anyio
async def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    path = write_gguf(random_model("llama", "plain"), tmp_path / "model.gguf")
    metadata = read_header(path).metadata
    more = {"tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "more"]}
    more["tokenizer.ggml.token_type"] = [1] * 200
    write_gguf(random_model("llama", "plain"), path, **more)
    with pytest.raises(ModelLoadError, match=r"model\.gguf: token ids go up to 199.* 199 rows"):
        await Engine.open(path)


@pytest.mark.anyio
async def test_the_header_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(random_model("llama", "plain"), tmp_path / "model.gguf")
    read: list[object] = []

    def counted(path: Path, *values: Any) -> GgufHeader:
        read.append(path)
        return GgufHeader(path, *values)

    monkeypatch.setattr(header, "GgufHeader", counted)
    async with Engine(path, max_context=64):
        assert len(read) == 1
    # Nobody holds it once the model is open, and the file may be another by now.
    async with Engine(path, max_context=64):
        assert len(read) == 2


@pytest.mark.anyio
async def test_an_architecture_without_a_family_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=r"general\.architecture='mamba': must be"):
        await Engine.open(path)


@pytest.mark.anyio
@pytest.mark.skipif(SMOLLM2 is None, reason="needs the model: asyncinfer pull smollm2")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_published_model_answers() -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    async with Engine("smollm2", max_context=256) as engine:
        done = await engine.generate(question, max_tokens=32)
    assert "Paris" in done.text
    assert done.finish_reason == "stop"
