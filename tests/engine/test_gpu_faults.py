"""Faults of a GPU's path, alone and in pairs: the runner opens, answers as torch's operators do,
and says once what it goes without. A device that has failed ends it, with the doctor's name."""

from __future__ import annotations

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
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels import dispatch, reference, trial, trust, verdicts
from asyncinfer.kernels.trial import Fault, TrialShapes
from asyncinfer.runner.accelerator import DeviceError
from asyncinfer.runner.canary import check_opened
from asyncinfer.runner.device import choose_kernels
from asyncinfer.runner.fallbacks import Fallbacks
from asyncinfer.runner.pending_step import PinnedBuffers

CUDA = torch.device("cuda", 0)
SHAPES = TrialShapes(
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab=60,
    dtype=torch.float32,
    kv_dtype=torch.float32,
)
PROMPT, ANSWER = [5, 17, 3, 44, 9], 3
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

    def find_fault_apart(self, shapes: TrialShapes, *_: Any, **__: Any) -> Fault | None:
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
            return trial.find_fault(shapes, cpu, self.kernels, told=tried.append)
        except Died:
            return Fault(f"{tried[-1]}: its trial was ended by signal 11", lasting=True)

    def kernel_for(self, operator: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
        if not dispatch.wants_triton():
            return operator
        kernel: Callable[..., Any] = getattr(self.kernels, operator.__name__)
        return kernel

    def open(self, make_hand: Any, config: EngineConfig) -> Any:
        """What `open_runner` does, around a model that is loaded already."""
        fallbacks = Fallbacks()
        fault = choose_kernels(config, SHAPES, CUDA)
        if fault is not None:
            fallbacks.add("kernels", fault)
        hand = make_hand(accelerator=self.device, fallbacks=fallbacks, slots=2, blocks=40)
        check_opened(hand.runner, config)
        return hand


KERNELS: tuple[Callable[[Gpu], None], ...] = (
    Gpu.not_compiling,
    Gpu.wrong_in_one_lane,
    Gpu.differing_between_runs,
    Gpu.process_killing,
    Gpu.missing_compiler,
)
FAULTS = (*KERNELS, Gpu.failed_capture, Gpu.sticky_error)
TOGETHER = [*((fault,) for fault in FAULTS), *itertools.combinations(FAULTS, 2)]
#: Where a trial finds any fault of kernels none of them runs, whichever it was.
SAME_WAY = [*itertools.combinations(KERNELS, 2)]


def named(faults: Any) -> str:
    return " and ".join(fault.__name__ for fault in faults)


@pytest.fixture
def gpu(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with FakeDevice() as device:
        fake = Gpu(device)
        monkeypatch.setattr(trust, "triton_is_missing", lambda: None)
        monkeypatch.setattr(trust, "find_fault_apart", fake.find_fault_apart)
        monkeypatch.setattr(verdicts, "user_cache_path", lambda _: tmp_path)
        about = SimpleNamespace(name="a GPU", major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
        monkeypatch.setattr(dispatch, "kernel_for", fake.kernel_for)
        yield fake
    dispatch.use_triton(True)


def answer(hand: Any) -> list[int]:
    hand.join(0, PROMPT, seed=3)
    hand.row(0, 0, len(PROMPT))
    first: list[int] = hand.step().tokens
    rest: list[int] = hand.decode(0, len(PROMPT), ANSWER - 1)
    return first + rest


def parts(faults: Any) -> set[str]:
    """What the runner has to go without."""
    found = {"kernels"} if any(fault in KERNELS for fault in faults) else set()
    return found | ({"graphs"} if Gpu.failed_capture in faults else set())


@pytest.mark.parametrize("faults", TOGETHER, ids=named)
def test_faults_alone_and_in_pairs(
    gpu: Gpu, make_hand: Any, greedy: Any, faults: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = greedy(PROMPT, ANSWER)
    gpu.plant(faults)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        # One step of each size is enough for what is alone.
        hand = gpu.open(make_hand, EngineConfig(warm_up=len(faults) == 1))
        if gpu.sticky:
            # From now on the device fails at whatever it is asked.
            def fails(*_: Any) -> None:
                raise RuntimeError(STICKY)

            monkeypatch.setattr(PinnedBuffers, "wait", fails)
            monkeypatch.setattr(gpu.device, "drain", fails)
            with pytest.raises(DeviceError, match=r"illegal memory access .*`asyncinfer doctor`"):
                answer(hand)
        elif faults not in SAME_WAY:
            assert answer(hand) == expected
    lost = parts(faults)
    assert dispatch.wants_triton() == ("kernels" not in lost)
    assert {each.part for each in hand.runner.fallbacks} == lost
    assert len(hand.runner.fallbacks) == len(lost)
    # Once, however much it does without.
    assert len(said) == bool(lost), [str(each.message) for each in said]
    for each in said:
        assert "`asyncinfer doctor`" in str(each.message)
    assert gpu.trials == 1


@pytest.mark.parametrize("fault", KERNELS, ids=lambda fault: fault.__name__)
def test_whoever_wants_these_kernels_is_refused(gpu: Gpu, make_hand: Any, fault: Any) -> None:
    gpu.plant([fault])
    with pytest.raises(ModelLoadError, match="kernels='triton': "):
        gpu.open(make_hand, EngineConfig(kernels="triton"))


@pytest.mark.parametrize("fault", KERNELS, ids=lambda fault: fault.__name__)
def test_what_lasts_is_known_at_the_next_open(gpu: Gpu, make_hand: Any, fault: Any) -> None:
    gpu.plant([fault])
    for _ in range(2):
        dispatch.use_triton(True)
        with pytest.warns(RuntimeWarning, match="asyncinfer doctor"):
            gpu.open(make_hand, EngineConfig())
    lasting = fault not in (Gpu.not_compiling, Gpu.missing_compiler)
    assert gpu.trials == (1 if lasting else 2)


@pytest.mark.parametrize("fault", [Gpu.not_compiling])
def test_without_a_trial_the_first_answer_finds_it(
    gpu: Gpu, make_hand: Any, greedy: Any, fault: Any
) -> None:
    expected = greedy(PROMPT, ANSWER)
    gpu.plant([fault])
    with pytest.warns(RuntimeWarning, match="asyncinfer doctor"):
        hand = gpu.open(make_hand, EngineConfig(kernel_trial="off"))
    assert gpu.trials == 0
    assert "kernels" in {each.part for each in hand.runner.fallbacks}
    assert answer(hand) == expected
