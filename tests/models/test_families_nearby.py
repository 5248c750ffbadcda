"""The kit for families, on every family that is shipped: one config of each, and those near it."""

from __future__ import annotations

import pytest
from models.families import FAMILIES, config_of
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from asyncinfer import plugins
from asyncinfer.testing import check_family


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_kit_passes(family: str) -> None:
    config = config_of(family, next(iter(FAMILIES[family])))
    name = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    report = check_family(type(plugins.models.resolve(name)), config)
    assert len(report.compared) >= 12
