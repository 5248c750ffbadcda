"""How many threads a step takes beside other programs: the rule on made-up readings, and that no
other thread of the process is touched."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncinfer import EngineConfig, SyncEngine
from asyncinfer.builtin import DRAFT_PATH
from asyncinfer.kernels.threads import name_thread, set_thread_count
from asyncinfer.machine import busy_seconds, cache_bytes, running_threads
from asyncinfer.models import parse_config
from asyncinfer.runner import device, open_runner, step_threads
from asyncinfer.runner.step_threads import StepThreads
from asyncinfer.scheduler import Step

#: Cores that something computes on: others, and the step's own threads.
Load = tuple[float, float]


class Machine:
    """Says how long its cores have computed, on a clock that the test moves."""

    def __init__(self, cores: int, most: int) -> None:
        self.now = self.everybody = self.own = 0.0
        self.told = True
        self.set: list[int] = []
        #: What is read of the threads that run, one reading after the other.
        self.running: list[int | None] = []
        self.threads = StepThreads(
            most, cores, self._used, self.set.append, self._running, lambda: self.now
        )

    def _used(self) -> tuple[float, float] | None:
        return (self.everybody, self.own) if self.told else None

    def _running(self) -> int | None:
        return self.running.pop(0) if self.running else None

    def run(self, load: Load, seconds: float = 0.25, *, helps: bool = False) -> int:
        """Let time pass under a load; how many threads a step takes then."""
        others, own = load
        self.now += seconds
        self.everybody += (others + own) * seconds
        self.own += own * seconds
        self.threads.adapt(helps=helps)
        return self.threads.count


def test_alone_a_step_has_all_threads() -> None:
    machine = Machine(cores=2, most=2)
    assert [machine.run((0.1, 1.8)) for _ in range(20)] == [2] * 20
    assert machine.set == []


@pytest.mark.parametrize(
    ("cores", "busy", "count"), [(2, 1, 1), (2, 10, 1), (4, 1, 3), (16, 1, 15), (16, 8, 8)]
)
def test_busy_loops_have_the_cores_that_they_take(cores: int, busy: int, count: int) -> None:
    machine = Machine(cores, cores)
    for _ in range(20):
        # Every thread gets its share of the cores.
        threads = machine.threads.count + busy
        share = min(1.0, cores / threads)
        machine.run((busy * share, machine.threads.count * share))
    assert abs(machine.threads.count - count) <= 1
    assert machine.threads.count >= 1
    settled = len(machine.set)
    for _ in range(20):
        share = min(1.0, cores / (machine.threads.count + busy))
        machine.run((busy * share, machine.threads.count * share))
    assert len(machine.set) == settled, "it goes to and fro"


def test_it_is_back_within_a_second_after_the_others_have_gone() -> None:
    machine = Machine(cores=4, most=4)
    for _ in range(8):
        machine.run((4.0, 0.5))
    assert machine.threads.count == 1
    began = machine.now
    while machine.threads.count < 4:
        machine.run((0.0, 1.0), seconds=0.05)
    assert machine.now - began <= 1.0
    assert machine.set[-1] == 4


def test_a_little_interference_changes_nothing() -> None:
    machine = Machine(cores=2, most=2)
    assert [machine.run((0.4, 1.5)) for _ in range(10)] == [2] * 10
    machine.run((1.0, 1.0))
    assert machine.threads.count == 1
    # What made it one thread is not quite over.
    assert [machine.run((0.4, 1.0)) for _ in range(10)] == [1] * 10


def test_threads_that_help_each_other_stay_beside_a_program_that_computes_half_of_the_time() -> (
    None
):
    machine = Machine(cores=2, most=2)
    assert [machine.run((0.55, 1.4), helps=True) for _ in range(10)] == [2] * 10
    assert machine.run((0.55, 1.4)) == 1
    assert machine.run((0.5, 1.0)) == 1
    assert machine.run((0.58, 1.0), helps=True) == 2
    # A busy program among three threads has two thirds of a core.
    assert machine.run((0.66, 1.33), helps=True) == 1


def test_no_more_threads_than_asked_for() -> None:
    machine = Machine(cores=16, most=4)
    assert machine.run((10.0, 4.0)) == 4
    assert machine.run((14.5, 1.5)) == 2
    assert machine.run((0.0, 1.0)) == 4


def test_it_looks_five_times_a_second() -> None:
    machine = Machine(cores=2, most=2)
    machine.everybody = 100.0
    assert [machine.run((2.0, 0.0), seconds=0.01) for _ in range(19)] == [2] * 19
    assert machine.run((2.0, 0.0), seconds=0.02) == 1


def test_after_a_pause_what_runs_now_counts() -> None:
    machine = Machine(cores=2, most=2)
    # The program computed for ten seconds, and now waits for the engine.
    machine.running = [1, 0]
    assert machine.run((1.9, 0.0), seconds=10.0) == 2
    assert machine.set == []
    # It goes on: this is seen at the next look.
    assert machine.run((1.0, 1.0)) == 1


def test_after_a_pause_a_program_that_still_computes_keeps_its_core() -> None:
    machine = Machine(cores=2, most=2)
    machine.running = [1, 1, 2]
    assert machine.run((1.0, 0.0), seconds=10.0) == 1
    assert machine.running == []
    # It has ended during another pause.
    machine.running = [0]
    assert machine.run((0.9, 0.0), seconds=10.0) == 2


def test_a_pause_beside_nobody_is_not_looked_into() -> None:
    machine = Machine(cores=2, most=2)
    assert machine.run((0.1, 0.0), seconds=10.0) == 2


def test_after_a_pause_where_the_system_does_not_say_what_runs_the_past_counts() -> None:
    machine = Machine(cores=2, most=2)
    machine.running = [None]
    assert machine.run((2.0, 0.0), seconds=10.0) == 1


def test_threads_that_run_are_counted(tmp_path: Path) -> None:
    assert running_threads(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/loadavg").write_text("0.52 0.58 0.59 3/467 10044\n", "utf-8")
    assert running_threads(tmp_path) == 3
    assert (running_threads() or 1) >= 1


def test_where_the_system_says_nothing_nothing_changes() -> None:
    machine = Machine(cores=2, most=2)
    machine.told = False
    assert [machine.run((2.0, 0.0)) for _ in range(3)] == [2] * 3
    machine.told = True
    assert machine.run((2.0, 0.0)) == 2
    assert machine.run((2.0, 0.0)) == 1


def test_times_of_cores(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    file = tmp_path / "proc" / "stat"
    file.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        "cpu0 100 20 30 5000 6000 1 2 47 7 7\n"
        "cpu1 900 0 0 1 1 0 0 0 0 0\n"
        "cpu12 100 0 0 1 1 0 0 0 0 0\n"
        "intr 1 2 3\n",
        "utf-8",
    )
    tick = 1 / step_threads.os.sysconf("SC_CLK_TCK")
    assert busy_seconds([0], tmp_path) == pytest.approx(200 * tick)
    assert busy_seconds([0, 12], tmp_path) == pytest.approx(300 * tick)
    assert busy_seconds([2], tmp_path) is None
    assert busy_seconds([0], tmp_path / "none") is None


def in_thread(body: Callable[[], None]) -> None:
    """Run it in a thread of its own; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


def test_only_the_callers_number_changes() -> None:
    before = torch.get_num_threads()
    beside = threading.Event(), threading.Event()
    seen: list[int] = []

    def host() -> None:
        # A thread of the host that has used torch before.
        torch.ones(8).sum()
        beside[0].set()
        assert beside[1].wait(60)
        seen.append(torch.get_num_threads())

    def steps() -> None:
        torch.ones(8).sum()
        for count in (3, 1, 2):
            set_thread_count(count)
            assert torch.get_num_threads() == count
            # MKL has a number of its own.
            assert torch.allclose(torch.eye(300) @ torch.ones(300, 300), torch.ones(300, 300))

    other = threading.Thread(target=host)
    other.start()
    assert beside[0].wait(60)
    in_thread(steps)
    beside[1].set()
    other.join()
    in_thread(lambda: seen.append(torch.get_num_threads()))
    assert seen == [before, before]
    assert torch.get_num_threads() == before


def test_a_step_takes_the_threads_that_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(step_threads, "INTERVAL", 0.0)
    monkeypatch.setattr(step_threads, "busy_seconds", lambda cores: 1e9 * len(seen))
    # Steps of nothing leave the engine idle, so that what runs at this moment counts as well.
    monkeypatch.setattr(step_threads, "running_threads", lambda: 3)

    def opened() -> None:
        config = EngineConfig(device="cpu", cpu_threads=2, kv_bytes=1 << 20)
        runner = open_runner(DRAFT_PATH, config, 4096)
        real = runner.executor.run

        def run(*args: object) -> object:
            seen.append(torch.get_num_threads())
            return real(*args)  # type: ignore[arg-type]

        runner.executor.run = run  # type: ignore[method-assign, assignment]
        for number in range(3):
            runner.collect(runner.launch(Step(number)))
        runner.close()

    in_thread(opened)
    assert seen[0] == 2
    assert seen[-1] == 1


@pytest.mark.parametrize("option", [{"cpu_threads": 1}, {"deterministic": True, "cpu_threads": 2}])
def test_one_thread_and_equal_bits_are_kept(
    option: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StepThreads | None] = []
    here = StepThreads.here

    def watched() -> StepThreads | None:
        made.append(here())
        return made[-1]

    monkeypatch.setattr(StepThreads, "here", staticmethod(watched))

    def opened() -> None:
        open_runner(
            DRAFT_PATH, EngineConfig(device="cpu", kv_bytes=1 << 24, **option), 4096
        ).close()

    in_thread(opened)
    assert made in ([], [None])


def test_the_main_thread_keeps_its_name_and_its_threads() -> None:
    assert threading.current_thread() is threading.main_thread()
    comm = Path("/proc/self/comm")
    before = comm.read_text("utf-8") if comm.exists() else ""
    name_thread()
    assert (comm.read_text("utf-8") if comm.exists() else "") == before
    assert StepThreads.here() is None


@pytest.mark.parametrize(
    ("quota", "fast", "count"),
    [(1.5, None, 1), (0.5, None, 1), (None, None, 3), (8.0, None, 3), (None, 2, 2), (1.5, 2, 1)],
)
def test_threads_are_no_more_than_a_containers_share_and_the_fast_cores(
    quota: float | None, fast: int | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cpu_quota", lambda: quota)
    monkeypatch.setattr(device, "fast_cores", lambda cores: fast)
    seen: list[int] = []

    def prepared() -> None:
        set_thread_count(3)
        device.prepare_threads(EngineConfig(), torch.device("cpu"))
        seen.append(torch.get_num_threads())

    in_thread(prepared)
    assert seen == [count]


def test_what_the_system_says_of_caches(tmp_path: Path) -> None:
    assert cache_bytes(2, tmp_path) is None
    of_core = tmp_path / "sys/devices/system/cpu/cpu0/cache"
    caches = [
        ("Data", 1, "48K"),
        ("Instruction", 1, "64K"),
        ("Unified", 2, "2M"),
        ("Unified", 3, ""),
    ]
    for index, about in enumerate(caches):
        folder = of_core / f"index{index}"
        folder.mkdir(parents=True)
        for name, value in zip(("type", "level", "size"), about, strict=True):
            (folder / name).write_text(f"{value}\n")
    found = [cache_bytes(level, tmp_path) for level in (1, 2, 3, 4)]
    assert found == [48 << 10, 2 << 20, None, None]


def test_an_engine_answers_while_its_threads_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_threads, "INTERVAL", 0.0)
    looks = 0

    def busy(cores: object) -> float:
        # In turns all cores are taken, and none is.
        nonlocal looks
        looks += 1
        return 1e9 * (looks // 2)

    monkeypatch.setattr(step_threads, "busy_seconds", busy)
    answers = []
    for threads in (1, 2):
        # A recorded step has the same number of threads in each layer.
        options = {"device": "cpu", "cpu_threads": threads, "cuda_graphs": "off"}
        with SyncEngine(DRAFT_PATH, **options) as engine:
            done = engine.generate("def add(a, b):", max_tokens=8, temperature=0.0)
            answers.append(done.text)
        assert looks == 0 or threads == 2
    assert answers[0] == answers[1]
    # Nothing is looked at where the system does not tell. Of a pass, each layer may be computed by
    # another number of threads.
    layers = parse_config(json.loads((DRAFT_PATH / "config.json").read_text("utf-8"))).num_layers
    assert looks > 8 * (1 + layers) or looks == 0
