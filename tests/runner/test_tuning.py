"""What was measured on a device is taken when an engine opens there, and by nobody else."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.config import EngineConfig
from asyncinfer.kernels import reference
from asyncinfer.kernels.child_process import NoProcess
from asyncinfer.kernels.choice_records import ChoiceRecords, measure_in_child
from asyncinfer.kernels.choices import current_choices, use_choices
from asyncinfer.kernels.linear_tiles import Tiles, tile_candidates, tile_key, tiles_for
from asyncinfer.kernels.measured_cases import TuningShapes, measured_cases
from asyncinfer.kernels.measuring import Measured, measure_choices
from asyncinfer.kernels.rehearsal import Launch, rehearsing
from asyncinfer.kernels.triton.attention_tiling import decode_key, decode_tiling
from asyncinfer.kernels.workspace import SPLIT_KEY, SPLITS, Split, decode_parts
from asyncinfer.models import read_config
from asyncinfer.models.load import outline_model
from asyncinfer.runner import tuning
from asyncinfer.runner.compile_ahead import CompileAhead, compiling
from asyncinfer.runner.device import trial_shapes
from asyncinfer.runner.rehearsal import rehearse
from asyncinfer.runner.tuning import choose_tuning, tuning_shapes

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda", 0), torch.bfloat16
MODEL = read_config(MODEL_PATH)
TRIAL = trial_shapes(MODEL, BF16, BF16)
SHAPES = tuning_shapes(MODEL, TRIAL)
CASES = {case.key: case for case in measured_cases(SHAPES, CPU)}
#: Of one token.
ONE = tile_key(*SHAPES.products[-1], 1, 2.0)


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    yield
    use_choices({})


class Invented:
    """A clock on which one candidate of each kernel is the fastest: the one at `fast`."""

    def __init__(self, fast: int = 1) -> None:
        self.fast, self.asked = fast, 0

    def seconds(self, work: Callable[[], object]) -> float:
        self.asked += 1
        ((key, candidate),) = current_choices().items()
        number = CASES[key].candidates.index(candidate)
        return 1e-6 if number == self.fast else 2e-6


def made(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensors: what is computed is not what is tested."""
    for case in CASES.values():
        object.__setattr__(case, "make", lambda: lambda module: module.ones)


@pytest.fixture
def clock(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Invented:
    """Measurements of a GPU that is not there take place, with invented times."""
    invented, kernels = Invented(), ModuleType("kernels")
    kernels.ones = torch.ones(3)  # type: ignore[attr-defined]
    made(monkeypatch)
    monkeypatch.setattr(
        "asyncinfer.kernels.measuring.measured_cases", lambda *_: iter(CASES.values())
    )

    def apart(shapes: TuningShapes, device: torch.device) -> list[Measured]:
        return [*measure_choices(shapes, CPU, kernels, clock=invented)]

    monkeypatch.setattr(tuning, "measure_in_child", apart)
    return invented


def chosen_by(records: ChoiceRecords, **options: Any) -> dict[Any, Any]:
    config = EngineConfig(**options)
    choose_tuning(config, MODEL, TRIAL, CUDA, records)
    return dict(current_choices())


def test_what_is_fastest_is_taken_kept_and_read_again(clock: Invented, tmp_path: Path) -> None:
    records = ChoiceRecords(tmp_path)
    derived = tiles_for(*ONE[1:3], 1, 2.0)
    assert chosen_by(records) == {}
    assert clock.asked == 0
    taken = chosen_by(records, kernel_tuning="measured")
    assert taken == {key: case.candidates[1] for key, case in CASES.items()}
    assert clock.asked == sum(len(case.candidates) for case in CASES.values())
    # The kernels take it, and a workspace stays within what memory was planned for.
    assert tiles_for(*ONE[1:3], 1, 2.0) == CASES[ONE].candidates[1] != derived
    assert decode_parts(64, 8, 8192) == 64 + -(-SPLITS[1].programs // 8)
    group = TRIAL.heads // TRIAL.kv_heads
    key = decode_key(group, TRIAL.head_dim, BF16, BF16)
    assert decode_tiling(group, TRIAL.head_dim, BF16, BF16, 227 << 10) == CASES[key].candidates[1]
    # Nothing is measured again, by an engine that would or by one that would not.
    asked = clock.asked
    for tune in ("cached", "measured"):
        use_choices({})
        assert chosen_by(records, kernel_tuning=tune) == taken
    assert clock.asked == asked
    for options in ({"kernel_tuning": "off"}, {"deterministic": True}):
        assert chosen_by(records, **options) == {}
    assert tiles_for(*ONE[1:3], 1, 2.0) == derived


@pytest.mark.parametrize("changed", ["name", "driver", "shapes"])
def test_another_device_takes_none_of_it(
    clock: Invented, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    records = ChoiceRecords(tmp_path)
    assert chosen_by(records, kernel_tuning="measured")
    if changed == "name":
        about = SimpleNamespace(name="another GPU", major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    if changed == "driver":
        monkeypatch.setattr("asyncinfer.kernels.verdicts.driver_version", lambda: "1.2")
    shapes = TRIAL if changed != "shapes" else trial_shapes(MODEL, torch.float16, torch.float16)
    choose_tuning(EngineConfig(), MODEL, shapes, CUDA, records)
    assert current_choices() == {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda told: {},
        lambda told: {**told, "choices": None},
        lambda told: {**told, "choices": [1]},
        lambda told: {**told, "choices": [[[[1]], {}]]},
        lambda told: {**told, "choices": [[["linear_small", 1, 1, 1, 2.0], {"rows": 4}]]},
        # A file that somebody has written cannot name tiles that no measurement tries.
        lambda told: {
            **told,
            "choices": [*told["choices"][1:], [list(SPLIT_KEY), {"programs": 1 << 20}]],
        },
        lambda told: {**told, "key": {**told["key"], "kernels": "of another version"}},
    ],
)
def test_a_record_that_is_damaged_is_none(clock: Invented, tmp_path: Path, damage: Any) -> None:
    records = ChoiceRecords(tmp_path)
    taken = chosen_by(records, kernel_tuning="measured")
    path = records.path(SHAPES, CUDA)
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    assert chosen_by(records) == {}
    # It is measured anew where that was asked for, and the record is whole again.
    assert chosen_by(records, kernel_tuning="measured") == chosen_by(records) == taken
    path.write_bytes(b"\x00")
    assert chosen_by(records) == {}


def test_where_no_process_is_to_be_had_nothing_is_chosen_or_kept(
    clock: Invented, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apart(*_: Any) -> list[Measured]:
        raise NoProcess("no")

    monkeypatch.setattr(tuning, "measure_in_child", apart)
    records = ChoiceRecords(tmp_path)
    assert chosen_by(records, kernel_tuning="measured") == {}
    assert not records.path(SHAPES, CUDA).exists()


def test_a_draft_model_adds_its_shapes(clock: Invented, tmp_path: Path) -> None:
    records = ChoiceRecords(tmp_path)
    chosen_by(records, kernel_tuning="measured")
    of_target = {**current_choices(), ("linear_small", 1, 1, 1, 2.0): Tiles(4, 256, 1, 3)}
    use_choices({**of_target, SPLIT_KEY: SPLITS[2]})
    choose_tuning(EngineConfig(), MODEL, TRIAL, CUDA, records, draft=True)
    # What both name is the target's.
    assert current_choices() == {**of_target, SPLIT_KEY: SPLITS[2]}


def test_a_candidate_that_is_wrong_or_cannot_run_is_left_out() -> None:
    """Three that are faster: one is wrong, one does not compile, one has a NaN."""
    shapes = TuningShapes(trial=TRIAL, products=((64, 64),))
    key = tile_key(64, 64, 16, 2.0)
    tried = tile_candidates(64, 64, 16, 2.0)
    faults: dict[Tiles, Any] = dict(
        zip(tried[1:], [1.0, OSError("no room for it"), torch.nan], strict=False)
    )
    kernels = ModuleType("kernels")

    def product(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        y = reference.linear_small(x, *args, **options)
        fault = faults.get(current_choices().get(key))
        if isinstance(fault, Exception):
            raise fault
        return y if fault is None else y + fault * y.abs().max()

    kernels.linear_small = product  # type: ignore[attr-defined]
    clock = SimpleNamespace(seconds=lambda work: 2.0 if len(current_choices()) != 1 else 1.0)
    measured = {each.key: each for each in measure_choices(shapes, CPU, kernels, clock=clock)}
    # Attention, which this module lacks, has no figures.
    assert all(each[0] == "linear_small" for each in measured)
    seen = [choice for choice, _ in measured[key].times]
    assert seen == [each for each in tried if each not in faults]
    assert measured[key].best == tried[0]


def test_what_is_hardly_faster_is_not_worth_it() -> None:
    def best(seconds: float) -> Any:
        times = ((Split(), 1.0), (SPLITS[1], seconds), (SPLITS[2], 1.5))
        return Measured(key=SPLIT_KEY, title="", times=times)

    assert best(0.98).best == Split()
    assert (best(0.9).best, best(0.5).gain) == (SPLITS[1], 2.0)


def test_kernels_compile_ahead_as_they_were_chosen(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rehearsal's thread launches what the engine's will."""
    compiled: list[Launch] = []
    monkeypatch.setattr(CompileAhead, "_compiled", lambda _, launch: compiled.append(launch))
    wide = CASES[ONE].candidates[-1]
    use_choices({ONE: wide})
    with compiling(MODEL_PATH, EngineConfig(), BF16, CUDA, 4096, None):
        pass
    outputs, inputs = ONE[1:3]
    # Tokens, the matrix, and the tiles.
    told = f"'1', '{outputs}', '{inputs}', '{wide.rows}', '{wide.depth}'"
    keys = [str(launch.key) for launch in compiled]
    assert any("'gemv'" in key and told in key for key in keys)
    use_choices({})
    later: list[Launch] = []
    with rehearsing(CUDA, later.append):
        rehearse(outline_model(MODEL_PATH, CUDA, BF16), EngineConfig(), CUDA, 4096)
    assert not any("'gemv'" in str(launch.key) and told in str(launch.key) for launch in later)


@pytest.fixture
def process(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have a shell script take the place of the other Python."""

    def write(*lines: str) -> None:
        path = tmp_path / "python3"
        echoes = "\n".join(f"echo '{line}'" for line in lines)
        path.write_text(f"#!/bin/sh\nread request\n{echoes}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


def test_what_a_process_measured_before_it_died(process: Any) -> None:
    line = {"key": ["splits"], "title": "splits", "times": [[0, 2e-5], [2, 1e-5]]}
    process(json.dumps(line), '{"key": ["spl')
    (measured,) = measure_in_child(SHAPES, CUDA)
    assert measured.times == ((SPLITS[0], 2e-5), (SPLITS[2], 1e-5))
    for told, why in (
        ('{"unavailable": "busy"}', "busy"),
        ("{", "ended with exit status 0 before it measured"),
    ):
        process(told)
        with pytest.raises(NoProcess, match=why):
            measure_in_child(SHAPES, CUDA)


def test_a_process_measures_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels do not run on a CPU: the process ends having measured nothing."""
    shapes = TuningShapes(trial=trial_shapes(MODEL, torch.float32, torch.float32), products=())
    with pytest.raises(NoProcess, match="exit status 0 before it measured a kernel"):
        measure_in_child(shapes, CPU)
