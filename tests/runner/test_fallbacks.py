"""What a runner goes without is said once, and can be asked for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice, HiddenSyncError
from runner.conftest import CONFIG

from asyncinfer.attention import KVCache
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.config import EngineConfig
from asyncinfer.kernels import native, ops, reference, triton
from asyncinfer.kernels.ops import states
from asyncinfer.runner import device as device_module
from asyncinfer.runner import open_runner
from asyncinfer.runner.device import choose_graphs
from asyncinfer.runner.fallbacks import Fallbacks
from asyncinfer.server.traffic import Traffic
from asyncinfer.stats import EngineStats, Fallback
from asyncinfer.testing import FakeModel, InlineEngine


def test_the_first_is_a_warning_all_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    with (
        caplog.at_level("WARNING", logger="asyncinfer"),
        pytest.warns(RuntimeWarning, match="asyncinfer doctor") as warned,
    ):
        fallbacks.add("kernels", "no C compiler")
        fallbacks.add("graphs", "recording 4 rows failed")
    assert [each.part for each in fallbacks.found] == ["kernels", "graphs"]
    assert len(warned) == 1
    assert "run in place of Triton's kernels: no C compiler" in str(warned[0].message)
    assert [record.getMessage().split()[:2] for record in caplog.records] == [
        ["fallback", "part='kernels'"],
        ["fallback", "part='graphs'"],
    ]


def test_no_filter_of_the_host_makes_an_error_of_it() -> None:
    fallbacks = Fallbacks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fallbacks.add("graphs", "a fault")
    assert fallbacks.found == (Fallback("graphs", "a fault"),)


def test_a_runner_names_a_recording_that_failed(make_hand: Any) -> None:
    with FakeDevice() as device:
        hand = make_hand(accelerator=device)
        assert hand.runner.fallbacks == ()
        hand.join(0, [1, 2, 3])
        hand.row(0, 0, 3)
        hand.step()
        device.failing = 1
        with pytest.warns(RuntimeWarning, match="steps are not recorded"):
            hand.decode(0, 3, 3)
        (fallback,) = hand.runner.fallbacks
        assert (fallback.part, "recording 1 rows failed" in fallback.reason) == ("graphs", True)
        assert str(fallback) in hand.runner.notes


def test_metrics_have_their_number_and_nothing_but_numbers() -> None:
    stats = EngineStats(fallbacks=(Fallback("graphs", "a fault"),))
    page = Traffic().metrics({"m": stats})
    assert 'asyncinfer_fallbacks{model="m"} 1' in page
    for line in page.splitlines():
        assert line.startswith("#") or float(line.rpartition(" ")[2]) >= 0


def test_an_engine_tells_its_runners() -> None:
    engine = InlineEngine(FakeModel())
    assert engine.core.snapshot().fallbacks == ()
    found = (Fallback("kernels", "a fault"),)
    engine.core.runner.fallbacks = found  # type: ignore[attr-defined]
    assert engine.core.snapshot().fallbacks == found


@pytest.fixture
def kv() -> KVCache:
    return KVCache.allocate(CONFIG, 4, 16, torch.float32, "cpu")


def test_torchs_operators_are_not_recorded(kv: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    fallbacks = Fallbacks()
    config = EngineConfig(cuda_graphs="start")
    assert choose_graphs(config.replace(cuda_graphs="off"), [kv], [0], fallbacks) == "off"
    assert choose_graphs(config.replace(kernels="torch"), [kv], [0], fallbacks) == "off"
    assert choose_graphs(config.replace(deterministic=True), [kv], [0], fallbacks) == "off"
    assert fallbacks.found == ()
    with pytest.warns(RuntimeWarning, match="not recorded: not all of its attention"):
        assert choose_graphs(config, [kv], [0], fallbacks) == "off"
    monkeypatch.setattr(device_module, "reads_pages", lambda group: group is kv)
    assert choose_graphs(config, [kv], [0], fallbacks) == "start"
    other = KVCache.allocate(CONFIG, 4, 16, torch.float32, "cpu")
    assert choose_graphs(config, [kv, other], [0, 1], fallbacks) == "off"
    # Layers of one group that differ in their heads.
    assert choose_graphs(config, [kv, kv], [0, 0], fallbacks) == "off"
    assert choose_graphs(config, [kv, kv], [0, 1], fallbacks) == "start"


def test_two_caches_of_a_group_are_recorded_where_a_head_predicts(
    kv: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers alone are recorded, which have any number of caches: one for the head."""
    monkeypatch.setattr(device_module, "reads_pages", lambda group: group is kv)
    fallbacks, config = Fallbacks(), EngineConfig(cuda_graphs="start")
    assert choose_graphs(config, [kv, kv], [0, 0], fallbacks, predicts=True) == "start"
    assert fallbacks.found == ()
    other = KVCache.allocate(CONFIG, 4, 16, torch.float32, "cpu")
    with pytest.warns(RuntimeWarning, match="not recorded: not all of its attention"):
        assert choose_graphs(config, [kv, other], [0, 0], fallbacks, predicts=True) == "off"
    off = config.replace(cuda_graphs="off")
    assert choose_graphs(off, [kv, kv], [0, 0], fallbacks, predicts=True) == "off"


def test_a_recorded_step_takes_no_reference_kernel_that_needs_the_host(kv: KVCache) -> None:
    """Where a kernel is Triton's, all that a recorded step may launch are: states are a CPU's."""
    assert set(ops.__all__) - set(triton.__all__) == set(states.__all__)
    new, cache = torch.zeros(1, 1, 8), torch.zeros(4, 1, 16, 8)
    slots = torch.zeros(1, dtype=torch.int64)
    row, starts = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    tables = torch.zeros(1, 1, dtype=torch.int32)

    def write() -> None:
        reference.kv_write(new, new, cache, cache, slots)

    def attend() -> None:
        reference.paged_attention(new, cache, cache, tables, row, starts, 1.0)

    with FakeDevice() as device:
        for work in (write, attend):
            with pytest.raises(HiddenSyncError):
                device.capture(work)


def test_a_cpu_without_kernels_for_quantised_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without llvmlite, or on a processor that no kernel is for."""
    monkeypatch.setattr(native, "available", lambda: False)
    config = EngineConfig(device="cpu", weights="int8", max_context=64)
    with pytest.warns(RuntimeWarning, match="multiply quantised matrices: .* needs llvmlite"):
        runner = open_runner(MODEL_PATH, config, 0)
    assert [each.part for each in runner.fallbacks] == ["products"]
    assert str(runner.fallbacks[0]) in runner.notes
    runner.close()
    plain = open_runner(MODEL_PATH, config.replace(weights="floats"), 0)
    assert plain.fallbacks == ()
    plain.close()
