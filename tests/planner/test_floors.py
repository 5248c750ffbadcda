"""Floors against figures that are known: counts of parameters, published arithmetic, a table."""

from __future__ import annotations

from typing import Any

import pytest
from planner.configs import CONFIGS, PARAMETERS

from asyncinfer.models import parse_config
from asyncinfer.planner import ModelSize, Speed, Storage, decode_floor, prefill_floor

#: An H200 as measured: a copy, and a product in bfloat16.
H200 = Speed(bandwidth=4.3e12, flops=790e12)


def size_of(model: str, **changes: Any) -> ModelSize:
    return ModelSize.of(parse_config({**CONFIGS[model], **changes}))


@pytest.mark.parametrize("model", sorted(CONFIGS))
def test_parameters_as_published(model: str) -> None:
    assert size_of(model).parameters == PARAMETERS[model]


def test_bytes_as_published() -> None:
    llama2 = size_of("Llama-2-7B")
    assert f"{4096 * Storage().kv_bytes_per_token(llama2) / 1e9:.1f} GB" == "2.1 GB"
    assert f"{Storage().weight_bytes(size_of('Llama-3.1-8B')) / 1e9:.0f} GB" == "16 GB"


def test_70b_in_float16_on_an_h100() -> None:
    h100 = Speed(bandwidth=3.35e12, flops=989e12)
    floor = decode_floor(size_of("Llama-3.1-70B"), h100, batch=1, context=4096)
    assert f"{1e3 * floor.seconds:.0f} ms" == "42 ms"


#: Bytes per step of one sequence that begins, in GB; KV bytes per token; milliseconds of a decode
#: step at contexts of 512, 2,048 and 8,192, of one sequence and of 64; of a prefill of 2,048 and
#: of 8,192 tokens. On an H200, in bfloat16.
TABLE = {
    "Llama-3.1-8B": (
        "15.01",
        131_072,
        ("3.51", "3.55", "3.74"),
        ("4.49", "7.49", "19.5"),
        ("37.6", "167"),
    ),
    "Qwen3-4B": (
        "8.05",
        147_456,
        ("1.89", "1.94", "2.15"),
        ("3.00", "6.37", "19.9"),
        ("20.4", "100"),
    ),
    "Llama-3.2-1B": (
        "2.47",
        32_768,
        ("0.579", "0.590", "0.637"),
        ("0.825", "1.57", "4.57"),
        ("5.4", "25.8"),
    ),
    "Qwen3-0.6B": (
        "1.19",
        114_688,
        ("0.291", "0.332", "0.496"),
        ("1.15", "3.77", "14.3"),
        ("2.9", "18.9"),
    ),
}


def printed(value: float, like: str) -> str:
    """With as many decimals as `like`."""
    return f"{value:.{len(like.partition('.')[2])}f}"


@pytest.mark.parametrize("model", sorted(TABLE))
def test_the_table_of_floors(model: str) -> None:
    gigabytes, kv_bytes, alone, many, prefill = TABLE[model]
    size = size_of(model)
    first = decode_floor(size, H200, batch=1, context=0)
    assert printed(first.seconds * H200.bandwidth / 1e9, gigabytes) == gigabytes
    assert Storage().kv_bytes_per_token(size) == kv_bytes
    for batch, row in ((1, alone), (64, many)):
        for context, figure in zip((512, 2048, 8192), row, strict=True):
            floor = decode_floor(size, H200, batch=batch, context=context)
            assert printed(1e3 * floor.seconds, figure) == figure
    for tokens, figure in zip((2048, 8192), prefill, strict=True):
        assert printed(1e3 * prefill_floor(size, H200, tokens=tokens).seconds, figure) == figure


def test_a_large_batch_is_arithmetic() -> None:
    size = size_of("Llama-3.1-8B")
    few, many = (decode_floor(size, H200, batch=batch, context=16) for batch in (8, 2048))
    assert not few.compute_bound
    assert few.weights > few.compute
    assert many.compute_bound
    assert many.seconds == many.compute + many.kv
    assert many.compute == pytest.approx(
        2 * 2048 * (size.parameters - size.lookup) / H200.flops, rel=1e-12
    )


def test_a_step_reads_the_experts_it_needs() -> None:
    size = size_of("Mixtral-8x7B")
    assert size.experts_read(1) == pytest.approx(2 / 8)
    assert size.experts_read(2) == pytest.approx(1 - (6 / 8) ** 2)
    assert size.experts_read(200) == pytest.approx(1.0)
    # Its makers say that 12.9 billion are active; the embedding is 0.13 of them.
    assert (size.layer_parameters + size.head_parameters) / 1e9 == pytest.approx(12.75, abs=0.01)
    streamed = Storage().streamed_bytes(size, 1)
    assert streamed == pytest.approx(2 * (size.layer_parameters + size.head_parameters))
    everything = Storage().weight_bytes(size) - 2 * size.lookup
    assert Storage().streamed_bytes(size, 1000) == pytest.approx(everything)


def test_a_window_is_all_that_is_read() -> None:
    windowed, full = size_of("Mistral-7B-v0.1"), size_of("Mistral-7B-v0.1", sliding_window=None)
    token = 2 * 8 * 128
    assert windowed.kv_read(100) == full.kv_read(100) == 32 * token * 100
    assert windowed.kv_read(10_000) == 32 * token * 4096
    assert full.kv_read(10_000) == 32 * token * 10_000


@pytest.mark.parametrize(("tokens", "window"), [(1, 4), (4, 4), (9, 4), (9, None), (9, 1)])
def test_pairs_of_queries_and_keys(tokens: int, window: int | None) -> None:
    size = size_of("Mistral-7B-v0.1", sliding_window=window, num_hidden_layers=1)
    seen = sum(
        1 for query in range(tokens) for key in range(query + 1) if query - key < (window or 99)
    )
    assert size.multiplied(tokens) == 2 * 32 * 128 * seen


def test_learned_positions_are_looked_up() -> None:
    size = size_of("gpt2")
    assert size.lookup == (50_257 + 1024) * 768
    assert size.tied == 50_257 * 768
    # Biases and norms stay as they are in every format.
    assert size.linear == 12 * 12 * 768 * 768


def test_a_compressed_cache() -> None:
    """DeepSeek-V2 keeps 576 numbers for all heads of a layer; of experts a token is sent to six of
    64, and to two that every token takes."""
    size = size_of("DeepSeek-V2-Lite")
    assert Storage().kv_bytes_per_token(size) == 2 * 576 * 27
    assert {each.elements for each in size.attention} == {16 * (128 + 64 + 128)}
    # Its makers say 2.4 billion.
    active = (size.layer_parameters + size.head_parameters) / 1e9
    assert active == pytest.approx(2.4, abs=0.1)
    shared = 26 * 3 * 2048 * 2 * 1408
    assert size.linear > shared
    assert size.experts == 26 * 64 * 3 * 2048 * 1408
