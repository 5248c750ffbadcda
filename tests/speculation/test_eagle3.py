"""Drafts of a head beside the model: they change no answer, come in chains, and are right where the
head draws as the model does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice
from models.eagle3_heads import agreeing_head
from models.held import Held, OnDevice
from speculation.kinds import PROMPTS, sampled_options_of

from asyncinfer import Engine, InvalidConfig
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.models import load_model
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.speculation import DraftCost, StepCosts
from asyncinfer.testing import InlineEngine
from asyncinfer.testing.oracle import EOS_ID
from asyncinfer.text import Tokenizer

REQUESTS = 200
#: Bytes, and the ends of a text.
VOCAB = 258
#: Few blocks, so that requests are preempted.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 128,
    "max_step_tokens": 64,
    "block_size": 8,
    "max_running": 8,
    "sampler_timeout": 60.0,
}


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


def answers(
    folders: tuple[Path, Path],
    seeds: Sequence[int],
    *,
    headed: bool,
    device: FakeDevice | None = None,
    **config: Any,
) -> tuple[list[Any], InlineEngine]:
    """Of one request for each seed, in one crowded engine."""
    folder, beside = folders
    head = beside if headed else None
    decoder = load_model(folder, "cpu", torch.float32, max_context=128, head=head)
    text = Tokenizer.byte_level(add_bos=False, eos_id=EOS_ID)
    source = Held(decoder, text) if device is None else OnDevice(decoder, device, text)
    engine = InlineEngine(source, **OPTIONS, **config)
    asked = [sampled_options_of(seed) for seed in seeds]
    streams = [
        engine.submit(PROMPTS[seed % 4], **options)
        for seed, options in zip(seeds, asked, strict=True)
    ]
    engine.run()
    found = []
    for stream, options in zip(streams, asked, strict=True):
        stream.read()
        if stream.error is not None:
            # A word is barred that its format needs.
            assert "every one is barred" in str(stream.error)
            found.append(str(stream.error))
            continue
        reasons = [chunk.finish_reason for chunk in stream.chunks if chunk.finish_reason]
        indices = range(options["n"])
        found.append(([(stream.token_ids(i), stream.text(i)) for i in indices], sorted(reasons)))
    return found, engine


def test_answers_are_those_without_it(folders: tuple[Path, Path]) -> None:
    seeds = range(REQUESTS)
    plain, engine = answers(folders, seeds, headed=False, kv_bytes=5 << 15)
    assert engine.stats().preemptions > 5
    found, engine = answers(folders, seeds, headed=True, kv_bytes=5 << 16)
    for seed, (one, other) in enumerate(zip(found, plain, strict=True)):
        assert one == other, f"seed {seed}"
    stats = engine.stats()
    by_method = {each.method: each for each in stats.drafts}
    drafts = by_method["eagle3"]
    assert set(by_method) <= {"eagle3", "grammar"}
    # By chance one token in 258 would be right, and most of the answers are drawn by chance: the
    # head draws with their random numbers.
    assert sum(drafts.accepted) > 100
    assert sum(drafts.rejected) > 50
    # Chains: the head goes on by what it has guessed.
    assert drafts.accepted[2] > 8
    assert stats.preemptions > 5
    assert stats.cached_tokens > 200
    assert stats.running == stats.waiting == 0


def test_steps_that_are_launched_ahead(folders: tuple[Path, Path]) -> None:
    seeds = [0, 5, 9]
    plain, _ = answers(folders, seeds, headed=False, kv_bytes=1 << 20)
    with FakeDevice() as device:
        found, engine = answers(folders, seeds, headed=True, device=device, kv_bytes=1 << 20)
    assert found == plain
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
