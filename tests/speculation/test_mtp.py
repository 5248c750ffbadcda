"""Drafts of what a layer of the model itself predicts: they change no answer, and are right where
the layer draws as the model does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice
from models.held import Held, OnDevice, unrecorded_passes
from models.predictors import agreeing
from safetensors.torch import load_file, save_file

from asyncinfer import Engine, SamplingParams
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.config import Graphs
from asyncinfer.models import layer_weights, load_model
from asyncinfer.quantization.grouped import DenseGrouped
from asyncinfer.speculation import DraftCost, Drafter, Speculator, StepCosts
from asyncinfer.stats import DraftStats
from asyncinfer.testing import InlineEngine

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 128,
    "max_step_tokens": 40,
    "block_size": 8,
    "kv_bytes": 1 << 20,
    "max_running": 6,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 1},
    {"seed": 2, "temperature": 0.7, "top_p": 0.9, "n": 2},
    {"seed": 3, "top_k": 20, "repetition_penalty": 1.1},
    {"seed": 4, "presence_penalty": 0.5, "min_tokens": 8},
    {"seed": 5, "stop_token_ids": [50, 60, 70], "typical_p": 0.9},
    {"seed": 6, "sampler": ["top-n-sigma"]},
    {"seed": 7, "guidance_scale": 1.5, "negative_prompt": [5, 6, 7]},
    {"seed": 8, "logit_bias": {30: 1.0}, "prompt_logprobs": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agreeing().save(tmp_path_factory.mktemp("agreeing"))


def grouped(weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any) -> DenseGrouped:
    return DenseGrouped(weight, bias)


def answers(
    folder: Path,
    storage: str = "plain",
    draft: str | None = None,
    device: FakeDevice | None = None,
    kinds: Sequence[dict[str, Any]] = KINDS,
    graphs: Graphs = "off",
) -> tuple[list[Any], list[DraftStats]]:
    """Of every kind of request, in one crowded engine."""
    options = {"max_context": 128, "storage": storage, "predictor": draft is not None}
    decoder = load_model(folder, "cpu", torch.float32, **options)  # type: ignore[arg-type]
    source = Held(decoder) if device is None else OnDevice(decoder, device, graphs=graphs)
    engine = InlineEngine(source, **OPTIONS, draft=draft)
    generator = torch.Generator().manual_seed(9)
    shared = torch.randint(3, 190, (30,), generator=generator).tolist()
    streams = []
    for number, kind in enumerate(kinds):
        prompt = [*shared, *torch.randint(3, 190, (number,), generator=generator).tolist()]
        streams.append(engine.submit(prompt, max_tokens=40, **kind))
    engine.run()
    found = []
    for stream, kind in zip(streams, kinds, strict=True):
        stream.read()
        assert stream.error is None
        found.append([stream.token_ids(index) for index in range(kind.get("n", 1))])
    return found, list(engine.stats().drafts)


@pytest.mark.parametrize("storage", ["plain", "int8"])
def test_answers_are_those_without_it(folder: Path, storage: str) -> None:
    plain, none = answers(folder, storage)
    found, (drafts,) = answers(folder, storage, draft="mtp")
    assert found == plain
    assert none == []
    assert drafts.method == "mtp"
    # By chance one token in 199 would be right, and here most of the answers are drawn by chance:
    # the layer draws with their random numbers.
    assert sum(drafts.accepted) > 100
    assert sum(drafts.rejected) > 10


def test_a_quantised_checkpoint(tmp_path: Path) -> None:
    """As they are published: what joins the layer's inputs is not quantised."""
    file = agreeing().save(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj.weight") and "eh_" not in name]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, _ = answers(tmp_path, kinds=KINDS[:3])
    found, (drafts,) = answers(tmp_path, draft="mtp", kinds=KINDS[:3])
    assert found == plain
    assert sum(drafts.accepted) > 20


@pytest.mark.parametrize("graphs", ["off", "lazy", "start"])
def test_steps_that_are_launched_ahead(
    folder: Path, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Experts' products that ask the host for nothing, as Triton's do.
    monkeypatch.setattr(layer_weights, "make_grouped_linear", grouped)
    few = KINDS[:4:2]
    plain, _ = answers(folder, kinds=few)
    with FakeDevice() as device, unrecorded_passes() as eager:
        found, (drafts,) = answers(folder, "plain", "mtp", device, few, graphs)
    assert found == plain
    assert not eager
    assert (device.calls["Graph.replay"] > 5) == (graphs != "off")
    assert sum(drafts.accepted) > 20


@pytest.mark.asyncio
async def test_a_checkpoint_drafts_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever steps take, drafts pay.
    monkeypatch.setattr(StepCosts, "cost", lambda *args: DraftCost(0.02))
    monkeypatch.setattr(StepCosts, "known", True)
    agreeing(vocab_size=4096).save(tmp_path)
    for file in MODEL_PATH.glob("tokenizer*.json"):
        shutil.copy(file, tmp_path)
    found = []
    for draft in (None, "mtp"):
        async with Engine(tmp_path, draft=draft, dtype="float32", kv_bytes=1 << 22) as engine:
            options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
            found.append(await engine.generate("a b c", **options))
    assert found[0].token_ids == found[1].token_ids
    assert (found[0].usage.accepted_tokens, found[1].usage.accepted_tokens > 10) == (0, True)


def test_a_draft_is_as_long_as_pays_and_rests_where_none_does() -> None:
    drafter = Drafter(SamplingParams(), 1, 0, predictor="mtp")
    speculator = Speculator()
    drafter.known = [*range(10)]
    # Nothing tells yet what steps cost without drafts.
    drafter.predicted = 10, [7, 8, 9, 10, 11, 12]
    speculator.draft([drafter], 1, 1)
    assert drafter.draft == ()
    for _ in range(4):
        speculator.costs.add(1, 0.01, drafted=False)
    speculator.draft([drafter], 1, 1)
    assert (drafter.method, list(drafter.draft)) == ("mtp", [7, 8, 9, 10, 11])
    assert drafter.predicts == 5
    # Of another position: tokens have followed that nobody drew.
    drafter.predicted = 9, [7]
    speculator.draft([drafter], 1, 1)
    assert list(drafter.draft) == []
    # As many are predicted as a draft of has paid.
    assert drafter.want("mtp", DraftCost(0.4), {})
    assert drafter.predicts == drafter.wanted == 2
    # It is worth five tokens at most, so that a draft that costs more never pays.
    assert not drafter.want("mtp", DraftCost(0.01, 5.2), {})
    assert drafter.predicts == 0
    assert drafter.resting_until == 42
    drafter.known = [*range(41)]
    assert drafter.predicts == 1
