"""Faults of a GPU's path, alone and in pairs: the engine opens, answers as one on a CPU does, and
says once what it goes without. A device that has failed ends it, with the doctor's name."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice

from asyncinfer.config import EngineConfig
from asyncinfer.engine.source import Loaded, Progress
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels import dispatch, kept, reference, trial, trust
from asyncinfer.kernels.trial import Fault, TrialShapes
from asyncinfer.models import ModelConfig
from asyncinfer.runner import ModelRunner
from asyncinfer.runner.accelerator import DeviceError
from asyncinfer.runner.canary import check_opened
from asyncinfer.runner.device import choose_kernels, trial_shapes
from asyncinfer.runner.fallbacks import Fallbacks
from asyncinfer.runner.pending_step import PinnedBuffers
from asyncinfer.testing import InlineEngine, RandomModel

CUDA = torch.device("cuda", 0)
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=64,
)
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_bytes": 1 << 18, "max_running": 2}
PROMPTS = ["def add(a, b):", "x"]
STICKY = "CUDA error: an illegal memory access was encountered"


#: What a trial finds in kernels with these faults. It takes half a second for each.
_FOUND: dict[frozenset[str], Fault | None] = {}


class Died(BaseException):
    """The process of a trial is no more."""


class Gpu:
    """A device and kernels beside torch's, with whatever faults are planted."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.kernels = ModuleType("kernels")
        for name in dir(reference):
            setattr(self.kernels, name, getattr(reference, name))
        self.planted: list[str] = []
        self.sticky = False
        self.trials = 0

    def plant(self, faults: Iterable[Callable[[Gpu], None]]) -> None:
        for fault in faults:
            fault(self)
            if fault in KERNELS:
                self.planted.append(fault.__name__)

    # -- faults ----------------------------------------------------------------------------------

    def not_compiling(self) -> None:
        def kernel(*_: Any, **__: Any) -> Any:
            raise RuntimeError("PassManager::run failed")

        self.kernels.silu_mul = kernel  # type: ignore[attr-defined]

    def wrong_in_one_lane(self) -> None:
        right = self.kernels.rms_norm

        def kernel(*args: Any, **options: Any) -> torch.Tensor:
            y: torch.Tensor = right(*args, **options)
            y.view(-1)[17] += 3
            return y

        self.kernels.rms_norm = kernel  # type: ignore[attr-defined]

    def differing_between_runs(self) -> None:
        right, turn = self.kernels.paged_attention, itertools.count()

        def kernel(*args: Any, **options: Any) -> torch.Tensor:
            y: torch.Tensor = right(*args, **options)
            return y * (1 + next(turn) % 2 * 2**-20)

        self.kernels.paged_attention = kernel  # type: ignore[attr-defined]

    def process_killing(self) -> None:
        def kernel(*_: Any, **__: Any) -> None:
            raise Died

        self.kernels.kv_write = kernel  # type: ignore[attr-defined]

    def missing_compiler(self) -> None:
        def kernel(*_: Any, **__: Any) -> Any:
            raise RuntimeError("Failed to find C compiler")

        for name in reference.__all__:
            setattr(self.kernels, name, kernel)

    def failed_capture(self) -> None:
        self.device.failing = 1

    def sticky_error(self) -> None:
        self.sticky = True

    # -- how an engine comes to them ---------------------------------------------------------------

    def find_fault_in_child(self, shapes: TrialShapes, *_: Any, **__: Any) -> Fault | None:
        """As `trial_process` tells it, whose processes have tests of their own."""
        self.trials += 1
        planted = frozenset(self.planted)
        if planted not in _FOUND:
            # On another thread, where nobody watches the device.
            with ThreadPoolExecutor(1) as thread:
                _FOUND[planted] = thread.submit(self._tried, shapes).result()
        return _FOUND[planted]

    def _tried(self, shapes: TrialShapes) -> Fault | None:
        tried: list[str] = []
        try:
            cpu = torch.device("cpu")
            return trial.find_fault(shapes, cpu, self.kernels, on_kernel=tried.append)
        except Died:
            return Fault(f"{tried[-1]}: its trial was ended by signal 11", lasting=True)

    def kernel_for(self, operator: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
        if not dispatch.wants_triton():
            return operator
        kernel: Callable[..., Any] = getattr(self.kernels, operator.__name__)
        return kernel

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        """What `open_runner` does, around a model that is loaded already."""
        loaded = SOURCE.load(config.replace(kernels="auto"), progress)
        plain, fallbacks = loaded.runner, Fallbacks()
        assert isinstance(plain, ModelRunner)
        shapes = trial_shapes(MODEL, torch.float32, torch.float32)
        fault = choose_kernels(config, shapes, CUDA)
        if fault is not None:
            fallbacks.add("kernels", fault)
        spec = dataclasses.replace(plain.spec, overlap=2)
        runner = ModelRunner(
            plain.decoder, plain.kv, spec, accelerator=self.device, fallbacks=fallbacks
        )
        check_opened(runner, config)
        return dataclasses.replace(loaded, runner=runner)

    def open(self, **options: Any) -> InlineEngine:
        return InlineEngine(self, **{**OPTIONS, **options})


SOURCE = RandomModel(MODEL, seed=3)
KERNELS: tuple[Callable[[Gpu], None], ...] = (
    Gpu.not_compiling,
    Gpu.wrong_in_one_lane,
    Gpu.differing_between_runs,
    Gpu.process_killing,
    Gpu.missing_compiler,
)
FAULTS = (*KERNELS, Gpu.failed_capture, Gpu.sticky_error)
TOGETHER = [*((fault,) for fault in FAULTS), *itertools.combinations(FAULTS, 2)]


def named(faults: Any) -> str:
    return " and ".join(fault.__name__ for fault in faults)


@pytest.fixture
def gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with FakeDevice() as device:
        fake = Gpu(device)
        monkeypatch.setattr(trust, "triton_is_missing", lambda: None)
        monkeypatch.setattr(trust, "find_fault_in_child", fake.find_fault_in_child)
        monkeypatch.setattr(kept, "user_cache_path", lambda _: tmp_path)
        about = SimpleNamespace(name="a GPU", major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
        monkeypatch.setattr(dispatch, "kernel_for", fake.kernel_for)
        yield fake
    dispatch.use_triton(True)


def answers(engine: InlineEngine) -> list[list[int]]:
    streams = [
        engine.submit(prompt, max_tokens=length, temperature=0.0, ignore_eos=True)
        for prompt, length in zip(PROMPTS, (6, 4), strict=True)
    ]
    engine.run()
    for stream in streams:
        stream.read()
        assert stream.error is None
    return [stream.token_ids() for stream in streams]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What torch's operators answer on a CPU."""
    found = answers(InlineEngine(SOURCE, **OPTIONS))
    assert len({token for tokens in found for token in tokens}) > 4
    return found


def parts(faults: Any) -> set[str]:
    """What the runner has to go without."""
    found = {"kernels"} if any(fault in KERNELS for fault in faults) else set()
    return found | ({"graphs"} if Gpu.failed_capture in faults else set())


@pytest.mark.parametrize("faults", TOGETHER, ids=named)
def test_faults_alone_and_in_pairs(
    gpu: Gpu, expected: list[list[int]], faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.plant(faults)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # One step of each size is enough for what is alone.
        engine = gpu.open(warm_up=len(faults) == 1)
        if gpu.sticky:
            # From now on the device fails at whatever it is asked.
            def fails(*_: Any) -> None:
                raise RuntimeError(STICKY)

            monkeypatch.setattr(PinnedBuffers, "wait", fails)
            monkeypatch.setattr(gpu.device, "drain", fails)
            with pytest.raises(DeviceError, match=r"illegal memory access .*`asyncinfer doctor`"):
                answers(engine)
        else:
            assert answers(engine) == expected
    lost = parts(faults)
    assert dispatch.wants_triton() == ("kernels" not in lost)
    fallbacks = engine.stats().fallbacks
    assert {each.part for each in fallbacks} == lost
    assert len(fallbacks) == len(lost)
    # Once, however much it does without.
    assert len(said) == bool(lost), [str(each.message) for each in said]
    for each in said:
        assert "`asyncinfer doctor`" in str(each.message)
    assert gpu.trials == 1


@pytest.mark.parametrize("fault", KERNELS, ids=lambda fault: fault.__name__)
def test_whoever_wants_these_kernels_is_refused(gpu: Gpu, fault: Any) -> None:
    gpu.plant([fault])
    with pytest.raises(ModelLoadError, match="kernels='triton': "):
        gpu.open(kernels="triton")


@pytest.mark.parametrize("fault", KERNELS, ids=lambda fault: fault.__name__)
def test_what_lasts_is_known_at_the_next_open(gpu: Gpu, fault: Any) -> None:
    gpu.plant([fault])
    for _ in range(2):
        dispatch.use_triton(True)
        with pytest.warns(RuntimeWarning, match="asyncinfer doctor"):
            gpu.open(warm_up=False)
    lasting = fault not in (Gpu.not_compiling, Gpu.missing_compiler)
    assert gpu.trials == (1 if lasting else 2)


def test_without_a_trial_the_first_answer_finds_it(gpu: Gpu, expected: list[list[int]]) -> None:
    gpu.plant([Gpu.not_compiling])
    with pytest.warns(RuntimeWarning, match="asyncinfer doctor"):
        engine = gpu.open(kernel_trial="off")
    assert gpu.trials == 0
    assert "kernels" in {each.part for each in engine.stats().fallbacks}
    assert answers(engine) == expected
