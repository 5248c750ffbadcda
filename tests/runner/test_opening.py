"""Opening a runner: sizes, devices, dtypes, and what cannot be."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncinfer.attention import KVCache, kv_format
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.cache import KVGroupSpec
from asyncinfer.config import EngineConfig
from asyncinfer.errors import InvalidRequest, ModelLoadError
from asyncinfer.models import Decoder, LayerConfig, ModelConfig
from asyncinfer.runner import open_runner, plan_memory, runner_of
from asyncinfer.runner.device import (
    choose_device,
    choose_dtype,
    choose_kv,
    use_cpu_threads,
)
from asyncinfer.runner.memory import for_drafts
from asyncinfer.runner.step_memory import activation_bytes, graph_bytes, graph_hold
from asyncinfer.scheduler import RunnerSpec, check_fits
from asyncinfer.weights import is_out_of_memory

CPU = torch.device("cpu")


def planned(decoder: Decoder, **options: Any) -> Any:
    return plan_memory(EngineConfig(**options), decoder.config, torch.float32, CPU, 55)


def block_bytes(decoder: Decoder, size: int = 16) -> int:
    return KVCache.bytes_per_block(decoder.config, size, torch.float32)


def test_bytes_that_were_asked_for_are_what_it_takes(decoder: Decoder) -> None:
    one = block_bytes(decoder)
    assert planned(decoder, kv_bytes=10 * one).num_blocks == 10
    assert planned(decoder, kv_bytes=11 * one - 1).num_blocks == 10
    assert planned(decoder, kv_bytes=1000 * one, max_running=1).num_blocks == 1000
    halved = plan_memory(EngineConfig(kv_bytes=10 * one), decoder.config, torch.bfloat16, CPU, 55)
    assert halved.num_blocks == 20


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_small_kv_is_more_blocks_by_the_bytes_it_saves(decoder: Decoder, kv: Any) -> None:
    """Eight float32 numbers and none beside them; eight bytes and a float32 scale."""
    one = block_bytes(decoder)
    spec = planned(decoder, kv_bytes=300 * one, kv=kv)
    assert spec.num_blocks == 300 * 32 // 12 > 2.6 * 300
    bf16 = plan_memory(
        EngineConfig(kv_bytes=300 * one, kv=kv), decoder.config, torch.bfloat16, CPU, 55
    )
    assert bf16.num_blocks == spec.num_blocks
    runner = runner_of(decoder, EngineConfig(kv_bytes=30 * one, kv=kv), 55)
    held = sum(tensor.nbytes for kv in runner.kv for tensor in kv.tensors)
    assert 29.6 * one < held <= 30 * one
    # Beside windows too, whose pages are as much smaller.
    model = windowed(None, 128)
    plain, small = (planned_windows(model, kv_bytes=1 << 18, kv=name) for name in ("plain", kv))
    (blocks, pages), (more_blocks, more_pages) = sizes(plain), sizes(small)
    assert more_pages >= pages > 0
    assert more_blocks + more_pages > 2.6 * (blocks + pages) - 2
    taken = (more_blocks + more_pages) * 2048 * 12 // 32
    assert taken <= 1 << 18


def test_fp8_kv_needs_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*args: Any) -> Any:
        raise AssertionError("weights were loaded")

    cuda = torch.device("cuda", 0)
    monkeypatch.setattr("asyncinfer.runner.opening.load_model", loads)
    monkeypatch.setattr("asyncinfer.runner.opening.choose_device", lambda name: cuda)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    message = r"kv='fp8': needs a GPU of compute capability 8\.9, cuda:0 has 8\.0"
    with pytest.raises(ModelLoadError, match=message):
        open_runner(MODEL_PATH, EngineConfig(kv="fp8"), 100)
    assert choose_kv("int8", cuda) is kv_format("int8")
    with pytest.raises(ModelLoadError, match="kv='int4': needs a CPU, this is cuda:0"):
        open_runner(MODEL_PATH, EngineConfig(kv="int4"), 100)
    assert choose_kv("int4", CPU) is kv_format("int4")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    assert choose_kv("fp8", cuda) is choose_kv("fp8", CPU) is kv_format("fp8")


def test_a_cpu_takes_a_gibibyte_at_most_and_no_more_than_can_be_used(decoder: Decoder) -> None:
    most = (1 << 30) // block_bytes(decoder)
    assert planned(decoder, max_running=1 << 16).num_blocks == most
    assert planned(decoder, max_running=3).num_blocks == 3 * 40
    assert planned(decoder, max_running=3, max_context=17).num_blocks == 3 * 2


def test_a_cache_that_the_host_has_no_room_for(decoder: Decoder) -> None:
    with pytest.raises(ModelLoadError, match=r"cpu has no room for \d+ KV blocks: .*allocate"):
        runner_of(decoder, EngineConfig(kv_bytes=1 << 50), 55)


def test_a_context_nobody_asked_for_shrinks_to_the_cache(decoder: Decoder) -> None:
    one = block_bytes(decoder)
    assert planned(decoder).max_context == 640
    assert planned(decoder, kv_bytes=5 * one).max_context == 80
    assert planned(decoder, kv_bytes=5 * one, max_context=80).max_context == 80


def test_a_prompt_that_is_too_long_is_told_what_bounds_the_context(decoder: Decoder) -> None:
    for options, bound in (
        ({"kv_bytes": 2 * block_bytes(decoder)}, rf"kv_bytes={2 * block_bytes(decoder)} holds no"),
        ({"max_context": 32}, "max_context=32"),
    ):
        spec = planned(decoder, **options)
        with pytest.raises(InvalidRequest, match=f"at most 31 fit the context of 32 .*{bound}"):
            check_fits(spec, 40, None)
    whole = planned(decoder)
    with pytest.raises(InvalidRequest, match="the model's"):
        check_fits(whole, whole.max_context, None)


def test_a_cache_of_one_token_serves_nothing(decoder: Decoder) -> None:
    one = block_bytes(decoder, 1)
    assert planned(decoder, kv_bytes=2 * one, block_size=1).max_context == 2
    with pytest.raises(ModelLoadError, match=rf"a context of 1 tokens \(kv_bytes={one} holds no"):
        planned(decoder, kv_bytes=one, block_size=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 641}, "max_context=641: this model's is 640"),
        ({"kv_bytes": 100}, "kv_bytes=100: one KV block of 16 tokens takes 4096 bytes"),
        (
            {"kv_bytes": 5 * 4096, "max_context": 81},
            "kv_bytes=20480: the KV of max_context=81 takes 24576 bytes",
        ),
    ],
    ids=["context", "bytes", "both"],
)
def test_options_that_cannot_be_met(
    decoder: Decoder, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        planned(decoder, **options)


@pytest.mark.parametrize("graphs", ["lazy", "start", "off"])
def test_a_gpu_gives_its_share_of_what_is_free_beside_the_steps(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, graphs: Any
) -> None:
    device = torch.device("cuda", 0)
    config = EngineConfig(kv_fraction=0.5, max_running=1 << 16, cuda_graphs=graphs)
    working = activation_bytes(config, decoder.config, torch.float32)
    # Logits and the sampler's work on them are the most of it here.
    assert working > 2048 * 60 * 4 * 6
    recorded = graph_bytes(config, decoder.config, torch.float32)
    tokens = 4 * (config.max_running + 1) * (decoder.config.max_context + 1)
    assert (recorded == tokens) == (graphs == "off")
    working += recorded

    def plan(free: int) -> Any:
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (free - 2000, 1 << 40))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 3000)
        monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 1000)
        return plan_memory(config, decoder.config, torch.float32, device, 55)

    assert plan(working + 200 * block_bytes(decoder)).num_blocks == 100
    with pytest.raises(ModelLoadError, match="0 bytes free on cuda:0 beside the weights"):
        plan(working)


def test_what_recorded_steps_need(decoder: Decoder) -> None:
    config = EngineConfig(max_running=20, max_step_tokens=20)
    bf16 = graph_bytes(config, decoder.config, torch.bfloat16)
    held = graph_hold(config, decoder.config, torch.bfloat16)
    # 21 slots with the tokens of 640 positions and one more, 40 blocks, six options, a position;
    # 20 rows of logits; hidden states of 32 tokens; at least a mebibyte for each of 6 sizes in 3
    # kinds, and of 2 sizes of passes.
    resident = 4 * 21 * (641 + 40 + 7) + 4 * 20 * 60 + 2 * 32 * 32
    assert bf16 - held - resident >= 20 << 20
    # A step makes its logits and the sampler's work on them, at least.
    assert held > 6 * 4 * 20 * 60
    wider = EngineConfig(max_running=200, max_step_tokens=20)
    assert graph_hold(wider, decoder.config, torch.bfloat16) > 5 * held
    # A pass has more tokens than a batch has rows.
    longer = EngineConfig(max_running=20, max_step_tokens=1000)
    inner = 1024 * 3 * decoder.config.intermediate_size * 2
    assert graph_hold(longer, decoder.config, torch.bfloat16) - held > inner * 3 // 4


def test_how_many_steps_ahead(decoder: Decoder) -> None:
    def overlap(device: str, **options: Any) -> int:
        config = EngineConfig(kv_bytes=1 << 20, **options)
        where = torch.device(device)
        return plan_memory(config, decoder.config, torch.float32, where, 55).overlap

    assert [overlap("cpu"), overlap("cuda:0"), overlap("cuda:0", overlap=7)] == [1, 8, 7]


def test_how_long_a_step_should_take(decoder: Decoder) -> None:
    def target(device: str, **options: Any) -> float | None:
        config = EngineConfig(kv_bytes=1 << 20, **options)
        where = torch.device(device)
        return plan_memory(config, decoder.config, torch.float32, where, 55).step_target

    assert [target("cpu"), target("cuda:0")] == [0.1, None]
    assert [target("cpu", step_target=3), target("cuda:0", step_target=0.02)] == [3, 0.02]
    assert target("cpu", step_target=math.inf) == math.inf


def test_no_room_for_the_cache_is_a_load_error(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> KVCache:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(KVCache, "allocate", full)
    with pytest.raises(ModelLoadError, match="no room for 40 KV blocks"):
        runner_of(decoder, EngineConfig(max_running=1), 55)


def test_no_room_for_the_steps_is_a_load_error(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    error: RuntimeError = torch.OutOfMemoryError("CUDA out of memory")

    def full(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr("asyncinfer.runner.opening.ModelRunner", full)
    with pytest.raises(ModelLoadError, match="no room for steps of 3 requests: CUDA out of memory"):
        runner_of(decoder, EngineConfig(max_running=3), 55)
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        runner_of(decoder, EngineConfig(max_running=3), 55)


def test_the_shipped_model_opens_and_says_what_it_holds() -> None:
    heard: list[Any] = []
    config = EngineConfig(device="cpu", kv_bytes=1 << 24, max_running=7, max_step_tokens=99)
    runner = open_runner(MODEL_PATH, config, 100, heard.append)
    spec = runner.spec
    assert (spec.max_slots, spec.max_step_tokens, spec.vocab_size) == (7, 99, 100)
    assert spec.block_size == 16
    assert spec.num_blocks > 0
    assert heard
    runner.close()


def test_a_tokenizer_larger_than_the_embedding_is_refused_before_loading(  # fault 46
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loads(*args: Any) -> Any:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("asyncinfer.runner.opening.load_model", loads)
    with pytest.raises(ModelLoadError, match="token ids go up to 999999"):
        open_runner(MODEL_PATH, EngineConfig(device="cpu"), 1_000_000)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        open_runner(tmp_path, EngineConfig(device="cpu"), 10)


@pytest.mark.parametrize("name", ["toaster", "mps", "cuda:99", "cpu:x"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"device='{name}'"):
        choose_device(name)


def test_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert choose_device("cpu") == CPU
    assert choose_dtype("auto", "bfloat16", CPU) is torch.float32
    assert choose_dtype("auto", "float16", cuda) is torch.float16
    # Before Ampere there is no bfloat16.
    for capability, dtype in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda _, it=capability: it)
        assert choose_dtype("auto", "bfloat16", cuda) is dtype
        assert choose_dtype("auto", "torch.bfloat16", cuda) is dtype
        assert choose_dtype("bfloat16", None, cuda) is torch.bfloat16
    assert choose_dtype("bfloat16", "float16", CPU) is torch.bfloat16
    with pytest.raises(ModelLoadError, match="dtype='int8'"):
        choose_dtype("int8", None, CPU)


def test_the_number_of_threads_is_the_callers_own() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def run(body: Callable[[], None]) -> None:
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()

    def chosen() -> None:
        use_cpu_threads(before + 3)
        seen.append(torch.get_num_threads())

    run(chosen)
    run(lambda: seen.append(torch.get_num_threads()))
    assert seen == [before + 3, before]
    assert torch.get_num_threads() == before


def test_a_runner_is_opened_with_the_threads_that_were_asked_for() -> None:
    seen: list[int] = []

    def opened() -> None:
        open_runner(MODEL_PATH, EngineConfig(device="cpu", cpu_threads=5), 4096).close()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=opened)
    thread.start()
    thread.join()
    assert seen == [5]


def test_a_cpu_without_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def windowed(*windows: int | None, context: int = 4096) -> ModelConfig:
    """One layer for each window; a layer's KV of a block of 16 tokens takes 2048 bytes."""
    layers = tuple(LayerConfig(rope=None, window=window) for window in windows)
    return ModelConfig(
        architecture="MistralForCausalLM",
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_layers=len(windows),
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_context=context,
        layers=layers,
    )


def planned_windows(model: ModelConfig, **options: Any) -> Any:
    options = {"max_running": 4, "max_step_tokens": 64, **options}
    return plan_memory(EngineConfig(**options), model, torch.float32, CPU, 55)


def sizes(spec: RunnerSpec) -> tuple[int, int]:
    """Blocks, and pages of the layers with a window."""
    blocks, pages = (group.num_pages for group in spec.groups)
    return blocks, pages


def test_pages_for_the_window_of_every_slot_and_the_tokens_in_flight() -> None:
    model = windowed(None, 128, 100)
    spec = planned_windows(model, kv_bytes=1 << 24)
    # Seven blocks before a block's first token and two more, in four slots; 64 tokens in flight.
    assert spec.groups == (
        KVGroupSpec(4 * 256, layers=(0,)),
        KVGroupSpec(4 * (8 + 2) + 4, window=128, layers=(1, 2)),
    )
    assert sizes(planned_windows(model, kv_bytes=1 << 24, overlap=2))[1] == 4 * 10 + 8
    blocks, pages = sizes(planned_windows(model, kv_bytes=1 << 20))
    assert blocks == ((1 << 20) - pages * 2 * 2048) // 2048
    assert pages == 4 * 10 + 4


def test_a_draft_model_has_one_group_and_a_small_share() -> None:
    model, cpu = windowed(128, None, None), torch.device("cpu")
    args = model, torch.float32, cpu, 1000
    assert len(plan_memory(EngineConfig(kv_bytes=1 << 26), *args).groups) == 2
    given = for_drafts(EngineConfig(kv_bytes=1 << 26, max_context=16, max_adapters=9), cpu)
    spec = plan_memory(given, *args, one_group=True)
    (group,) = spec.groups
    assert group.window is None
    assert group.layers == (0, 1, 2)
    assert (given.kv_bytes, spec.max_context, given.max_adapters) == (1 << 23, 4096, 0)
    assert for_drafts(EngineConfig(), cpu).kv_bytes == 1 << 27
    assert for_drafts(EngineConfig(), torch.device("cuda")).kv_bytes == 1 << 30


def test_where_bytes_are_few_there_are_as_many_blocks_as_in_one_pool() -> None:
    model = windowed(None, 128, 128, 128, 128, 128)
    for kv_bytes in range(10_000, 3_000_000, 17_500):
        one = kv_bytes // KVCache.bytes_per_block(model, 16, torch.float32)
        if not one:
            continue
        spec = planned_windows(model, kv_bytes=kv_bytes, max_running=64)
        assert spec.num_blocks >= min(one, 64 * 256)
        assert spec.max_context >= min(one * 16, 4096)
        if len(spec.groups) > 1:
            blocks, pages = sizes(spec)
            assert 11 <= pages <= one
            assert (blocks + 5 * pages) * 2048 <= kv_bytes


def test_a_context_that_was_asked_for_comes_before_windows_of_more_slots() -> None:
    model = windowed(None, 128)
    kv_bytes = (256 + 20) * 2048
    spec = planned_windows(model, kv_bytes=kv_bytes, max_context=4096, max_running=64)
    assert (spec.max_context, *sizes(spec)) == (4096, 256, 20)


def test_where_all_layers_have_a_window_blocks_cost_nothing() -> None:
    spec = planned_windows(windowed(128, 128), kv_bytes=100 * 2 * 2048)
    assert (*sizes(spec), spec.max_context) == (4 * 256, 100, 4096)
    assert [group.layers for group in spec.groups] == [(), (0, 1)]


def test_windows_that_do_not_pay_have_no_pages() -> None:
    spec = planned_windows(windowed(None, 128), max_context=160)
    assert [(group.window, group.layers) for group in spec.groups] == [(None, (0, 1))]
