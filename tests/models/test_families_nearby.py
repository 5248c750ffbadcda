"""The kit for families, on every family that is shipped: one config of each, and those near it."""

from __future__ import annotations

import pytest
from models.families import FAMILIES, causal_class, config_of

from asyncinfer import plugins
from asyncinfer.kernels import onednn
from asyncinfer.testing import check_family


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_kit_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on Intel's processors. Blocks of oneDNN, which take longer to make, are tried beside this.
    monkeypatch.setattr(onednn, "reorder_is_faster", lambda weight: False)
    config = config_of(family, next(iter(FAMILIES[family])))
    model_class = causal_class(config)
    family_class = type(plugins.models.resolve(model_class.__name__))
    report = check_family(family_class, model_class(config))
    assert len(report.compared) >= 12
