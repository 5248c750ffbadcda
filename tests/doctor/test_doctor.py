"""`asyncinfer doctor`: limits of control groups, trials that notice what is wrong, and what is
measured."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from asyncinfer import machine
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cli.app import asyncinfer
from asyncinfer.doctor import (
    Machine,
    ProductTimes,
    Report,
    Trial,
    doctor,
    examine_machine,
    products,
    trials,
    tuning,
)
from asyncinfer.doctor import machine as doctors
from asyncinfer.kernels import kept, onednn
from asyncinfer.kernels.child_process import NoProcess
from asyncinfer.kernels.figures import KernelFigures
from asyncinfer.kernels.measured_cases import TuningShapes
from asyncinfer.kernels.measuring import Measured
from asyncinfer.kernels.native import BlockedWeight
from asyncinfer.kernels.workspace import SPLIT_KEY, SPLITS
from asyncinfer.models import parse_config
from asyncinfer.quantization import PackedRows

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
#: Numbers that a token is multiplied with, by hand: queries, keys and values together, output, gate
#: and up together, down; and the head.
NUMBERS = 2 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96) + 300 * 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def quota(root: Path, files: dict[str, str]) -> float | None:
    write(root, files)
    return machine.cpu_quota(root)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "50000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            0.5,
        ),
        # A container that sees its host's path, and its own group as the root.
        (
            {"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"},
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "3:memory:/m\n2:cpu,cpuacct:/c\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 0\n"}, None),
    ],
)
def test_a_quota_is_the_least_of_the_groups(
    tmp_path: Path, files: dict[str, str], cores: float | None
) -> None:
    assert quota(tmp_path, files) == cores


CPU = "sys/devices/system/cpu"
#: Four cores of Arm's: the last two are the slower ones.
ARM = {f"{CPU}/cpu{core}/cpu_capacity": f"{1024 if core < 2 else 380}\n" for core in range(4)}
#: An Intel hybrid: two fast cores that run two threads each, and two slow ones.
HYBRID = {
    "sys/devices/cpu_core/cpus": "0-3\n",
    "sys/devices/cpu_atom/cpus": "4,5\n",
    **{
        f"{CPU}/cpu{core}/topology/thread_siblings_list": f"{core // 2 * 2}-{core // 2 * 2 + 1}\n"
        for core in range(4)
    },
}


@pytest.mark.parametrize(
    ("files", "cores", "fast"),
    [
        ({}, range(4), None),
        (ARM, range(4), 2),
        (ARM, (1, 2), 1),
        (ARM, (2, 3), None),
        (dict.fromkeys(ARM, "1024\n"), range(4), None),
        ({name: "900\n" if "0/" in name else "1024\n" for name in ARM}, range(4), None),
        (ARM, range(5), None),
        (dict.fromkeys(ARM, "fast\n"), range(4), None),
        (HYBRID, range(6), 2),
        (HYBRID, (0, 2, 3, 4), 2),
        (HYBRID, (4, 5), None),
        (HYBRID | {"sys/devices/cpu_core/cpus": "x-3,,\n"}, range(6), None),
    ],
)
def test_fast_cores_are_counted(
    tmp_path: Path, files: dict[str, str], cores: tuple[int, ...], fast: int | None
) -> None:
    write(tmp_path, files)
    assert machine.fast_cores(cores, tmp_path) == fast


def test_what_is_free_is_the_less_of_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctors, "usable_cores", lambda: 4)
    for limit, cores in ((None, 4), (1.5, 1.5), (8.0, 4)):
        monkeypatch.setattr(doctors, "cpu_quota", lambda limit=limit: limit)
        assert Machine.now().free_cores == cores


def test_all_is_right_here() -> None:
    found = list(trials.trials())
    assert not [trial for trial in found if trial.fell_back]
    assert all(trial.error is None or trial.allowed is not None for trial in found)


def test_a_product_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right, exact, native = onednn.linear, PackedRows.product, BlockedWeight.__call__

    def off(x: torch.Tensor, **weight: Any) -> torch.Tensor:
        y = right(x, **weight)
        y[-1, 5] *= 1.5
        return y

    def blocked(self: BlockedWeight, x: torch.Tensor) -> torch.Tensor:
        return native(self, x).roll(1, dims=1)

    def packed(self: PackedRows, x: torch.Tensor) -> torch.Tensor:
        return exact(self, x).roll(1, dims=1)

    monkeypatch.setattr(onednn, "linear", off)
    monkeypatch.setattr(BlockedWeight, "__call__", blocked)
    monkeypatch.setattr(PackedRows, "product", packed)
    found = list(trials.trials())
    assert {trial.verdict for trial in found} <= {"wrong", "missing", "unsupported"}
    assert all(trial.fell_back and trial.instead for trial in found if trial.error is not None)


def test_what_is_no_number_for_some_rows_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = PackedRows.product

    def packed(self: PackedRows, x: torch.Tensor) -> torch.Tensor:
        return exact(self, x) * (1 if len(x) == 1 else math.nan)

    monkeypatch.setattr(PackedRows, "product", packed)
    verdicts = {trial.verdict for trial in trials.trials() if "-bit" in trial.name}
    assert verdicts == {"wrong"}


def test_a_kernel_that_cannot_be_made_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedRows, "has_kernel", False)
    found = {trial.name: trial for trial in trials.trials()}
    missing = [trial for trial in found.values() if trial.verdict == "missing"]
    assert len(missing) == 2
    assert all("torch's operators" in trial.instead for trial in missing)


@pytest.mark.parametrize(
    ("machine_name", "flags", "verdict"),
    [
        ("x86_64", "fpu sse2 avx", "unsupported"),
        ("AMD64", "fpu sse2 avx", "unsupported"),
        ("x86_64", "avx2 fma f16c", "missing"),
        ("x86_64", None, "missing"),
        ("aarch64", None, "missing"),
        ("riscv64", None, "unsupported"),
    ],
)
def test_a_processor_without_the_instructions_lacks_nothing(
    machine_name: str, flags: str | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedRows, "has_kernel", False)
    monkeypatch.setattr("platform.machine", lambda: machine_name)
    monkeypatch.setattr(trials, "cpuinfo", lambda: {} if flags is None else {"flags": flags})
    found = [trial for trial in trials.trials() if "-bit" in trial.name]
    assert [trial.verdict for trial in found] == [verdict] * 2
    assert all(trial.fell_back == (verdict == "missing") for trial in found)


def test_an_engine_whose_steps_disagree_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(doctor.SyncEngine):
        def score(self, prompt: Any, continuations: Any, **options: Any) -> Any:
            return super().score(f"{prompt} other", continuations, **options)

    monkeypatch.setattr(doctor, "SyncEngine", Off)
    config = parse_config(LLAMA)
    (trial,) = (trial for trial in doctor.all_trials(config) if trial.name.startswith("an engine"))
    assert trial.fell_back


def kernel(name: str, seconds: float | None = 4e-6) -> KernelFigures:
    return KernelFigures(kernel=name, error=0.25, allowed=1.0, seconds=seconds, floor=3e-6)


def test_kernels_are_tried_on_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {"cuda:0": None, "cuda:1": "rms_norm is wrong"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(faults))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def fault(shapes: Any, device: torch.device, trial: str, *, measured: Any) -> str | None:
        # Whatever was found before.
        assert trial == "process"
        measured(kernel("kv_write"))
        return faults[str(device)]

    monkeypatch.setattr(doctor, "find_triton_fault", fault)
    monkeypatch.setattr(doctor, "trials", lambda: ())
    monkeypatch.setattr(doctor, "_engine_trial", lambda: trials.Trial(name="", verdict="right"))
    each, one, again, other, _ = doctor.all_trials(parse_config(LLAMA))
    assert (each.name, again.name) == ("kv_write on cuda:0", "kv_write on cuda:1")
    for trial in (each, again):
        assert not trial.fell_back
        assert (trial.error, trial.allowed, trial.seconds, trial.floor) == (0.25, 1.0, 4e-6, 3e-6)
    assert one.verdict == "right"
    assert other.fell_back
    assert "rms_norm is wrong" in other.instead


def test_bandwidth_is_that_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries multiply with a vector on one thread."""
    monkeypatch.setattr(products, "_TIMED_BYTES", 1 << 20)
    taken = iter([0.5, 0.125])
    monkeypatch.setattr(products, "_best", lambda run: [run(), next(taken)][1])
    assert products.read_bandwidth() == 8 << 20


def test_bytes_and_steps_are_those_of_the_model() -> None:
    times = products.product_times(parse_config(LLAMA), (1, 3), lambda held: None)
    assert [each.held for each in times] == list(products.HELD)
    for each, bits in zip(times, (32, 16, 8, 4), strict=True):
        assert each.bytes == NUMBERS * bits // 8
        assert set(each.seconds) == {1, 3}
        assert each.tokens_per_second(3) == 3 / each.seconds[3]


def test_experts_are_read_as_often_as_tokens_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {
        **LLAMA,
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    monkeypatch.setattr(products, "_pass_seconds", lambda layers, *_: len(layers) * 1.0)
    (float32, *_) = products.product_times(parse_config(config), (1, 8), lambda held: None)
    experts = 2 * 2 * (192 * 64 + 64 * 96)
    routers = 2 * 4 * 64
    plain = 2 * (128 * 64 + 64 * 64) + routers + 300 * 64
    assert float32.bytes == 4 * (plain + experts)
    # A layer has three products and those of its experts; then there is the head. One token takes
    # two experts, eight take all four.
    assert float32.seconds == {1: 2 * (3 + 2 * 2) + 1, 8: 2 * (3 + 4 * 2) + 1}


def test_the_command(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(products, "_TIMED_BYTES", 1 << 20)
    # Of processes that wait for a core, too: no number of cores that are busy.
    monkeypatch.setattr(os, "getloadavg", lambda: (512.5, 0.0, 0.0))
    seconds = {"those before": 4e-6, "others": 2e-6}
    told = {"kernel": "a product", "device": "cuda:7", "best": "others", "seconds": seconds}
    tuned = tuning.TunedKernel(**told, derived=False, gain=2.0)  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "tuned_kernels", lambda *_: iter([tuned]))
    out = tmp_path / "doctor.json"
    command = ["doctor", "--tune", "--model", str(model), "--json", str(out)]
    done = CliRunner().invoke(asyncinfer, command)
    assert done.exit_code == 0, done.output
    assert "programs wanted 512.5 cores" in done.output
    for said in ("processor", "oneDNN's products in float32", "bfloat16", "64 at once", str(model)):
        assert said in done.output
    assert re.search(r"a product +cuda:7 +others +2\.0 +2\.00", done.output)
    report = json.loads(out.read_text())
    assert report["tuned"][0]["seconds"] == seconds
    assert report["machine"]["libraries"]["torch"] == version("torch")
    assert [each["held"] for each in report["products"]] == list(products.HELD)


def test_a_fallback_is_an_exit_code(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_TIMED_BYTES", 1 << 20)
    monkeypatch.setattr(PackedRows, "has_kernel", False)
    done = CliRunner().invoke(asyncinfer, ["doctor", "--model", str(model), "--json", "-"])
    assert done.exit_code == 1
    verdicts = [trial["verdict"] for trial in json.loads(done.stdout)["trials"]]
    assert verdicts.count("missing") == 2


def test_numbers_that_json_lacks_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the model that ships with the package is known by its name."""

    def examined(model: str, **_: Any) -> Report:
        seen.append(model)
        return report

    seen: list[str] = []
    wrong = Trial(name="a product", verdict="wrong", error=math.nan, allowed=math.inf)
    times = ProductTimes(held="float32", bytes=1, seconds={1: 1.0, 16: 1.0})
    report = Report(
        machine=Machine.now(),
        threads=1,
        bandwidth=1.0,
        trials=(wrong,),
        model="one",
        products=(times,),
        seconds=1.0,
    )
    monkeypatch.setattr("asyncinfer.cli.doctor.examine_machine", examined)
    done = CliRunner().invoke(asyncinfer, ["doctor", "--model", "embedded", "--json", "-"])
    assert done.exit_code == 1

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    (trial,) = json.loads(done.stdout, parse_constant=refused)["trials"]
    assert (trial["error"], trial["allowed"]) == (None, None)
    assert seen == [str(MODEL_PATH)]
    # Of a GPU's kernels the table has times, too.
    told = CliRunner().invoke(asyncinfer, ["doctor", "--model", "embedded"]).output
    assert "µs" not in told
    report = replace(report, trials=(wrong, replace(wrong, seconds=4e-6, floor=3e-6)))
    told = CliRunner().invoke(asyncinfer, ["doctor", "--model", "embedded"]).output
    assert re.search(r"a product +wrong +nan +inf +4\.0 +75%", told), told


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    report = tmp_path / "no" / "doctor.json"
    for options, said in (
        (["--model", str(tmp_path / "nothing")], "nothing"),
        (["--threads", "0"], "--threads"),
        (["--json", str(tmp_path)], "is a directory"),
    ):
        done = CliRunner().invoke(asyncinfer, ["doctor", *options])
        assert done.exit_code != 0
        assert said in str(done.exception) + done.output
    assert not report.exists()


def test_looking_changes_no_thread_number(model: Path) -> None:
    before = torch.get_num_threads()
    report = examine_machine(model, threads=1, rows=(1,))
    assert report.threads == 1
    assert report.best(1) in report.products
    assert torch.get_num_threads() == before


def test_ctrl_c_ends_it_at_the_next_kind_of_products(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, whole = threading.Event(), threading.Event()

    def times(config: object, rows: object, told: Callable[[str], object]) -> None:
        told("one")
        begun.set()
        for _ in range(1_000_000):
            told("another")
        whole.set()

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *call: Any) -> Any:
            super().submit(*call)
            begun.wait()
            return SimpleNamespace(result=interrupt)

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "ThreadPoolExecutor", Interrupted)
    monkeypatch.setattr(doctor, "product_times", times)
    monkeypatch.setattr(doctor, "all_trials", lambda config: ())
    monkeypatch.setattr(doctor, "read_bandwidth", float)
    with pytest.raises(KeyboardInterrupt):
        examine_machine(model, threads=1, rows=(1,))
    assert not whole.is_set()


def test_what_is_fastest_is_told_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, wide = parse_config(LLAMA), SPLITS[1]
    about = SimpleNamespace(name="a GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(kept, "user_cache_path", lambda _: tmp_path)
    monkeypatch.setattr(tuning, "triton_is_missing", lambda: None)

    def apart(shapes: TuningShapes, device: torch.device) -> list[Measured]:
        if device.index:
            raise NoProcess("busy")
        times = ((SPLITS[0], 2e-5), (wide, 1e-5))
        return [Measured(key=SPLIT_KEY, title="splits", times=times)]

    monkeypatch.setattr(tuning, "measure_in_child", apart)
    heard: list[str] = []
    (told,) = tuning.tuned_kernels(config, heard.append)
    assert heard == [f"tiles and splits on cuda:{index}" for index in (0, 1)]
    assert (told.device, told.best, told.gain, told.derived) == ("cuda:0", str(wide), 2.0, False)
    assert told.seconds == {str(SPLITS[0]): 2e-5, str(wide): 1e-5}
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["kernel-choices"]
