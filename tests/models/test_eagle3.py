"""EAGLE-3 heads, as they are loaded and computed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models.eagle3_heads import LAYERS, MADE_BY, HeadedModel, random_head
from models.held import Held
from models.watched import Watched
from safetensors.torch import load_file, save_file

from asyncinfer import Engine, InvalidConfig, ModelLoadError
from asyncinfer.attention import native
from asyncinfer.files import following_links
from asyncinfer.models import load_model
from asyncinfer.models.eagle3_config import is_eagle3
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.testing import FakeModel, InlineEngine

#: Small steps cut prompts at odd places.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 96,
    "max_step_tokens": 23,
    "block_size": 8,
    "kv_bytes": 1 << 22,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    use_cpu_threads(1)
    yield
    use_cpu_threads(before)


@pytest.mark.parametrize("made_by", [*MADE_BY, "own size"])
def test_an_engine_predicts_what_the_head_says(made_by: str, tmp_path: Path) -> None:
    """In chunks of prompts, after prefix hits, with drafts that are wrong, and in chains."""
    own = made_by == "own size"
    model = HeadedModel(random_head("specforge" if own else made_by, own_size=own))
    folder, head = model.save(tmp_path)
    decoder = load_model(folder, "cpu", torch.float32, max_context=96, head=head)
    engine = InlineEngine(Held(decoder), **OPTIONS)
    watched = engine.core.runner = Watched(engine.core.runner, decoder)  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 190, (n,), generator=generator).tolist() for n in (45, 7)]
    asked: dict[str, Any] = {"max_tokens": 14, "temperature": 0.0, "ignore_eos": True}
    for together in (prompts[:1], prompts):
        streams = [engine.submit(each, n=2, **asked) for each in together]
        engine.run()
        for prompt, stream in zip(together, streams, strict=True):
            stream.read()
            known = [*prompt, *stream.token_ids()]
            right = model.logits(known)
            for at in range(len(prompt), len(known)):
                assert right[at - 1].max() - right[at - 1, known[at]] < 3e-4
    lengths: set[int] = set()
    for each in watched.found[::2]:
        right = model.further(each.known, each.chain)
        torch.testing.assert_close(each.logits, right, rtol=0.0, atol=3e-4)
        assert each.token == each.logits.argmax()
        lengths.add(len(each.chain))
    assert {0, 1, 2} <= lengths
    assert engine.stats().cached_tokens >= 40
    (counts,) = engine.stats().drafts
    assert counts.method == "eagle3"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return HeadedModel(random_head("specforge")).save(tmp_path_factory.mktemp("specforge"))


def test_native_code_for_a_head_is_made_while_opening(
    saved: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[Any] = set()
    monkeypatch.setattr(native, "decode_kernel", lambda *about: asked.add(about))
    folder, head = saved
    decoder = load_model(folder, "cpu", torch.float32, max_context=96, head=head)
    InlineEngine(Held(decoder), **OPTIONS)
    model = decoder.config
    group = model.num_heads // model.num_kv_heads
    ours = torch.float32, model.head_dim, group, model.query_scale
    assert asked == {ours, (torch.float32, 20, 2, 20**-0.5)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 48}, "hidden_size=48: must be the model's hidden size, 64"),
        ({"target_hidden_size": 80}, "target_hidden_size=80: must be the model's hidden size, 64"),
        ({"vocab_size": 200}, "vocab_size=200: must be the model's vocabulary, of 199 tokens"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2: only heads of one layer"),
        ({LAYERS: [2, 3, 8]}, f"{LAYERS}=.* must be a list of integers between 0 and 7"),
        ({LAYERS: [3, 2]}, f"{LAYERS}=.* 1 to 16 of the model's 7 layers, ascending"),
        ({LAYERS: []}, f"{LAYERS}=.* 1 to 16"),
        ({LAYERS: [1, 7]}, f"{LAYERS}=.* 1 to 16"),
        ({LAYERS: "all"}, f"{LAYERS}='all': must be a list"),
        ({"draft_vocab_size": 80}, "shape .*90, 64.*80, 64"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state"),
        (
            {"fc_norm": True},
            "missing in the checkpoint.*fc_norm.0.weight|fc_norm.0.weight.*missing",
        ),
        ({"head_dim": 21}, "head_dim=21"),
    ],
)
def test_a_head_of_another_model_is_refused(
    change: dict[str, Any], message: str, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, head = saved
    values = json.loads((head / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").symlink_to(head / "model.safetensors")
    with following_links(), pytest.raises(ModelLoadError) as raised:
        load_model(folder, "cpu", torch.float32, head=tmp_path)
    assert re.search(message, str(raised.value).replace("\n", " ")), raised.value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": None}, "d2t.*missing|missing.*d2t"),
        ({"d2t": torch.zeros(90, dtype=torch.int32)}, None),
        ({"d2t": torch.zeros(90)}, "d2t.*must be .90. of I64 or I32"),
        ({"d2t": torch.full((90,), 150)}, "d2t.*each of 90 tokens another one of the 199"),
        ({"d2t": -torch.arange(90)}, "d2t.*each of 90 tokens another one of the 199"),
        ({"midlayer.more.weight": torch.zeros(3)}, "more.weight.*left over"),
        ({"fc.weight": torch.zeros(64, 128)}, "fc.weight.*shape"),
        ({"lm_head.weight": None}, "lm_head.weight.*missing"),
    ],
)
def test_a_head_that_is_not_whole_is_refused(
    change: dict[str, Any], message: str | None, saved: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, head = saved
    tensors = load_file(head / "model.safetensors") | change
    tensors = {name: each for name, each in tensors.items() if each is not None}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((head / "config.json").read_text())
    if message is None:
        assert load_model(folder, "cpu", torch.float32, head=tmp_path).predictor is not None
        return
    with pytest.raises(ModelLoadError) as raised:
        load_model(folder, "cpu", torch.float32, head=tmp_path)
    assert re.search(message, str(raised.value).replace("\n", " ")), raised.value


def test_a_model_of_few_layers_has_to_be_told_which(tmp_path: Path) -> None:
    folder, head = HeadedModel(random_head("specforge"), layers=6).save(tmp_path)
    with pytest.raises(ModelLoadError, match=f"{LAYERS}=.missing.: is required .* of 6 layers"):
        load_model(folder, "cpu", torch.float32, head=head)


@pytest.mark.asyncio
async def test_an_engine_that_cannot_have_a_head_says_so(saved: tuple[Path, Path]) -> None:
    folder, head = saved
    assert (is_eagle3(head), is_eagle3(folder)) == (True, False)
    with pytest.raises(InvalidConfig, match=r"draft=.*a checkpoint's model"):
        await Engine.open(FakeModel(), draft=head)
    with pytest.raises(InvalidConfig, match=r"draft=.*deterministic=True"):
        await Engine.open(folder, draft=head, deterministic=True)
    with pytest.raises(ModelLoadError, match="must be the model's vocabulary, of 4096 tokens"):
        await Engine.open(draft=head)
    # It is no model by itself.
    with pytest.raises(ModelLoadError, match="architectures"):
        load_model(head, "cpu", torch.float32)
