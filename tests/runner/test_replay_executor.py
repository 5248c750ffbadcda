"""Decode steps by recorded calls of native code, beside the layers' own."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import FixedRows
from asyncinfer.kernels import onednn
from asyncinfer.kernels.native import (
    ChunkKV,
    EndKernels,
    RecordedCalls,
    available,
    prefill_kernel,
)
from asyncinfer.layers import DecoderLayer, ForwardPass, RopeConfig
from asyncinfer.models import Decoder, ModelConfig, tensor_table
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.runner import replay_executor as module
from asyncinfer.runner import replayer
from asyncinfer.runner.queue_pace import MOST_QUEUED, QueuePace
from asyncinfer.runner.replayer import Replayer
from asyncinfer.runner.step_threads import StepThreads
from asyncinfer.sampling import SamplingState
from asyncinfer.scheduler import ChosenSampler, ForcedTokens

pytestmark = [
    pytest.mark.skipif(not available(), reason="no native code for this processor"),
    pytest.mark.usefixtures("laid_out"),
]

#: Wide enough for native code on every processor that has some.
WIDE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=128,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_context=640,
)
ROWS = 5
#: Makes a `Hand` for a model: one that replays, and one that never does.
MakeHands = Callable[..., tuple[Any, Any]]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The longest row of each replay, also of those that are queued."""
    monkeypatch.setattr(replayer, "_LONG", inf)
    seen: list[int] = []
    replay, begin = RecordedCalls.replay, Replayer.begin

    def counted(self: RecordedCalls, threads: int, longest: int, chunk: ChunkKV | None) -> None:
        seen.append(longest)
        replay(self, threads, longest, chunk)

    def begun(self: Replayer, calls: RecordedCalls, longest: int, needed: object) -> None:
        seen.append(longest)
        begin(self, calls, longest, needed)

    monkeypatch.setattr(RecordedCalls, "replay", counted)
    monkeypatch.setattr(Replayer, "begin", begun)
    return seen


def decoder_of(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    numbers = torch.Generator().manual_seed(3)

    def weight(name: str) -> torch.Tensor:
        shape = tensor_table(config)[name].shape
        values = torch.randn(shape, generator=numbers)
        return (values.abs() + 0.5 if name.endswith("norm") else values * 0.1).to(dtype)

    return Decoder(config, weight)


@pytest.fixture
def hands(make_hand: Callable[..., Any]) -> MakeHands:
    def made(config: ModelConfig, **options: Any) -> tuple[Any, Any]:
        options["decoder"] = decoder_of(config)
        return make_hand(**options), make_hand(**options, graphs="off")

    return made


def decode(hand: Any, steps: int, rows: int = ROWS, logprobs: int | None = 2) -> list[Any]:
    """Answers of so many rows, whose lengths pass ends of blocks at different steps."""
    results: list[Any] = []
    lengths = [3 + 2 * slot for slot in range(rows)]
    for slot, length in enumerate(lengths):
        tokens = [(slot * 7 + i * i) % 55 for i in range(length)]
        hand.join(slot, tokens, logprobs=logprobs)
        hand.row(slot, 0, length)
    results.append(result_of(hand))
    for step in range(steps):
        for slot, length in enumerate(lengths):
            hand.row(slot, length + step, 1)
        results.append(result_of(hand))
    return results


def result_of(hand: Any) -> object:
    found = hand.step()
    return found.tokens, found.logprobs


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qkv_bias": True},
        {"num_heads": 2, "num_kv_heads": 1},
        {"qk_norm": "head"},
        {"num_layers": 5},
        # Vectors and angles that are not looked up in tables.
        {"embedding_scale": 8.0},
        {"rope": RopeConfig(rope_type="dynamic", factor=2.0, original_context=16)},
    ],
    ids=str,
)
def test_replayed_steps_give_the_same_bits(
    changes: dict[str, Any], hands: MakeHands, replays: list[int]
) -> None:
    hand, right = hands(replace(WIDE, **changes))
    assert decode(hand, 30) == decode(right, 30)
    pages, expected = hand.kv.storage, right.kv.storage
    assert torch.equal(pages.view(torch.int32), expected.view(torch.int32))
    # The fourth step of so many rows is recorded, and every later one is replayed, the first of
    # them beside the layers.
    assert len(replays) == 26
    assert replays[-1] == 3 + 2 * (ROWS - 1) + 30


def test_replayed_steps_in_bfloat16_give_the_same_bits(
    make_hand: Callable[..., Any], replays: list[int]
) -> None:
    if not onednn.multiplies_bfloat16():
        pytest.skip("no products of bfloat16 numbers")
    decoder = decoder_of(WIDE, torch.bfloat16)
    hand, right = make_hand(decoder=decoder), make_hand(decoder=decoder, graphs="off")
    assert decode(hand, 30) == decode(right, 30)
    assert torch.equal(hand.kv.storage.view(torch.int16), right.kv.storage.view(torch.int16))
    if decoder_rows() >= ROWS:
        assert len(replays) == 26


def decoder_rows() -> int:
    """Rows that native code multiplies in bfloat16."""
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    if onednn.native_is_faster(weight):
        return 1 << 62
    weight = onednn.reorder(weight)
    found = onednn.blocked(weight, (64, 64))
    return 0 if found is None else found.most_rows


needs_chunks = pytest.mark.skipif(
    prefill_kernel(WIDE.head_dim, 2, WIDE.query_scale) is None, reason="no native code for chunks"
)


#: Enough that copies of prompts may have their keys and values.
BLOCKS = 1600


def chunks(hand: Any, sizes: Sequence[int], rows: int, slot: int = 5) -> list[object]:
    """What rows draw beside a prompt in chunks of these sizes, and what it draws itself."""
    lengths = [3 + 2 * each for each in range(rows)]
    for each, length in enumerate(lengths):
        hand.join(each, [(each * 7 + i * i) % 55 for i in range(length)])
        hand.row(each, 0, length)
    results = [result_of(hand)] if rows else []
    total, start = sum(sizes), 0
    hand.join(slot, [(slot + i * i * 3) % 55 for i in range(total)], logprobs=2)
    for step, size in enumerate(sizes):
        for each, length in enumerate(lengths):
            hand.row(each, length + step, 1)
        start += size
        hand.row(slot, start - size, size, samples=int(start == total))
        results.append(result_of(hand))
    for step in range(6):
        for each, length in enumerate(lengths):
            hand.row(each, length + len(sizes) + step, 1)
        hand.row(slot, total + step, 1)
        results.append(result_of(hand))
    return results


@needs_chunks
@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize(
    ("sizes", "trusted"),
    [
        ([24] * 11 + [17, 24] * 5, 11),
        ([40, 24] * 8, 4),
        ([19] * 7 + [90] + [19] * 5 + [21] + [19] * 6, 7),
        ([5, 6] * 12, 4),
    ],
    ids=str,
)
def test_a_chunk_beside_rows_gives_the_same_bits(
    rows: int, sizes: list[int], trusted: int, hands: MakeHands, replays: list[int]
) -> None:
    hand, right = hands(WIDE, blocks=BLOCKS)
    assert chunks(hand, sizes, rows) == chunks(right, sizes, rows)
    pages, expected = hand.kv.storage, right.kv.storage
    assert torch.equal(pages.view(torch.int32), expected.view(torch.int32))
    # The fourth chunk is recorded, the next one of another size is computed twice, and all later
    # ones are replayed, as are the last two steps without a chunk.
    assert len(replays) == len(sizes) - trusted + 2


@needs_chunks
def test_a_recording_serves_other_prompts(hands: MakeHands, replays: list[int]) -> None:
    """Whose copies lie elsewhere, and have room for another number of tokens."""
    hand, right = hands(WIDE, blocks=BLOCKS)
    found, expected, counts = [], [], []
    for sizes in ([24] * 12 + [9], [24] * 22, [90, 90] + [24] * 9):
        for each, into in ((hand, found), (right, expected)):
            for slot in list(each.tables):
                each.leave(slot)
            into.append(chunks(each, sizes, 2))
        counts.append(len(replays))
    assert found == expected
    # All steps of the last prompt are, from its first chunk on.
    assert counts[2] == counts[1] + 11 + 6


@needs_chunks
def test_prompts_in_turns_are_replayed(hands: MakeHands, replays: list[int]) -> None:
    """Each chunk of one drops the copy of the other."""
    hand, right = hands(WIDE, blocks=BLOCKS)
    sizes = [24] * 4 + [40, 24, 30, 24, 50, 24]
    found: list[list[object]] = [[], []]
    for each, results in zip((hand, right), found, strict=True):
        for slot in (0, 1):
            tokens = [(slot + i * i * 3) % 55 for i in range(sum(sizes))]
            each.join(slot, tokens, logprobs=2)
        start = 0
        for size in sizes:
            for slot in (0, 1):
                last = start + size == sum(sizes)
                each.row(slot, start, size, samples=int(last))
                results.append(result_of(each))
            start += size
    assert found[0] == found[1]
    pages, expected = hand.kv.storage, right.kv.storage
    assert torch.equal(pages.view(torch.int32), expected.view(torch.int32))
    # The second chunk of the second prompt was recorded.
    assert len(replays) == 2 * len(sizes) - 8


@needs_chunks
def test_chunks_in_bfloat16_give_the_same_bits(
    make_hand: Callable[..., Any], replays: list[int]
) -> None:
    if not onednn.multiplies_bfloat16() or decoder_rows() < 44:
        pytest.skip("a processor without native products of bfloat16")
    decoder = decoder_of(WIDE, torch.bfloat16)
    hand, right = (
        make_hand(decoder=decoder, blocks=BLOCKS, graphs=graphs) for graphs in ("lazy", "off")
    )
    sizes = [24, 40] * 9
    assert chunks(hand, sizes, 4) == chunks(right, sizes, 4)
    assert torch.equal(hand.kv.storage.view(torch.int16), right.kv.storage.view(torch.int16))
    if prefill_kernel(WIDE.head_dim, 2, WIDE.query_scale, torch.bfloat16) is not None:
        assert sum(longest > 200 for longest in replays) >= 3


def test_each_number_of_rows_has_a_recording(hands: MakeHands, replays: list[int]) -> None:
    hand, right = hands(WIDE)
    for rows in (1, 3, 2, 3, 1):
        for each in (hand, right):
            for slot in list(each.tables):
                each.leave(slot)
        before = len(replays)
        assert decode(hand, 9, rows) == decode(right, 9, rows)
        assert len(replays) > before


def test_rows_on_other_numbers_of_threads(hands: MakeHands, replays: list[int]) -> None:
    hand, right = hands(WIDE)
    expected = decode(right, 12)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = decode(hand, 12)
        for slot in list(hand.tables):
            hand.leave(slot)
        torch.set_num_threads(1)
        assert decode(hand, 12) == expected
    finally:
        torch.set_num_threads(before)
    assert found == expected
    assert len(replays) > 12


def test_a_long_replay_is_made_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch, hands: MakeHands, replays: list[int]
) -> None:
    """The interpreter can be left between two layers."""
    monkeypatch.setattr(replayer, "_LONG", -1.0)
    hand, right = hands(WIDE)
    between: list[None] = []
    expected = decode(right, 8)
    monkeypatch.setattr(hand.runner.decoder, "between_layers", lambda: between.append(None))
    assert decode(hand, 8) == expected
    assert not replays
    # The prompt and each of the steps.
    assert len(between) >= 9 * WIDE.num_layers


def test_looks_at_cores_know_whether_threads_help_each_other(
    make_hand: Callable[..., Any], replays: list[int]
) -> None:
    """Before a step and within it."""
    looks: list[tuple[int, bool]] = []
    threads = create_autospec(StepThreads, instance=True)
    threads.adapt.side_effect = lambda helps: looks.append((len(replays), helps))
    decode(make_hand(decoder=decoder_of(WIDE), threads=threads), 12)
    # A replay is made at once: a look before the step, and one within it.
    assert [helps for count, helps in looks if count > 1] == [True] * (2 * len(replays) - 3)
    # Beside the first one the layers are computed.
    assert [helps for count, helps in looks if count == 1] == [True] + [False] * 3
    assert not any(helps for count, helps in looks if not count)


class Keeper(Sampler, SamplerPlugin):
    """A sampler that keeps the logits it is given, as one whose call took too long may do."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Keeper:
        """It is its own parameters, too."""
        return self

    def join(self, slot: int, params: object) -> None:
        """Remember nothing."""

    def sample(self, step: SamplerStep) -> None:
        self.given.append(step.logits)
        self.copies.append(step.logits.clone())


def test_logits_that_a_plugin_keeps_are_not_those_of_the_next_step(
    hands: MakeHands, replays: list[int]
) -> None:
    (hand, _), keeper = hands(WIDE), Keeper()
    hand.join(0, [1, 2, 3])
    hand.plan.joins[0].samplers = (ChosenSampler(keeper, "keeper"),)
    hand.row(0, 0, 3)
    hand.step()
    hand.decode(0, 3, 10)
    assert len(replays) >= 5
    assert len(keeper.given) == 11
    for given, copy in zip(keeper.given, keeper.copies, strict=True):
        assert torch.equal(given, copy)


def test_greedy_tokens_are_found_by_the_recorded_calls(
    monkeypatch: pytest.MonkeyPatch, hands: MakeHands, replays: list[int]
) -> None:
    """Also where a logit is NaN."""
    hand, right = hands(WIDE)
    sampled: list[int] = []
    sample = SamplingState.sample

    def counted(self: SamplingState, logits: torch.Tensor, *more: Any) -> Any:
        sampled.append(len(logits))
        return sample(self, logits, *more)

    monkeypatch.setattr(SamplingState, "sample", counted)
    found = decode(hand, 20, logprobs=None)
    # The prompts, three steps, the recorded one and the one that is compared.
    assert len(sampled) == 6
    assert len(replays) == 16
    assert found == decode(right, 20, logprobs=None)
    hand.runner.decoder.embedding.weight[:] = torch.nan
    for slot in range(ROWS):
        hand.row(slot, 3 + 2 * slot + 20, 1)
    failed = hand.step().failed
    assert failed.keys() == set(range(ROWS))
    assert all("not finite" in str(error) for error in failed.values())
    # The other hand has sampled 21 times.
    assert (len(sampled), len(replays)) == (6 + 21, 17)


@needs_chunks
def test_greedy_tokens_beside_a_chunk_are_found_by_the_recorded_calls(
    monkeypatch: pytest.MonkeyPatch, hands: MakeHands, replays: list[int]
) -> None:
    """Not in the step of the prompt's last chunk, which draws, too."""
    hand, right = hands(WIDE, blocks=BLOCKS)
    sizes, sampled = [24] * 5 + [40] + [24] * 6, []
    sample = SamplingState.sample

    def counted(self: SamplingState, logits: torch.Tensor, *more: Any) -> Any:
        sampled.append(len(logits))
        return sample(self, logits, *more)

    monkeypatch.setattr(SamplingState, "sample", counted)
    found = chunks(hand, sizes, 3)
    # The prompts of three rows, five steps until one of another size is compared, that one, and the
    # last. The steps after it have four rows, of which one asks for probabilities.
    assert sampled == [3] * 7 + [4] * 7
    assert found == chunks(right, sizes, 3)
    assert len(replays) == 7 + 2


def test_a_recording_with_nan_is_used(hands: MakeHands, replays: list[int]) -> None:
    """The step that is compared has a row of NaN."""
    hand, right = hands(WIDE)
    for each in (hand, right):
        decode(each, 4, logprobs=None)
        each.runner.history.table[0] = 63
        each.runner.decoder.embedding.weight[63] = torch.nan
        each.row(0, 3 + 4, 1)
    for step in range(4, 10):
        for each in (hand, right):
            for slot in range(step == 4, ROWS):
                each.row(slot, 3 + 2 * slot + step, 1)
        assert list(hand.step().failed) == list(right.step().failed) == [0]
    assert len(replays) == 6


def test_largest_logits_that_are_others_are_not_used(
    monkeypatch: pytest.MonkeyPatch, hands: MakeHands, replays: list[int]
) -> None:
    hand, right = hands(WIDE)
    expected, largest = decode(right, 12, logprobs=None), EndKernels.largest
    monkeypatch.setattr(EndKernels, "largest", lambda self, x: largest(self, x[:, 8:]))
    assert decode(hand, 12, logprobs=None) == expected
    assert len(replays) == 1


def test_look_ups_that_are_others_are_not_used(
    monkeypatch: pytest.MonkeyPatch, hands: MakeHands, replays: list[int]
) -> None:
    hand, right = hands(WIDE)
    expected, take = decode(right, 12), EndKernels.take
    monkeypatch.setattr(EndKernels, "take", lambda self, y, x, at: take(self, y, x[1:], at))
    assert decode(hand, 12) == expected
    assert len(replays) == 1


def launched(hand: Any, steps: range, rows: Sequence[int] = range(ROWS)) -> list[object]:
    """Handles of steps after `decode`."""
    handles = []
    for step in steps:
        for slot in rows:
            hand.row(slot, 3 + 2 * slot + step, 1)
        handles.append(hand.launch())
    return handles


@pytest.mark.parametrize("count", [1, 2, MOST_QUEUED, MOST_QUEUED + 1, 2 * MOST_QUEUED + 1])
def test_steps_in_flight_are_computed_by_threads_of_a_queue(
    count: int, monkeypatch: pytest.MonkeyPatch, hands: MakeHands, replays: list[int]
) -> None:
    """Also more of them than it takes, for which the first ones are waited for. They pass ends of
    blocks."""
    monkeypatch.setattr(QueuePace, "steps", MOST_QUEUED)
    hand, right = hands(WIDE)
    decode(hand, 8, logprobs=None)
    for first in (8, 8 + count):
        before = len(replays)
        handles = launched(hand, range(first, first + count))
        assert len(replays) == before + count
        found = [hand.runner.collect(handle).tokens for handle in handles]
        expected = decode(right, first + count, logprobs=None)[first + 1 :]
        assert found == [tokens for tokens, _ in expected]
        for slot in range(ROWS):
            right.leave(slot)
    assert decode(right, 8 + 2 * count, logprobs=None)
    for slot in range(ROWS):
        assert torch.equal(
            *(kept(each, slot, 3 + 2 * slot + 8 + 2 * count) for each in (hand, right))
        )


def test_a_place_is_used_again_when_its_step_is_collected(
    monkeypatch: pytest.MonkeyPatch, hands: MakeHands
) -> None:
    """As the decode loop does: one is launched for each that is collected."""
    monkeypatch.setattr(QueuePace, "steps", 3)
    hand, right = hands(WIDE)
    decode(hand, 8, logprobs=None)
    handles, found = launched(hand, range(8, 11)), []
    for step in range(11, 11 + 3 * MOST_QUEUED):
        found.append(hand.runner.collect(handles.pop(0)).tokens)
        handles += launched(hand, range(step, step + 1))
    found += [hand.runner.collect(handle).tokens for handle in handles]
    expected = decode(right, 8 + len(found), logprobs=None)[9:]
    assert found == [tokens for tokens, _ in expected]


def test_without_threads_steps_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch, hands: MakeHands, replays: list[int]
) -> None:
    monkeypatch.setattr(QueuePace, "steps", 4)

    def refused(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(replayer, "CallQueue", refused)
    hand, right = hands(WIDE)
    found = decode(hand, 12, logprobs=None)
    assert replays
    handles = launched(hand, range(12, 14))
    found += [(hand.runner.collect(handle).tokens, {}) for handle in handles]
    assert [tokens for tokens, _ in found] == [
        tokens for tokens, _ in decode(right, 14, logprobs=None)
    ]


def test_steps_whose_vectors_torch_computes_are_computed_at_once(
    monkeypatch: pytest.MonkeyPatch, hands: MakeHands, replays: list[int]
) -> None:
    monkeypatch.setattr(QueuePace, "steps", 4)
    found = []
    for hand in hands(replace(WIDE, embedding_scale=8.0)):
        decode(hand, 8, logprobs=None)
        before = len(replays)
        handles = launched(hand, range(8, 11))
        assert len(replays) == before + (3 if before else 0)
        found.append([hand.runner.collect(handle).tokens for handle in handles])
        replays.clear()
    assert found[0] == found[1]


def kept(hand: Any, slot: int, tokens: int) -> torch.Tensor:
    """Keys and values of a slot's first tokens."""
    pages = hand.kv.storage[:, :, hand.tables[slot]].transpose(2, 3)
    return pages.flatten(3, 4)[..., :tokens, :]


@pytest.mark.parametrize("change", ["fewer", "leave", "join", "forced", "copy", "logprobs"])
def test_what_changes_waits_for_the_steps_in_flight(
    change: str, monkeypatch: pytest.MonkeyPatch, hands: MakeHands
) -> None:
    monkeypatch.setattr(QueuePace, "steps", 4)
    found = []
    for hand in hands(WIDE):
        decode(hand, 8, logprobs=None)
        handles = launched(hand, range(8, 10))
        rows = list(range(ROWS))
        if change == "fewer":
            rows.remove(1)
        elif change == "leave":
            hand.leave(1)
            rows.remove(1)
        elif change == "forced":
            start = 3 + 2 * 1 + 10
            hand.plan.forced.append(ForcedTokens(1, start, [7]))
        elif change == "copy":
            old, new = hand.tables[2][-1], hand.free.pop(0)
            hand.plan.groups[0].copies.append((old, new))
            hand.plan.groups[0].grown.append((2, len(hand.tables[2]) - 1, new))
            hand.tables[2][-1] = new
        elif change == "logprobs":
            hand.plan.prompt_logprobs[0] = 1
        elif change == "join":
            hand.leave(1)
            hand.join(1, [5, 6, 7])
            hand.row(1, 0, 3)
            handles.append(hand.launch())
            rows.remove(1)
        if change != "join":
            handles += launched(hand, range(10, 13), rows)
        drawn = [hand.runner.collect(handle).tokens for handle in handles]
        found.append((drawn, kept(hand, 2, 3 + 2 * 2 + 12).tolist()))
    assert found[0] == found[1]


def test_a_queued_step_says_how_many_are_wanted(
    monkeypatch: pytest.MonkeyPatch, hands: MakeHands
) -> None:
    hand, _ = hands(WIDE)
    decode(hand, 8, logprobs=None)
    found = []
    for most in (3, 4, 1):
        monkeypatch.setattr(QueuePace, "steps", most)
        for slot in range(ROWS):
            hand.row(slot, 3 + 2 * slot + 8 + len(found), 1)
        plan = hand.plan
        hand.launch()
        found.append(plan.queued)
    # The last one is computed at once.
    assert found == [3, 4, 0]
    # So is one that asks for more than its likeliest token.
    monkeypatch.setattr(QueuePace, "steps", 3)
    hand, _ = hands(WIDE)
    decode(hand, 8)
    for slot in range(ROWS):
        hand.row(slot, 3 + 2 * slot + 8, 1)
    plan = hand.plan
    hand.launch()
    assert plan.queued == 0


@pytest.mark.parametrize("closes", [True, False])
def test_threads_end_with_the_runner(
    closes: bool, monkeypatch: pytest.MonkeyPatch, make_hand: Callable[..., Any]
) -> None:
    """Also of one that is forgotten with steps in flight."""
    monkeypatch.setattr(QueuePace, "steps", 4)
    gc.collect()
    before = threading.active_count()
    hand = make_hand(decoder=decoder_of(WIDE))
    decode(hand, 8, logprobs=None)
    threads = [each for each in threading.enumerate() if each.name.endswith("(_serve)")]
    assert threading.active_count() == before + 1
    assert threads
    launched(hand, range(8, 12))
    model = weakref.ref(hand.runner.decoder)
    if closes:
        hand.runner.close()
        assert threading.active_count() == before
    del hand
    gc.collect()
    for thread in threads:
        thread.join(timeout=60)
    assert threading.active_count() == before
    gc.collect()
    assert model() is None


def test_results_of_a_closed_runner_keep_no_model(
    monkeypatch: pytest.MonkeyPatch, make_hand: Callable[..., Any]
) -> None:
    monkeypatch.setattr(QueuePace, "steps", 4)
    made = decoder_of(WIDE)
    hand, model = make_hand(decoder=made), weakref.ref(made)
    decode(hand, 8, logprobs=None)
    handles = launched(hand, range(8, 10))
    hand.runner.close()
    del made, hand
    gc.collect()
    assert model() is None
    assert len(handles) == 2


def test_what_is_not_in_a_table_is_refused(hands: MakeHands, replays: list[int]) -> None:
    """Recorded calls do not look."""
    hand, _ = hands(replace(WIDE, max_context=600))
    decode(hand, 8, logprobs=None)
    assert replays
    for slot in range(ROWS):
        hand.row(slot, 600 if slot == 2 else 3 + 2 * slot + 8, 1)
    with pytest.raises(IndexError, match="position 600 is not from 0 to 599"):
        hand.step()
    hand.runner.history.table[0] = 64
    for slot in range(ROWS):
        hand.row(slot, 3 + 2 * slot + 8, 1)
    with pytest.raises(IndexError, match="token 64 is not from 0 to 63"):
        hand.step()


@pytest.mark.parametrize("changes", [{"logit_softcap": 5.0}, {"logit_scale": 0.5}], ids=str)
def test_a_head_that_calls_torch_is_not_recorded(
    changes: dict[str, Any], hands: MakeHands, replays: list[int]
) -> None:
    hand, right = hands(replace(WIDE, **changes))
    assert decode(hand, 12) == decode(right, 12)
    assert len(replays) == 8


def test_the_head_of_many_rows_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, hands: MakeHands, replays: list[int]
) -> None:
    heads: list[int] = []
    logits = Decoder.logits

    def counted(self: Decoder, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
        heads.append(len(hidden))
        return logits(self, hidden, **options)

    monkeypatch.setattr(Decoder, "logits", counted)
    for most, calls in ((ROWS, 8), (ROWS - 1, 13)):
        monkeypatch.setattr(module, "_HEAD_ROWS", most)
        heads.clear()
        hand, _ = hands(WIDE)
        decode(hand, 12)
        # Where it is recorded, there are calls in the steps before the replays, in the recording,
        # and in the step that is computed both ways.
        assert len(heads) == calls
    assert len(replays) == 16


def test_layers_that_call_torch_are_not_recorded(hands: MakeHands, replays: list[int]) -> None:
    hand, right = hands(replace(WIDE, activation="gelu"))
    assert decode(hand, 8) == decode(right, 8)
    assert not replays


@pytest.fixture
def normless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that leave a norm out while their calls are recorded."""
    call: Callable[..., torch.Tensor] = DecoderLayer.__call__

    def other(self: DecoderLayer, x: torch.Tensor, forward: ForwardPass) -> torch.Tensor:
        recorded = isinstance(next(iter(forward.attends.values())), FixedRows)
        if not recorded:
            return call(self, x, forward)
        return self.mlp(self.attention(x, forward), None)

    monkeypatch.setattr(DecoderLayer, "__call__", other)


@pytest.mark.usefixtures("normless")
def test_a_recording_that_gives_something_else_is_not_used(
    hands: MakeHands, replays: list[int]
) -> None:
    hand, right = hands(WIDE)
    assert decode(hand, 12) == decode(right, 12)
    # The pages, too, are those of the layers.
    pages, right_pages = hand.kv.storage, right.kv.storage
    assert torch.equal(pages.view(torch.int32), right_pages.view(torch.int32))
    # The one replay found the difference, and none followed.
    assert len(replays) == 1


@needs_chunks
@pytest.mark.usefixtures("normless")
def test_what_a_wrong_recording_left_of_a_prompt_is_not_used(
    hands: MakeHands, replays: list[int]
) -> None:
    """It is found out in a prompt's first chunk, whose keys and values are in a copy by then."""
    hand, right = hands(WIDE, blocks=BLOCKS)
    for sizes in ([24] * 4, [40] + [24] * 12):
        for each in (hand, right):
            for slot in list(each.tables):
                each.leave(slot)
        assert chunks(hand, sizes, 0) == chunks(right, sizes, 0)
    # Also of the steps without a chunk.
    assert len(replays) == 2


def test_rows_with_an_adapter_are_computed_by_the_layers(
    make_hand: Callable[..., Any], replays: list[int]
) -> None:
    decoder = decoder_of(WIDE)
    pool = AdapterPool(
        WIDE, decoder.device, decoder.dtype, max_adapters=1, max_rank=4, max_bytes=1 << 20
    )
    hand = make_hand(decoder=decoder, adapters=pool)
    hand.join(0, [1, 2, 3], adapter=0)
    hand.row(0, 0, 3)
    hand.step()
    hand.decode(0, 3, 8)
    assert not replays


def test_the_first_answer_imports_no_compiler() -> None:
    """Its fourth token came more than a second late."""
    program = """
    import sys
    from asyncinfer import SyncEngine
    from asyncinfer.kernels.native import RecordedCalls

    replay, replayed = RecordedCalls.task, []
    RecordedCalls.task = lambda *given: replayed.append(given) or replay(*given)
    with SyncEngine() as engine:
        engine.generate("import ", max_tokens=8, ignore_eos=True)
    print(len(replayed) > 1, "torch._dynamo" in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
