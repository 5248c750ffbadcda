"""The reference names every field of a decoder's shape, with its default and its values."""

from __future__ import annotations

import ast
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, get_args

import pytest

from asyncinfer import models
from asyncinfer.layers import ACTIVATIONS, NormKind, RopeType
from asyncinfer.models.parts import DTYPES, Block, QKNorm, Scoring

REFERENCE = (Path(__file__).resolve().parents[2] / "docs" / "reference.md").read_text("utf-8")
SHAPES: tuple[Any, ...] = (
    models.ModelConfig,
    models.LayerConfig,
    models.ShortConvConfig,
    models.GatedDeltaConfig,
    models.RopeConfig,
    models.ExpertsConfig,
    models.LatentConfig,
    models.TensorNames,
    models.LearnedActivation,
)
#: Fields of a few values.
VALUES = {
    ("ModelConfig", "block"): get_args(Block),
    ("LayerConfig", "block"): get_args(Block),
    ("ModelConfig", "norm"): get_args(NormKind),
    ("ModelConfig", "qk_norm"): get_args(QKNorm),
    ("ModelConfig", "activation"): ACTIVATIONS,
    ("ModelConfig", "dtype"): DTYPES,
    ("RopeConfig", "rope_type"): get_args(RopeType),
    ("ExpertsConfig", "scoring"): get_args(Scoring),
}


def default_of(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


@pytest.mark.parametrize("shape", SHAPES)
def test_every_field_and_value(shape: Any) -> None:
    _, _, chapter = REFERENCE.partition(f"#### `{shape.__name__}`\n")
    table = re.split(r"\n#", chapter)[0]
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|$", table, re.MULTILINE)
    assert [name for name, _, _ in rows] == [field.name for field in fields(shape)]
    for field, (name, default, meaning) in zip(fields(shape), rows, strict=True):
        written = default.strip().strip("`")
        if default_of(field) is MISSING:
            assert written == "", name
        elif written.endswith("()") and written != "()":
            made = getattr(models, written.removesuffix("()"))()
            assert made == default_of(field), name
        else:
            assert ast.literal_eval(written) == default_of(field), name
        for value in VALUES.get((shape.__name__, name), ()):
            assert f'`"{value}"`' in meaning, (name, value)


def test_no_value_is_forgotten() -> None:
    """Every field of a few strings is among those above."""
    few = re.compile(r"\b(Literal|Block|NormKind|QKNorm|RopeType|Scoring)\b")
    for shape in SHAPES:
        for field in fields(shape):
            if few.search(str(field.type)):
                assert (shape.__name__, field.name) in VALUES
