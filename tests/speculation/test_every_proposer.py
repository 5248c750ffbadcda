"""Whatever drafts, 100 seeded requests of every kind of option are answered as without it by a real
model, in mixed batches, after preemptions and with prefix hits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.eagle3_heads import agreeing_head
from models.predictors import agreeing
from speculation.crowd import VOCAB, answers, held

from asyncinfer.speculation import DraftCost, StepCosts
from asyncinfer.testing import InlineEngine

pytestmark = pytest.mark.usefixtures("drafts_pay")

#: Those of a proposer; and of the others, so that all have 200 together.
SEEDS, OTHERS = range(100), range(100, 200)
#: A few pages: of the model alone, and with the pages of a layer more.
KV_BYTES = 5 << 15


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of a model and of an EAGLE-3 head that draws like it most of the time."""
    return agreeing_head(VOCAB).save(tmp_path_factory.mktemp("headed"))


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> list[Any]:
    found, engine = answers(held(folders[0]), range(200), kv_bytes=KV_BYTES)
    assert engine.stats().preemptions > 5
    assert not engine.stats().drafts
    return found


def check(
    found: list[Any], plain: list[Any], engine: InlineEngine, method: str, seeds: range = SEEDS
) -> None:
    for seed, one in zip(seeds, found, strict=True):
        assert one == plain[seed], f"seed {seed}"
    stats = engine.stats()
    by_method = {each.method: each for each in stats.drafts}
    # Formats draft where they leave no choice, beside any other.
    assert set(by_method) <= {method, "grammar"}
    assert sum(by_method["grammar"].accepted) > 50
    drafts = by_method[method]
    assert sum(drafts.accepted) > 30
    assert sum(drafts.rejected) > (0 if method == "grammar" else 20)
    # Chains.
    assert drafts.accepted[2] > 4
    assert stats.preemptions
    assert stats.cached_tokens > 200
    assert stats.running == stats.waiting == 0


@pytest.mark.parametrize("name", ["prompt-lookup", "suffix"])
def test_proposers(folders: tuple[Path, Path], plain: list[Any], name: str) -> None:
    proposer = (name, {"entries": 1 << 12}) if name == "suffix" else name
    seeds = OTHERS if name == "suffix" else SEEDS
    found, engine = answers(held(folders[0]), seeds, kv_bytes=KV_BYTES, proposers=[proposer])
    check(found, plain, engine, name, seeds)


def test_predictions(folders: tuple[Path, Path], plain: list[Any]) -> None:
    expected = {}
    for seed, one in enumerate(plain[: len(SEEDS)]):
        if not isinstance(one, str):
            tokens = one[0][0][0]
            # Right but for every ninth token.
            expected[seed] = [t if i % 9 != 5 else 65 for i, t in enumerate(tokens)] or None
    found, engine = answers(held(folders[0]), SEEDS, expected, kv_bytes=KV_BYTES)
    check(found, plain, engine, "prediction")


def test_a_draft_model(
    folders: tuple[Path, Path], plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer drafts would be drawn for longer, hardly ever to their end.
    monkeypatch.setattr(StepCosts, "cost", lambda *args: DraftCost(0.15))
    config = {"kv_bytes": KV_BYTES, "draft": held(folders[0])}
    found, engine = answers(held(folders[0]), OTHERS, **config)
    check(found, plain, engine, "draft-model", OTHERS)


def test_a_head_beside_the_model(folders: tuple[Path, Path], plain: list[Any]) -> None:
    folder, head = folders
    found, engine = answers(held(folder, head=head), SEEDS, kv_bytes=2 * KV_BYTES)
    check(found, plain, engine, "eagle3")


def test_a_layer_that_predicts(tmp_path: Path) -> None:
    folder = agreeing(vocab_size=VOCAB).save(tmp_path)
    plain, engine = answers(held(folder), SEEDS, kv_bytes=KV_BYTES)
    assert engine.stats().preemptions > 2
    config = {"kv_bytes": 3 * KV_BYTES // 2, "draft": "mtp"}
    found, engine = answers(held(folder, mtp=True), SEEDS, **config)
    check(found, plain, engine, "mtp")
