"""`plan`: from a config to figures, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.eagle3_heads import HeadedModel, random_head
from planner.configs import CONFIGS

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import KVCache, kv_format
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.config import EngineConfig
from asyncinfer.errors import InvalidRequest, ModelLoadError
from asyncinfer.models import parse_config
from asyncinfer.planner import FORMATS as FORMATS_TRIED
from asyncinfer.planner import Plan, find_gpu, gpus, plan, plan_config

FORMATS = (
    "fp8 weights",
    "int8 weights",
    "int4 weights",
    "int4-128 weights",
    "fp8 KV",
    "int8 KV",
    "int8 weights and KV",
    "fp8 weights and KV",
)


def planned(model: str, gpu: str = "h200", **options: Any) -> Plan:
    return plan_config(parse_config(CONFIGS[model]), gpu=find_gpu(gpu), **options)


def test_measured_figures_unless_asked_for_others() -> None:
    measured, nominal = planned("Llama-3.1-8B"), planned("Llama-3.1-8B", nominal=True)
    assert (measured.bandwidth, measured.flops) == (4.3e12, pytest.approx(790e12))
    assert (nominal.bandwidth, nominal.flops) == (4.8e12, 989.5e12)
    assert f"{1e3 * measured.formats[0].decode_floor:.2f}" == "3.62"
    assert measured.formats[0].decode_floor > nominal.formats[0].decode_floor
    # What to expect of a GPU does not depend on which figures its floors are computed with.
    assert (
        measured.formats[0].decode_tokens_per_second == nominal.formats[0].decode_tokens_per_second
    )


def test_70b_does_not_fit_one_h100() -> None:
    found = planned("Llama-3.1-70B", "H100", context=512)
    whole, *_, small = found.formats
    assert found.gpu.name == "h100-sxm"
    assert f"{1e3 * whole.decode_floor:.0f}" == "42"
    assert (whole.limit, whole.sequences, whole.decode_tokens_per_second) == ("capacity", 0, 0.0)
    assert small.sequences > 0
    assert small.limit == "bandwidth"


def test_a_draft_model_takes_room_from_sequences() -> None:
    draft = parse_config(CONFIGS["Qwen3-0.6B"])
    alone, beside = planned("Llama-3.1-8B"), planned("Llama-3.1-8B", draft=draft)
    # 596M parameters in bfloat16, 1 GiB of KV, and the tensors of its largest step.
    assert alone.draft_bytes == 0
    assert 2.2e9 < beside.draft_bytes < 4e9
    for one, other in zip(alone.formats, beside.formats, strict=True):
        assert one.sequences > other.sequences > 0.9 * one.sequences
        assert one.weight_bytes == other.weight_bytes


@pytest.mark.parametrize("made_by", ["specforge", "nvidia", "vllm", "speculators"])
def test_a_head_takes_its_weights_and_its_kv(made_by: str, tmp_path: Path) -> None:
    head = random_head(made_by)
    model, beside = HeadedModel(head).save(tmp_path)
    alone, found = (plan(model, dtype="bfloat16", draft=each) for each in (None, beside))
    read = [each.numel() for name, each in head.tensors.items() if name not in ("d2t", "t2d")]
    assert found.formats[0].format == "bfloat16"
    assert found.draft_bytes == 2 * sum(read)
    kv = 2 * head.kv_heads * head.head_dim
    for one, other in zip(alone.formats, found.formats, strict=True):
        more = other.kv_bytes_per_token - one.kv_bytes_per_token
        assert kv < more <= 2 * kv
        assert one.weight_bytes == other.weight_bytes
        assert one.kv_bytes_per_sequence < other.kv_bytes_per_sequence
        assert one.decode_floor < other.decode_floor
    # Without its tensors it is taken for one with the model's embedding.
    (beside / "model.safetensors").unlink()
    own = head.tensors.get("embed_tokens.weight")
    less = 0 if own is None else 2 * own.numel()
    assert (
        plan(model, dtype="bfloat16", draft=beside / "config.json").draft_bytes
        == found.draft_bytes - less
    )
    # It is a head of that model alone.
    with pytest.raises(ModelLoadError, match="must be the model's"):
        plan(MODEL_PATH, draft=beside)


def test_limits() -> None:
    assert planned("Llama-3.1-8B", batch=1).formats[0].limit == "bandwidth"
    assert planned("Llama-3.1-8B", batch=1024, context=16).formats[0].limit == "compute"
    many = planned("Llama-3.1-8B", batch=1024).formats[0]
    assert many.limit == "capacity"
    assert many.decode_tokens_per_second == many.most_tokens_per_second > 0


def test_what_fits_is_what_fits() -> None:
    found = planned("Llama-2-7B", "rtx-4090", context=1000)
    planned_format = found.formats[0]
    blocks = -(-1000 // 16) * 16 * planned_format.kv_bytes_per_token
    room = found.gpu.memory - planned_format.weight_bytes
    assert planned_format.sequences * blocks <= EngineConfig().kv_fraction * room
    # A 7B model in 16 bits on 24 GB: some GB are left, less than one for the largest step.
    assert (planned_format.sequences + 1) * blocks > EngineConfig().kv_fraction * (room - 1e9)


def test_adapters_take_their_memory() -> None:
    config = parse_config(CONFIGS["Llama-3.1-8B"])
    sizes = {"max_adapters": 100, "max_rank": 16, "max_bytes": 1 << 40}
    pool = AdapterPool(config, torch.device("cpu"), torch.bfloat16, **sizes)
    gpu, many = find_gpu("a100-40gb"), {"adapters": 100, "adapter_rank": 16}
    without, found = (plan_config(config, gpu=gpu, **options) for options in ({}, many))
    assert without.adapter_bytes == 0
    assert found.adapter_bytes == pool.capacity > 8e9
    first, other = without.formats[0], found.formats[0]
    fewer = first.sequences - other.sequences
    # What the adapters take is missing for sequences, to one of them.
    assert abs(fewer * first.kv_bytes_per_sequence - EngineConfig().kv_fraction * 8.4e9) < 1.1e9
    assert plan_config(config, gpu=gpu, adapters=100).adapter_bytes == 4 * found.adapter_bytes


def test_smaller_formats() -> None:
    """Ideal gains of one sequence with little context: 1.9 times with one byte, 3.2 with half."""
    found = planned("Llama-3.1-8B", context=16)
    assert tuple(planned_format.format for planned_format in found.formats) == (
        "bfloat16",
        *FORMATS,
    )
    whole, fp8, int8, int4, wide, kv, kv8, both8, both = found.formats
    gains = [
        round(whole.decode_floor / planned_format.decode_floor, 1)
        for planned_format in (fp8, int8, int4, wide)
    ]
    assert gains == [1.9, 1.9, 2.8, 3.2]
    # 128 numbers and a float32 scale instead of 128 times two bytes.
    assert kv.kv_bytes_per_token * 256 == whole.kv_bytes_per_token * (128 + 4)
    for planned_format in (kv8, both8, both):
        assert planned_format.kv_bytes_per_token == kv.kv_bytes_per_token
    assert kv.weight_bytes == whole.weight_bytes
    assert both.weight_bytes == fp8.weight_bytes < whole.weight_bytes
    # Of the matrix units' work only fp8's arithmetic makes less.
    whole, fp8, int8, int4, *_ = planned("Llama-3.1-8B", context=4096).formats
    assert fp8.prefill_floor < int8.prefill_floor == int4.prefill_floor == whole.prefill_floor
    # Ampere has no fp8 units: the bytes are fewer, the arithmetic is not.
    old, old_fp8, *_ = planned("Llama-3.1-8B", "a100").formats
    assert old_fp8.prefill_floor == old.prefill_floor
    assert old_fp8.decode_floor < old.decode_floor
    # Nor do its kernels read fp8 KV.
    kept = {planned_format.format for planned_format in planned("Llama-3.1-8B", "a100").formats[1:]}
    assert set(FORMATS) - kept == {"fp8 KV", "fp8 weights and KV"}


@pytest.mark.parametrize("model", sorted(CONFIGS))
def test_kv_takes_what_the_engine_takes_for_it(model: str) -> None:
    """Scales included, heads of every size and a compressed cache among them."""
    config = parse_config(CONFIGS[model])
    found = planned(model, context=16, dtype="bfloat16")
    for planned_format, planned_one in zip(FORMATS_TRIED, found.formats[1:], strict=True):
        kv = KVCache.allocate(
            config, 2, 16, torch.bfloat16, "meta", format=kv_format(planned_format.kv)
        )
        held = sum(tensor.nbytes for tensor in kv.tensors)
        assert planned_one.kv_bytes_per_token * 2 * 16 == held
    assert {planned_format.kv for planned_format in FORMATS_TRIED} == {"plain", "fp8", "int8"}


def test_float32() -> None:
    found = planned("gpt2", "rtx-3090", dtype="float32")
    assert found.formats[0].weight_bytes == 4 * found.parameters
    assert found.flops == find_gpu("rtx-3090").fp32


def test_a_gpu_of_ones_own() -> None:
    slow = replace(find_gpu("l4"), name="mine", bandwidth=1e11)
    found = plan_config(parse_config(CONFIGS["Qwen3-0.6B"]), gpu=slow, batch=2)
    faster = planned("Qwen3-0.6B", "l4", batch=2)
    assert found.formats[0].decode_floor == pytest.approx(3 * faster.formats[0].decode_floor)


def test_every_gpu_is_plausible() -> None:
    assert len(gpus()) == 12
    for name, gpu in gpus().items():
        assert find_gpu(name.upper().replace("-", " ")) is gpu
        assert gpu.source
        assert gpu.fp32 < gpu.bf16 < (gpu.fp8 or 1e18)
        # 100 and more operations in the time of a byte, and memory read in 10 to 100 ms.
        assert 70 < gpu.bf16 / gpu.bandwidth < 450
        assert 0.01 < gpu.memory / gpu.bandwidth < 0.1
        assert (gpu.measured_bandwidth or 0) < gpu.bandwidth
        assert (gpu.measured_bf16 or 0) < gpu.bf16


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"gpu": "h300"}, "gpu"),
        ({"context": 0}, "context"),
        ({"context": 131_073}, "context"),
        ({"context": True}, "context"),
        ({"batch": 0}, "batch"),
        ({"batch": 1 << 21}, "batch"),
        ({"dtype": "int3"}, "dtype"),
        ({"adapters": -1}, "adapters"),
        ({"adapters": 1, "adapter_rank": 0}, "adapter_rank"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Llama-3.1-8B"]))
    with pytest.raises(InvalidRequest, match=rf"{field}=") as caught:
        plan(path, **options)
    assert caught.value.field == field
    if field == "gpu":
        assert all(name in str(caught.value) for name in gpus())


def test_an_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["Llama-3.1-8B"], "architectures": ["Lama"]}))
    with pytest.raises(ModelLoadError, match=r"none of these is known.*LlamaForCausalLM"):
        plan(path)


def test_a_folder_and_its_config_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["gpt2"]))
    assert plan(tmp_path) == plan(path) == plan(str(path))
    path.unlink()
    with pytest.raises(ModelLoadError, match="no such file"):
        plan(tmp_path)
