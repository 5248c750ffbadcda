"""Chunked attention and attention that an indexer makes sparse: what their caches keep, what they
see, what is refused. `test_hybrid_families.py` compares whole models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention.batches import batch_of, scattered_tables
from models.families import randomised
from models.published import CONFIGS
from models.sparse import LLAMA4, SPARSE
from safetensors.torch import load_file, save_file
from transformers import Llama4TextConfig

from asyncinfer import EngineConfig, ModelLoadError
from asyncinfer.attention import (
    AttentionBatch,
    DeviceBatch,
    IndexedAttention,
    IndexQueries,
    KVCache,
    LayerKV,
    begin_attention,
    in_chunks,
)
from asyncinfer.models import ModelConfig, load_model, parse_config, read_config
from asyncinfer.planner import ModelSize, find_gpu, plan_config
from asyncinfer.runner import plan_memory
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.testing.decoder_run import DecoderRun

BLOCK, CHUNK, SCALE = 4, 8, 0.5
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    use_cpu_threads(1)
    yield
    use_cpu_threads(before)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence, each token to those that `seen` `[tokens, tokens]` tells."""
    scores = torch.einsum("qhd,kd->hqk", q, k) * SCALE
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,kd->qhd", weights, v).flatten(1)


class Run:
    """Two sequences, of which a part is computed already, in one pass over `width`-wide keys."""

    def __init__(self, width: int, starts: tuple[int, ...], counts: tuple[int, ...]) -> None:
        torch.manual_seed(len(starts))
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        self.tables = scattered_tables(ends, 16, BLOCK)
        self.cache = KVCache.allocate(LayerKV(1, width, 1), 16, BLOCK, torch.float32, "cpu")
        self.held = [torch.randn(end, width) for end in ends]
        for keys, table, start in zip(self.held, self.tables, starts, strict=True):
            for at in range(start):
                self.cache.k[0][table[at // BLOCK], 0, at % BLOCK] = keys[at]
        rows = [*zip(starts, counts, strict=True)]
        _, self.batch = batch_of(rows, self.tables, BLOCK)
        self.spans = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        self.new = torch.cat([keys[s] for keys, s in zip(self.held, self.spans, strict=True)])


def triangle(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("starts", "counts"),
    [((5, 0), (1, 21)), ((7, 8, 15), (1, 1, 10)), ((0,), (8,)), ((3, 24), (20, 2))],
)
def test_a_token_sees_its_chunk(
    starts: tuple[int, ...], counts: tuple[int, ...], invariant: bool
) -> None:
    run = Run(6, starts, counts)
    batch = replace(run.batch, invariant=invariant)
    cut = in_chunks(batch, CHUNK, alone=True)
    assert isinstance(cut, AttentionBatch)
    assert sum(cut.counts) == sum(counts)
    assert cut.block_tables.shape[1] <= CHUNK // BLOCK
    q = torch.randn(sum(counts), 3, 6)
    got = begin_attention(run.cache, cut, SCALE)(0, q, run.new[:, None], run.new[:, None])
    first = 0
    for keys, span, count in zip(run.held, run.spans, counts, strict=True):
        at = torch.arange(len(keys))
        seen = triangle(len(keys)) & (at[:, None] // CHUNK == at // CHUNK)
        queries = torch.zeros(len(keys), 3, 6)
        queries[span] = q[first : first + count]
        right = attended(queries, keys, keys, seen)[span]
        torch.testing.assert_close(got[first : first + count], right)
        first += count


def test_decode_rows_of_a_device_are_cut_as_those_of_the_host() -> None:
    """Recorded steps look at no length. A padding row stays one."""
    run = Run(6, (7, 8, 20), (1, 1, 1))
    cut = in_chunks(run.batch, CHUNK, alone=False)
    padded = DeviceBatch(
        torch.cat((run.batch.block_tables, run.batch.block_tables[:1])),
        torch.cat((run.batch.seq_lens, torch.zeros(1, dtype=torch.int32))),
        run.batch.query_starts,
        run.batch.slot_mapping,
        BLOCK,
        3,
    )
    device = in_chunks(padded, CHUNK, alone=False)
    assert device.seq_lens.tolist() == [*cut.seq_lens.tolist(), 0] == [8, 1, 5, 0]
    for row, length in enumerate(cut.seq_lens.tolist()):
        used = -(-length // BLOCK)
        assert torch.equal(device.block_tables[row, :used], cut.block_tables[row, :used])
    assert isinstance(cut, AttentionBatch)
    assert cut.sequences is None


@pytest.mark.parametrize(("starts", "counts"), [((0,), (17,)), ((16, 9, 2), (1, 4, 9))])
def test_a_token_sees_the_best_of_an_indexer(
    starts: tuple[int, ...], counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, most = Run(6 + 4, starts, counts), 5
    q = torch.randn(sum(counts), 3, 6)
    asked = IndexQueries(torch.randn(len(q), 11, 4), torch.randn(len(q), 11))
    new = run.new[:, None]
    got = IndexedAttention(run.cache, run.batch, SCALE, most)(0, q, new, new, None, asked)
    first = 0
    for held, span, count in zip(run.held, run.spans, counts, strict=True):
        for number in range(count):
            token, end = first + number, span.start + number + 1
            keys = held[:end]
            products = (asked.queries[token] @ keys[:, 6:].t()).relu()
            scores = asked.weights[token] @ products
            seen = torch.zeros(end, dtype=torch.bool)
            seen[scores.argsort(descending=True)[:most]] = True
            right = attended(q[token : token + 1], keys[:, :6], keys[:, :6], seen[None])[0]
            torch.testing.assert_close(got[token], right)
        first += count
    # However the queries are cut into tiles.
    monkeypatch.setattr("asyncinfer.attention.indexed._TILE_SCORES", 300)
    tiled = IndexedAttention(run.cache, run.batch, SCALE, most)(0, q, new, new, None, asked)
    torch.testing.assert_close(tiled, got)


def small(**changes: Any) -> ModelConfig:
    config = Llama4TextConfig(**LLAMA4 | {"attention_chunk_size": 32} | changes)
    return parse_config({**config.to_dict(), "architectures": ["Llama4ForCausalLM"]})


def plan(config: ModelConfig, **options: Any) -> Any:
    engine = EngineConfig(device="cpu", kv_bytes=1 << 20, **options)
    return plan_memory(engine, config, torch.float32, CPU, 199)


def test_chunks_are_kept_as_windows_are() -> None:
    config = small(num_hidden_layers=4)
    near, far = plan(config, max_context=256, max_step_tokens=16).groups[::-1]
    assert (near.window, near.layers, far.layers) == (32, (0, 1, 2), (3,))
    # Where no sequence is longer than a chunk there is nothing to cut.
    assert small(attention_chunk_size=256).chunk is None
    with pytest.raises(ModelLoadError, match=r"block_size=24: must divide 32"):
        plan(config, block_size=24)
    assert plan(config, block_size=24, max_context=32).max_context == 32


def test_what_an_indexer_chooses_cannot_be_computed_in_tiles() -> None:
    config = parse_config(CONFIGS["DeepSeek-V3.2"])
    with pytest.raises(ModelLoadError, match=r"deterministic=True: .* chosen by an indexer"):
        plan(config, deterministic=True)


def test_the_plan_counts_what_each_kind_reads() -> None:
    few = {"num_hidden_layers": 4}
    v3, v32 = (parse_config(CONFIGS[f"DeepSeek-V3{name}"] | few) for name in ("", ".2"))
    gpu = find_gpu("h200")
    keys = 4 * 128 * 2
    plans = [plan_config(each, gpu=gpu, context=8192) for each in (v3, v32)]
    plain, sparse = (each.formats[1].kv_bytes_per_token for each in plans)
    assert sparse - plain == keys
    # All keys of the indexer, and the vectors of 2,048 tokens.
    assert ModelSize.of(v32).kv_read(8192) == 4 * (8192 * 128 + 2048 * 576)
    scout = ModelSize.of(parse_config(CONFIGS["Llama-4-Scout-17B-16E"]))
    layer = 2 * 8 * 128
    assert scout.kv_read(8193) == layer * (12 * 8193 + 36)
    pairs = 8192 * 8193 // 2
    assert scout.multiplied(8193) == 2 * 40 * 128 * (12 * (pairs + 8193) + 36 * (pairs + 1))


def test_the_text_of_a_published_llama_4(tmp_path: Path) -> None:
    """As its makers name the tensors, with a tower that is left out."""
    text = SPARSE["llama4"][1][0]
    randomised(text).save_pretrained(tmp_path)
    ids = [*range(3, 60)]

    def logits() -> torch.Tensor:
        run = DecoderRun(load_model(tmp_path, "cpu", torch.float32, max_context=96), [ids])
        run.step({0: len(ids)})
        return run.logits[0]

    right, file = logits(), tmp_path / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    for tower in ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight"):
        tensors[tower] = torch.full((3,), torch.nan)
    save_file(tensors, file)
    values = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
    written = tmp_path / "config.json"
    said = json.loads(written.read_text())
    written.write_text(json.dumps({**values, "text_config": said}))
    assert read_config(tmp_path).notes == ("images are not supported: only text is read",)
    torch.testing.assert_close(logits(), right, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size=0"),
        ({"layer_types": ["banana"] * 2}, "layer_types"),
        ({"no_rope_layers": [1]}, "no_rope_layers"),
        ({"no_rope_layers": [1, 2]}, "no_rope_layers"),
        ({"moe_layers": [-1]}, "moe_layers"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning='yes'"),
        ({"floor_scale": 0}, "floor_scale=0"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
    ],
)
def test_a_llama_4_that_lies(changes: dict[str, Any], says: str) -> None:
    values = {**Llama4TextConfig(**LLAMA4).to_dict(), "architectures": ["Llama4ForCausalLM"]}
    with pytest.raises(ModelLoadError, match=says):
        parse_config({**values, **changes})


def test_a_number_for_the_temperature() -> None:
    values = {**Llama4TextConfig(**LLAMA4).to_dict(), "architectures": ["Llama4ForCausalLM"]}
    values |= {"no_rope_layers": [1, 0]}
    layers = [parse_config({**values, "attn_temperature_tuning": tuned}).layers for tuned in (4, 0)]
    assert [layer.temperature is None for layer in layers[0]] == [True, False]
    assert [layer.temperature is None for layer in layers[1]] == [True, True]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"index_topk": 0}, "index_topk=0"),
        ({"index_head_dim": 32}, "index_head_dim=32: must be between 64"),
        ({"q_lora_rank": None}, "q_lora_rank=None: is required"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ],
)
def test_a_deepseek_v32_that_lies(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        parse_config({**CONFIGS["DeepSeek-V3.2"], **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"linear_attn_config": [1]}, "linear_attn_config"),
        ({"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1]}}, "kda_layers"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ],
)
def test_a_kimi_linear_that_lies(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=says):
        parse_config({**CONFIGS["Kimi-Linear-48B-A3B"], **changes})
