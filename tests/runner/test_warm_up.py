"""Nothing compiles while a stream waits: a compiler that notes what it is asked for is asked for
nothing after an engine has opened."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice
from kernels.compiled import Launch, compiled_for, recorded
from runner.conftest import BLOCK, VOCAB

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import PagedAttention
from asyncinfer.config import EngineConfig
from asyncinfer.errors import ModelLoadError
from asyncinfer.kernels import dispatch, triton
from asyncinfer.kernels.rehearsal import rehearsing
from asyncinfer.models import Decoder, decoder, tensor_table
from asyncinfer.quantization import CudaLinear, linear
from asyncinfer.runner.canary import check_opened
from asyncinfer.runner.rehearsal import rehearse
from asyncinfer.runner.warm_up import warm_up
from asyncinfer.sampling import recorded as recorded_sampler
from asyncinfer.sampling import state as sampling_state

CUDA = torch.device("cuda", 0)


class Compiler:
    """Notes what the launches of Triton's wrappers would be compiled for; torch's operators compute
    what they would."""

    def __init__(self, launches: list[Launch], thread: ThreadPoolExecutor) -> None:
        self._launches, self._thread = launches, thread
        self._real = dispatch.kernel_for
        self._keys: dict[Hashable, frozenset[Hashable]] = {}
        #: What was asked for so far.
        self.compiled: set[Hashable] = set()

    def kernel_for(self, operator: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
        name = operator.__name__
        if name not in triton.__all__ or not dispatch.wants_triton():
            return operator

        def kernel(*args: Any, **options: Any) -> Any:
            call = (name, *map(seen, args), *((key, seen(options[key])) for key in sorted(options)))
            if call not in self._keys:
                # On a thread where nobody watches the device.
                work = self._thread.submit(self._compile, name, args, options)
                self._keys[call] = work.result()
            self.compiled |= self._keys[call]
            return operator(*args, **options)

        return kernel

    def _compile(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> frozenset[Hashable]:
        given = {option: shape_of(value) for option, value in options.items()}
        getattr(triton, name)(*map(shape_of, args), **given)
        return self._taken()

    def rehearsed(
        self, model: Decoder, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
    ) -> frozenset[Hashable]:
        """What a rehearsal asks for, where the operators are a GPU's own."""
        monkeypatch.setattr(dispatch, "kernel_for", self._real)
        table = tensor_table(model.config)

        def rehearsal() -> frozenset[Hashable]:
            with rehearsing(CUDA, lambda launch: None):
                outline = Decoder(
                    model.config, lambda name: torch.empty(table[name].shape, device="meta")
                )
                rehearse(outline, config, CUDA, VOCAB)
            return self._taken()

        return self._thread.submit(rehearsal).result()

    def _taken(self) -> frozenset[Hashable]:
        keys = frozenset(
            (launch.name, *sorted(map(str, compiled_for(launch).items())))
            for launch in self._launches
        )
        self._launches.clear()
        return keys


def seen(value: Any) -> Hashable:
    """All of an argument that a wrapper goes by."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.size(), value.stride()
    return str(value)


def shape_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    size, stride = value.size(), value.stride()
    return torch.empty_strided(size, stride, dtype=value.dtype, device="meta")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Layers and draws are those of a GPU."""
    monkeypatch.setattr(decoder, "has_fused_kernels", lambda weight: True)
    monkeypatch.setitem(linear._FORMATS, "plain", CudaLinear)
    monkeypatch.setattr(decoder, "begin_attention", PagedAttention)
    for module in (recorded_sampler, sampling_state):
        monkeypatch.setattr(module, "fuses", lambda like: True)
    with ThreadPoolExecutor(1) as thread, recorded() as launches:
        fake = Compiler(launches, thread)
        monkeypatch.setattr(dispatch, "kernel_for", fake.kernel_for)
        yield fake
    dispatch.use_triton(True)


@pytest.fixture
def fused(compiler: Compiler, decoder: Decoder) -> Decoder:
    """The tests' decoder, of layers as on a GPU."""
    table, numbers = tensor_table(decoder.config), torch.Generator().manual_seed(3)
    return Decoder(
        decoder.config, lambda name: torch.randn(table[name].shape, generator=numbers) * 0.3
    )


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as fake:
        yield fake


def serve(hand: Any) -> None:
    """Prompts of many lengths, drawn in every way, alone and beside rows that decode."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.5, "top_p": 0.5, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_p": 0.1, "logprobs": 2},
    ]
    lengths = (1, 2, 5, 17, 70)
    for slot, (length, way) in enumerate(zip(lengths, ways, strict=True)):
        hand.join(slot, [7] * length, seed=slot, **way)
        hand.row(slot, 0, length)
        for before in range(slot):
            hand.row(before, lengths[before] + slot - before - 1, 1)
        hand.step()
    last = len(lengths) - 1
    for rows in range(len(lengths), 0, -1):
        for slot in range(rows):
            hand.row(slot, lengths[slot] + last - slot, 1)
        last += 1
        hand.step()


@pytest.mark.parametrize("graphs", ["lazy", "off"])
def test_nothing_compiles_while_a_stream_waits(
    make_hand: Any,
    fused: Decoder,
    compiler: Compiler,
    graphs: str,
    gpu: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nobody need watch a device that records nothing.
    device = FakeDevice() if graphs == "lazy" else None
    with device or nullcontext():
        hand = make_hand(decoder=fused, accelerator=device, graphs=graphs, slots=8)
        warm_up(hand.runner)
        known = set(compiler.compiled)
        compiler.compiled.clear()
        serve(hand)
    assert len(compiler.compiled) > 20
    assert compiler.compiled <= known
    # And a rehearsal before it asks for all that the warm-up needs.
    config = EngineConfig(max_running=8, max_step_tokens=96, block_size=BLOCK)
    assert known <= compiler.rehearsed(fused, config, monkeypatch)


def test_it_records_nothing_and_leaves_nothing_behind(make_hand: Any, device: FakeDevice) -> None:
    hand = make_hand(accelerator=device, slots=2)
    warm_up(hand.runner)
    assert hand.runner.executor.graphs.recorded == 0
    plain = make_hand()
    for each in (hand, plain):
        each.join(0, [5, 17, 3])
        each.row(0, 0, 3)
        each.step()
    assert hand.decode(0, 3, 5) == plain.decode(0, 3, 5)
    assert hand.runner.executor.graphs.recorded == 2


def adapters(decoder: Decoder, *, warm_up: bool) -> AdapterPool:
    """With one adapter, of two layers' worth of modules."""
    cpu, numbers = torch.device("cpu"), torch.Generator().manual_seed(4)
    pool = AdapterPool(
        decoder.config, cpu, torch.float32, max_adapters=2, max_rank=8, warm_up=warm_up
    )
    tensors = {}
    for name, found in pool.layout.modules.items():
        outputs = found.layer.sizes[found.part]
        shapes = {"A": (4, found.layer.inputs), "B": (outputs, 4)}
        for side, shape in shapes.items():
            tensors[f"{name}.lora_{side}.weight"] = torch.randn(shape, generator=numbers)
    pool.read(tensors, {"lora_alpha": 1})
    return pool


@pytest.mark.parametrize("way", ["as it is loaded", "never", "in vain"])
def test_kernels_of_adapters_compile_as_the_first_is_loaded(
    make_hand: Any,
    fused: Decoder,
    compiler: Compiler,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "in vain":
        with monkeypatch.context() as patch:
            failing(compiler, patch, "lora_add")
            pool = adapters(fused, warm_up=True)
    else:
        pool = adapters(fused, warm_up=way == "as it is loaded")
    known = set(compiler.compiled)
    compiler.compiled.clear()
    with FakeDevice() as device:
        hand = make_hand(decoder=fused, accelerator=device, slots=4, adapters=pool)
        for slot, adapter in enumerate((0, -1, 0)):
            hand.join(slot, [7] * 5, adapter=adapter)
            hand.row(slot, 0, 5)
            hand.step()
        for start in (5, 6):
            for slot in range(3):
                hand.row(slot, start, 1)
            hand.step()
    served = {key for key in compiler.compiled if "lora" in str(key)}
    assert served
    assert (served <= known) == (way == "as it is loaded")
    if way == "as it is loaded":
        kernels = {str(key).split("'")[1] for key in known}
        steps = ("rows", "tiles")
        assert kernels == {f"lora_{side}_{kind}" for side in ("down", "up") for kind in steps}


def failing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, name: str = "rms_norm") -> None:
    def kernel_for(operator: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
        def kernel(*_: Any, **__: Any) -> Any:
            raise dispatch.KernelError(f"{name}: no C compiler found")

        wanted = operator.__name__ == name and dispatch.wants_triton()
        return kernel if wanted else operator

    monkeypatch.setattr(dispatch, "kernel_for", kernel_for)


def test_what_cannot_be_compiled_is_a_fallback_before_anybody_asks(
    make_hand: Any, device: FakeDevice, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(compiler, monkeypatch)
    hand = make_hand(accelerator=device)
    with pytest.warns(RuntimeWarning, match="no C compiler found"):
        check_opened(hand.runner, EngineConfig())
    assert [each.part for each in hand.runner.fallbacks] == ["kernels", "graphs"]


def test_a_deterministic_engine_does_not_open_then(
    make_hand: Any, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has its tiles tried before.
    hand = make_hand(deterministic=True)
    failing(compiler, monkeypatch)
    with pytest.raises(ModelLoadError, match="no C compiler found"):
        check_opened(hand.runner, EngineConfig(deterministic=True))
    check_opened(hand.runner, EngineConfig(deterministic=True, warm_up=False))


@pytest.mark.parametrize(("slots", "blocks"), [(1, 1), (2, 2), (70, 40)])
def test_runners_of_every_size(make_hand: Any, slots: int, blocks: int) -> None:
    hand = make_hand(slots=slots, blocks=blocks)
    warm_up(hand.runner)
    assert hand.runner.fallbacks == ()
