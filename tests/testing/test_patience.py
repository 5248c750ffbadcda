"""How long a kit waits for a call of a plugin."""

from __future__ import annotations

import pytest

from asyncinfer.testing import patience


def test_time_in_which_nobody_could_look_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(patience, "monotonic", lambda: now)
    waited = patience.Waited()
    for _ in range(10):
        now += patience.LOOK_EVERY
        waited.look(same=True)
    assert waited.seconds == pytest.approx(10 * patience.LOOK_EVERY)
    # The process was stopped.
    now += 100.0
    waited.look(same=True)
    assert waited.seconds == pytest.approx(12 * patience.LOOK_EVERY)
    now += patience.LOOK_EVERY
    waited.look(same=False)
    assert waited.seconds == 0.0
