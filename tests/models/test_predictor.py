"""The layer that predicts further tokens, as it is loaded and computed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from models.held import Held
from models.predictors import PREDICTING, PredictingModel, agreeing
from models.published import CONFIGS
from models.watched import Watched
from safetensors.torch import load_file, save_file

from asyncinfer import Engine, InvalidConfig, ModelLoadError
from asyncinfer.adapters import lora_layout
from asyncinfer.models import load_model, parse_config
from asyncinfer.models.predictor import with_predictor
from asyncinfer.planner.size import ModelSize
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.testing import FakeModel, InlineEngine

#: Small steps cut prompts at odd places.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 96,
    "max_step_tokens": 23,
    "block_size": 8,
    "kv_bytes": 1 << 21,
    "draft": "mtp",
}
#: Two logits as near as this are a tie.
TIE = 3e-4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    use_cpu_threads(1)
    yield
    use_cpu_threads(before)


def engine_of(folder: Path, **config: Any) -> tuple[InlineEngine, Watched]:
    decoder = load_model(folder, "cpu", torch.float32, max_context=96, predictor=True)
    engine = InlineEngine(Held(decoder), **OPTIONS | config)
    watched = engine.core.runner = Watched(engine.core.runner, decoder)  # type: ignore[assignment]
    return engine, watched


@pytest.mark.parametrize("kind", [*PREDICTING, "agreeing"])
def test_an_engine_predicts_what_the_layer_says(kind: str, tmp_path: Path) -> None:
    """In chunks of prompts, after prefix hits, with drafts that are right and wrong, after a rest
    and beside others."""
    model = agreeing() if kind == "agreeing" else PredictingModel(PREDICTING[kind])
    engine, watched = engine_of(model.save(tmp_path))
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 190, (n,), generator=generator).tolist() for n in (45, 7, 30)]
    asked: dict[str, Any] = {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True}
    predicted: dict[tuple[int, ...], torch.Tensor] = {}
    for together in (prompts[:1], prompts):
        streams = [engine.submit(each, n=2, **asked) for each in together]
        engine.run()
        for prompt, stream in zip(together, streams, strict=True):
            stream.read()
            known = [*prompt, *stream.token_ids()]
            assert stream.token_ids(1) == stream.token_ids(0)
            right = model.logits(known)
            for at in range(len(prompt), len(known)):
                assert right[at - 1].max() - right[at - 1, known[at]] < TIE
            predicted[tuple(known)] = model.predicted([*known, 0])
    positions = set()
    chains = 0
    for each in watched.found:
        if each.chain:
            chains += 1
            if chains % 6:
                # Each of them takes a pass of its own.
                continue
            right = model.further(each.known, each.chain)
        else:
            right = predicted[tuple(each.sequence.tokens)][each.position - 2]
            positions.add(each.position - each.sequence.prompt_len)
        torch.testing.assert_close(each.logits, right, rtol=0.0, atol=3e-4)
        assert each.token == each.logits.argmax()
    assert chains > 12
    assert min(positions) == 1
    assert engine.stats().cached_tokens >= 40
    (counts,) = engine.stats().drafts
    assert counts.method == "mtp"
    assert sum(counts.rejected) > 5
    if kind == "agreeing":
        assert sum(counts.accepted) > 130
    else:
        # They are wrong, rest after some tokens, and are tried again after 32.
        assert max(b - a for a, b in pairwise(sorted(positions))) > 9


def test_a_prompt_without_an_answer_tells_nothing_of_the_slot_before(tmp_path: Path) -> None:
    folder = PredictingModel(PREDICTING["glm"]).save(tmp_path)
    found = []
    for before in (50, 60):
        engine, watched = engine_of(folder, max_running=1)
        prompt = [*range(20, 36)]
        for ids, count in (([before] * 30, 0), (prompt, 0), ([*prompt, 7, 8], 1)):
            engine.submit(ids, max_tokens=count, temperature=0.0)
            engine.run()
        assert engine.stats().cached_tokens == len(prompt)
        found.append(watched.found[-1].logits)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drop model.layers.2.", "draft='mtp': the checkpoint has no layer that predicts further"),
        ("drop model.layers.2.enorm.weight", "model.layers.2.enorm.weight.*missing"),
        ("add model.layers.2.more.weight", "model.layers.2.more.weight.*left over"),
        ("add model.layers.2.eh_proj.weight", "model.layers.2.eh_proj.weight.*shape"),
    ],
)
def test_a_layer_that_is_not_whole_is_refused(change: str, message: str, tmp_path: Path) -> None:
    what, _, changed = change.partition(" ")
    file = PredictingModel(PREDICTING["glm"]).save(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors = {name: each for name, each in tensors.items() if not name.startswith(changed)}
    if what == "add":
        tensors[changed] = torch.zeros(3, 3)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError) as raised:
        load_model(tmp_path, "cpu", torch.float32, predictor=True)
    assert re.search(message, str(raised.value).replace("\n", " ")), raised.value
    # Without it, nobody looks at the layer.
    assert load_model(tmp_path, "cpu", torch.float32).predictor is None


@pytest.mark.asyncio
async def test_what_has_no_such_layer_is_refused() -> None:
    with pytest.raises(ModelLoadError, match=r"draft='mtp'.* known of LlamaForCausalLM"):
        await Engine.open(draft="mtp")
    with pytest.raises(InvalidConfig, match=r"draft='mtp'.*needs a model with a layer"):
        await Engine.open(FakeModel(), draft="mtp")
    with pytest.raises(InvalidConfig, match=r"draft='mtp'.*deterministic"):
        Engine(draft="mtp", deterministic=True)


def test_the_size_of_published_layers() -> None:
    """Of DeepSeek-V3's, 11.5 billion numbers beside embedding and head, as its makers count."""
    config = parse_config(CONFIGS["DeepSeek-V3"])
    beside = ModelSize.of(with_predictor(config)).parameters - ModelSize.of(config).parameters
    assert beside == pytest.approx(11.5e9, rel=0.01)
    # No adapter is made for it.
    assert lora_layout(with_predictor(config)).layers == lora_layout(config).layers
