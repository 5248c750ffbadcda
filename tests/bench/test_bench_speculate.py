"""`asyncinfer bench speculate` measures what it says."""

from __future__ import annotations

from asyncinfer.bench import SpeculateOptions, measure_speculate


def test_every_figure_is_measured() -> None:
    told: list[str] = []
    result = measure_speculate(SpeculateOptions(tokens=8, running=2, repeat=1), told.append)
    copies = [each for each in told if each.endswith("copies at once")]
    assert copies == ["2 copies at once", "turn 1 of 1: 2 copies at once"]
    figures = {figure.name.strip(): figure for figure in result.figures()}
    assert all(figure.value > 0 for name, figure in figures.items() if "guessed" not in name)
    assert 0 <= figures["of its tokens guessed"].value <= 1
    assert result.predicted.copied > 0


def test_turns_end_in_time() -> None:
    options = SpeculateOptions(tokens=8, running=1, repeat=1_000_000, seconds=0.0)
    assert measure_speculate(options).turns == 1
