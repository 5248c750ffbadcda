"""A head beside the model drafts on a device that computes ahead, and is opened from its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice
from models.eagle3_heads import agreeing_head
from models.held import unrecorded_passes
from speculation.crowd import VOCAB, answers, held

from asyncinfer import Engine, InvalidConfig
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.config import Graphs
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.speculation import DraftCost, StepCosts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    use_cpu_threads(1)
    yield
    use_cpu_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return agreeing_head(VOCAB).save(tmp_path_factory.mktemp("agreeing"))


@pytest.mark.parametrize("graphs", ["off", "lazy"])
def test_steps_that_are_launched_ahead(folders: tuple[Path, Path], graphs: Graphs) -> None:
    seeds = [0, 5, 9]
    folder, head = folders
    plain, _ = answers(held(folder), seeds, kv_bytes=1 << 20)
    with FakeDevice() as device, unrecorded_passes() as eager:
        source = held(folder, device, head=head, graphs=graphs)
        found, engine = answers(source, seeds, kv_bytes=1 << 20)
    assert found == plain
    assert not eager
    assert (device.calls["Graph.replay"] > 5) == (graphs != "off")
    assert sum(sum(each.accepted) for each in engine.stats().drafts) > 5


@pytest.mark.asyncio
async def test_a_folder_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever steps take, drafts pay.
    monkeypatch.setattr(StepCosts, "cost", lambda *args: DraftCost(0.02))
    monkeypatch.setattr(StepCosts, "known", True)
    folder, head = agreeing_head(4096).save(tmp_path)
    for file in MODEL_PATH.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    found = []
    for draft in (None, head, str(head)):
        async with Engine(folder, draft=draft, dtype="float32", kv_bytes=1 << 22) as engine:
            options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
            found.append(await engine.generate("a b c", **options))
            methods = [each.method for each in engine.stats().drafts]
            assert methods == ([] if draft is None else ["eagle3"])
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
    assert found[0].usage.accepted_tokens == 0
    assert found[1].usage.accepted_tokens > 20
    # One of another vocabulary, as far as a tokenizer beside it tells.
    text = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary = text["model"]["vocab"]
    one, two = [word for word, number in vocabulary.items() if number in (300, 301)]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (head / "tokenizer.json").write_text(json.dumps(text), "utf-8")
    with pytest.raises(InvalidConfig, match=r"draft=.*vocabulary: token 300 is .*, not "):
        await Engine.open(folder, draft=head)
