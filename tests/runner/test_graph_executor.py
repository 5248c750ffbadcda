"""Recorded steps on a fake device, against the same steps computed as they are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fakes.fake_device import FakeDevice
from runner.churn import churn
from runner.conftest import CONFIG
from support import columns

from asyncinfer.adapters import AdapterPool, check_adapter, open_adapter
from asyncinfer.models import Decoder, tensor_table
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.graph_executor import GraphExecutor

PROMPTS = {
    0: [5, 17, 3, 44, 9, 9, 21, 30, 2, 50, 11],
    1: [1, 2, 3],
    2: [40] * 7,
    3: [8, 9],
    4: [30, 20, 10, 5, 2, 1, 0, 7],
    5: [54],
}
GREEDY: dict[str, Any] = {}
DRAWN = {"temperature": 0.8}
TRUNCATED = {"temperature": 1.0, "top_p": 0.7}
SCORED = {"logprobs": 2}
PENALISED = {"frequency_penalty": 0.8}


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with FakeDevice() as fake:
        yield fake


@pytest.fixture
def graph_hand(make_hand: Any, device: FakeDevice) -> Callable[..., Any]:
    return lambda **options: make_hand(accelerator=device, **options)


@pytest.fixture
def plain_hand(make_hand: Any, device: FakeDevice) -> Callable[..., Any]:
    """One that computes beside the device."""

    def make(**options: Any) -> Any:
        hand = make_hand(**options)
        launch = hand.launch

        def unwatched() -> object:
            with device.unwatched():
                return launch()

        hand.launch = unwatched
        return hand

    return make


def executor(hand: Any) -> GraphExecutor:
    found = hand.runner.executor
    assert isinstance(found, GraphExecutor)
    return found


def begin(hand: Any, slot: int, **options: Any) -> list[int]:
    """Seat a prompt and compute it; what it drew."""
    hand.join(slot, PROMPTS[slot], seed=slot + 1, **options)
    hand.row(slot, 0, len(PROMPTS[slot]))
    tokens: list[int] = hand.step().tokens
    return tokens


def decode(hand: Any, lengths: dict[int, int]) -> Any:
    """A step of these slots, each at its position; positions go on."""
    for slot, position in lengths.items():
        hand.row(slot, position, 1)
        lengths[slot] = position + 1
    return hand.step()


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        *((options, "lazy") for options in (GREEDY, DRAWN, TRUNCATED, PENALISED)),
        *((options, "start") for options in (GREEDY, PENALISED)),
    ],
    ids=str,
)
def test_a_batch_that_changes_gets_the_tokens_it_would_get_without(
    plain_hand: Any, graph_hand: Any, options: dict[str, Any], graphs: str
) -> None:
    answers = []
    for hand in (plain_hand(), graph_hand(graphs=graphs)):
        tokens = []
        lengths: dict[int, int] = {}
        for slot in PROMPTS:
            tokens += begin(hand, slot, **options)
            lengths[slot] = len(PROMPTS[slot])
            for _ in range(3):
                tokens += decode(hand, lengths).tokens
        for _ in range(9):
            tokens += decode(hand, lengths).tokens
        for slot in (2, 0, 5):
            hand.leave(slot)
            del lengths[slot]
            for _ in range(2):
                tokens += decode(hand, lengths).tokens
        # Another order, a new sequence in an old slot, and one that is left out for a while.
        lengths = {slot: lengths[slot] for slot in (4, 1, 3)}
        tokens += begin(hand, 2, **options)
        lengths[2] = len(PROMPTS[2])
        left_out = {1: lengths.pop(1)}
        for _ in range(5):
            tokens += decode(hand, lengths).tokens
        lengths |= left_out
        for _ in range(5):
            tokens += decode(hand, lengths).tokens
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 10
    assert executor(hand).graphs.recorded > 0


def two_adapters() -> AdapterPool:
    """Of other ranks and modules, in slots 0 and 1."""
    pool = AdapterPool(CONFIG, torch.device("cpu"), torch.float32, max_adapters=3, max_rank=8)
    numbers = torch.Generator().manual_seed(4)
    for rank, modules in ((3, ("self_attn.q_proj", "mlp.up_proj")), (8, ("mlp.down_proj",))):
        tensors = {}
        for module in modules:
            for layer in range(CONFIG.num_layers):
                name = f"model.layers.{layer}.{module}"
                found = pool.layout.modules[name]
                outputs = found.layer.sizes[found.part]
                down = torch.randn(rank, found.layer.inputs, generator=numbers)
                up = torch.randn(outputs, rank, generator=numbers)
                tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = down, up
        with open_adapter(tensors, {"lora_alpha": 1}) as files:
            pool.load(check_adapter(files, pool.layout, 8))
    return pool


def test_adapters_of_a_recorded_step(plain_hand: Any, graph_hand: Any, device: FakeDevice) -> None:
    """Who has which adapter changes with the batch; steps without any are graphs of their own."""
    answers, without = [], []
    for make in (plain_hand, graph_hand):
        hand = make(adapters=two_adapters())
        tokens = []
        lengths: dict[int, int] = {}
        for slot, adapter in ((1, 0), (2, 1), (3, -1)):
            tokens += begin(hand, slot, adapter=adapter)
            lengths[slot] = len(PROMPTS[slot])
            for _ in range(3):
                tokens += decode(hand, lengths).tokens
        for slot in (1, 2):
            hand.leave(slot)
            del lengths[slot]
        for _ in range(3):
            tokens += decode(hand, lengths).tokens
        # A slot has another adapter than before.
        for slot, adapter in ((2, 0), (1, 1)):
            tokens += begin(hand, slot, adapter=adapter)
            lengths[slot] = len(PROMPTS[slot])
        for _ in range(4):
            tokens += decode(hand, lengths).tokens
        answers.append(tokens)
        plain = make()
        begin(plain, 1)
        without.append(plain.decode(1, len(PROMPTS[1]), 8))
    assert answers[0] == answers[1]
    assert device.calls["Graph.replay"] > 5
    hand = graph_hand(adapters=two_adapters())
    begin(hand, 1, adapter=0)
    assert hand.decode(1, len(PROMPTS[1]), 8) != without[0]


def test_adapters_cost_the_host_no_call(graph_hand: Any, device: FakeDevice) -> None:
    """They are part of what is recorded, in decode steps and in chunks of prompts."""
    calls: list[list[int]] = []
    for adapter in (-1, 0):
        hand = graph_hand(adapters=two_adapters())
        begin(hand, 1, adapter=adapter)
        counts = list[int]()
        for turn in range(6):
            hand.row(1, len(PROMPTS[1]) + turn, 1)
            if turn > 2:
                hand.join(turn - 1, [7] * 14, adapter=adapter)
                hand.row(turn - 1, 0, 14, samples=0)
            device.calls.clear()
            hand.step()
            counts.append(device.calls.total())
            # What is not recorded yet is, in place of a replay.
            assert turn in (0, 3) or device.calls["Graph.replay"] == 1
        calls.append(counts)
    without, beside = calls
    for turn in (2, 5):
        assert without[turn] == beside[turn]


def test_most_steps_are_replays(graph_hand: Any, device: FakeDevice) -> None:
    hand = graph_hand()
    lengths = {}
    for slot in (0, 1, 2):
        begin(hand, slot)
        lengths[slot] = len(PROMPTS[slot])
    for _ in range(20):
        decode(hand, lengths)
    # The prompts are one size of a pass.
    assert executor(hand).graphs.recorded == 2
    assert device.calls["Graph.replay"] == 2 + 19


@pytest.mark.parametrize(
    ("in_flight", "options"),
    [(1, GREEDY), (2, SCORED), (3, PENALISED), (4, DRAWN), (4, SCORED)],
    ids=str,
)
def test_steps_in_flight(
    plain_hand: Any, graph_hand: Any, in_flight: int, options: dict[str, Any]
) -> None:
    collected: list[Any] = []
    for hand, most in ((plain_hand(), 1), (graph_hand(), in_flight)):
        results = []
        begin(hand, 0, **options)
        begin(hand, 3)
        flights: list[Any] = []
        for i in range(14):
            if len(flights) == most:
                results.append(hand.runner.collect(flights.pop(0)))
            if i == 6:
                # A newcomer, with a step of another kind in between.
                hand.join(1, PROMPTS[1], seed=2, **options)
                hand.row(1, 0, 3)
            elif i > 6:
                hand.row(1, i - 4, 1)
            hand.row(0, len(PROMPTS[0]) + i, 1)
            hand.row(3, len(PROMPTS[3]) + i, 1)
            flights.append(hand.launch())
        results += [hand.runner.collect(flight) for flight in flights]
        collected.append(results)
    plain, recorded = collected
    assert [result.tokens for result in plain] == [result.tokens for result in recorded]
    for a, b in zip(plain, recorded, strict=True):
        assert a.logprobs.keys() == b.logprobs.keys()
        for row, scores in a.logprobs.items():
            ours, others = columns(scores), columns(b.logprobs[row])
            assert ours.token_ids == others.token_ids
            assert ours.logprobs == pytest.approx(others.logprobs, abs=1e-4)


def test_more_steps_in_flight_than_there_is_room_for(graph_hand: Any) -> None:
    hand = graph_hand(overlap=2)
    begin(hand, 0)
    flights = []
    for i in range(2):
        hand.row(0, 11 + i, 1)
        flights.append(hand.launch())
    hand.row(0, 13, 1)
    with pytest.raises(RuntimeError, match="more than 2 steps in flight"):
        hand.launch()


def test_a_step_that_broke_off_for_lack_of_memory_is_done_again(
    plain_hand: Any, graph_hand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once before anything was computed, once when all but the draw's last lines were."""
    answers = []
    for hand in (plain_hand(), graph_hand()):
        tokens = begin(hand, 0, **DRAWN) + begin(hand, 1)
        lengths = {0: len(PROMPTS[0]), 1: len(PROMPTS[1])}
        tokens += decode(hand, lengths).tokens
        if isinstance(hand.runner.executor, GraphExecutor):
            step = executor(hand).graphs
            for whole in (False, True):
                with monkeypatch.context() as patch:
                    patch.setattr(step, "run", out_of_memory(step.run, whole))
                    for slot, position in lengths.items():
                        hand.row(slot, position, 1)
                    with pytest.raises(MemoryError, match="enough"):
                        hand.launch()
        for _ in range(6):
            tokens += decode(hand, lengths).tokens
        answers.append(tokens)
    assert answers[0] == answers[1]


def out_of_memory(run: Callable[..., None], whole: bool) -> Callable[..., None]:
    def failing(*arguments: Any) -> None:
        if whole:
            run(*arguments)
        raise torch.OutOfMemoryError("not enough")

    return failing


def test_changes_do_not_pile_up_while_no_step_is_recorded(graph_hand: Any) -> None:
    hand = graph_hand()
    begin(hand, 0)
    for i in range(5):
        hand.row(0, 11 + 2 * i, 2, samples=1)
        hand.step()
        assert not executor(hand).state.changed


@pytest.mark.parametrize("seed", [4, 5])
def test_slots_come_and_go_under_steps_in_flight(
    plain_hand: Any, graph_hand: Any, seed: int
) -> None:
    expected = churn(plain_hand(), 1, seed)
    assert churn(graph_hand(), 3, seed) == expected
    assert len(expected) > 100


def test_rows_of_a_recorded_step_fail_alone(graph_hand: Any, decoder: Any) -> None:
    hand = graph_hand()
    for slot in (0, 1):
        begin(hand, slot)
    lengths = {0: 11, 1: 3}
    decode(hand, lengths)
    decode(hand, lengths)
    hand.kv.storage[:, :, hand.tables[1][0]] = torch.nan
    result = decode(hand, lengths)
    assert list(result.failed) == [1]
    assert "not finite" in str(result.failed[1])


def test_calls_of_a_steady_step(graph_hand: Any, device: FakeDevice) -> None:
    """Steps without a change, and steps in which every row gets a block."""
    hand = graph_hand()
    lengths = {}
    for slot in (0, 1, 2, 3):
        hand.join(slot, [slot] * 4)
        hand.row(slot, 0, 4)
        lengths[slot] = 4
    hand.step()
    for _ in range(9):
        decode(hand, lengths)
    counts = []
    for _ in range(12):
        for slot, position in lengths.items():
            hand.row(slot, position, 1)
            lengths[slot] = position + 1
        grown = len(hand.plan.groups[0].grown)
        device.calls.clear()
        with device.without_syncs():
            hand.runner.collect(hand.launch())
        assert device.calls["Graph.replay"] == 1
        counts.append((grown, sum(device.calls.values())))
    # Of them, one asks whether the step before has ended, and one whether this one has.
    assert set(counts) == {(0, 7), (4, 9)}


def test_a_step_is_late_if_the_device_has_waited_for_it(
    graph_hand: Any, device: FakeDevice
) -> None:
    hand = graph_hand()
    begin(hand, 0)

    def late(*fast: bool) -> list[bool]:
        """Of steps launched one after the other before any is collected."""
        flights = []
        for device.fast in fast:
            hand.row(0, hand.position, 1)
            flights.append(hand.launch())
            hand.position += 1
        return [hand.runner.collect(each).late for each in flights]

    hand.position = len(PROMPTS[0])
    assert late(False, False, False) == [False, False, False]
    assert late(False, True, False) == [False, True, False]
    # Before the first of them nothing was left to collect.
    assert late(True, True) == [False, True]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (GREEDY, {}),
        (DRAWN, {}),
        (SCORED, {}),
        # Of the prompt; and a row whose draw another one guides.
        (GREEDY, {"prompt_logprobs": 1}),
        (DRAWN, {"guided": (1, 2.0)}),
    ],
    ids=str,
)
def test_calls_of_a_prompt_beside_rows_that_decode(
    make_hand: Any, device: FakeDevice, options: dict[str, Any], asked: dict[str, Any]
) -> None:
    """What the host has to do does not grow with the layers, and it waits for nothing."""
    calls: dict[tuple[str, int], int] = {}
    for graphs, layers in itertools.product(("off", "lazy"), (1, 3)):
        hand = make_hand(decoder=of_layers(layers), accelerator=device, graphs=graphs)
        begin(hand, 0, **options)
        for turn in range(3):
            hand.join(1 + turn, [7] * 14)
            # The row that decodes comes first.
            hand.row(0, len(PROMPTS[0]) + turn, 1)
            hand.row(1 + turn, 0, 14, samples=int("guided" in asked))
            if "prompt_logprobs" in asked:
                hand.plan.prompt_logprobs[1] = asked["prompt_logprobs"]
            if "guided" in asked:
                hand.plan.guided[0] = asked["guided"]
            device.calls.clear()
            handle = hand.launch()
            calls[graphs, layers] = device.calls.total()
            assert device.calls["Graph.replay"] == (graphs == "lazy")
            hand.runner.collect(handle)
    of_a_layer = (calls["off", 3] - calls["off", 1]) / 2
    assert of_a_layer > 20
    assert calls["lazy", 1] == calls["lazy", 3]
    # Sending the inputs takes some, and what is recorded none.
    assert calls["lazy", 3] < calls["off", 1] + of_a_layer


def of_layers(count: int) -> Decoder:
    config, numbers = dataclasses.replace(CONFIG, num_layers=count), torch.Generator()
    table = tensor_table(config)
    return Decoder(
        config, lambda name: torch.randn(table[name].shape, generator=numbers.manual_seed(5)) * 0.3
    )


@pytest.mark.parametrize("rows", [6, 70])
def test_rows_of_many_tokens_of_every_count(plain_hand: Any, graph_hand: Any, rows: int) -> None:
    """Both sizes of rows; a pass that is full, and one more token, which is another's."""
    answers = []
    for make in (plain_hand, graph_hand):
        hand = make(slots=rows)
        counts = [1 + slot % 3 for slot in range(rows)] if rows > 6 else [1, 2, 3, 4, 1, 5]
        for slot, count in enumerate(counts):
            hand.join(slot, [(slot * 7 + i) % 55 for i in range(count)])
        for first in range(0, rows, 30):
            for slot in range(first, min(first + 30, rows)):
                hand.row(slot, 0, counts[slot])
            answers.append((hand.spec.max_slots, hand.step().tokens))
        for more in (0, 1):
            hand.row(0, counts[0] + 16 * more, 16, samples=0)
            hand.step()
            for slot in range(1, min(rows, 40)):
                hand.row(slot, counts[slot] + more, 1)
            hand.row(0, counts[0] + 16 * (more + 1), 2, samples=0)
            answers.append((more, hand.step().tokens))
            counts[0] += 2
    assert answers[: len(answers) // 2] == answers[len(answers) // 2 :]


def test_a_step_that_samples_otherwise_replays_as_far_as_the_logits(
    graph_hand: Any, device: FakeDevice
) -> None:
    hand = graph_hand()
    lengths = {}
    for slot, options in ((0, SCORED), (1, GREEDY)):
        begin(hand, slot, **options)
        lengths[slot] = len(PROMPTS[slot])
    for _ in range(5):
        result = decode(hand, lengths)
        assert list(result.logprobs) == [0]
    # One more of the second prompt.
    assert device.calls["Graph.replay"] == 1 + 4


def test_a_failed_recording_changes_no_token(
    plain_hand: Any, graph_hand: Any, device: FakeDevice
) -> None:
    answers = []
    for hand in (plain_hand(), graph_hand()):
        device.failing = 100
        tokens = begin(hand, 0)
        lengths = {0: len(PROMPTS[0])}
        for _ in range(6):
            tokens += decode(hand, lengths).tokens
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert executor(hand).graphs.recorded == 0


def test_without_graphs_results_still_take_the_side_stream(
    plain_hand: Any, graph_hand: Any, device: FakeDevice
) -> None:
    answers = []
    for hand in (plain_hand(), graph_hand(graphs="off")):
        tokens = begin(hand, 0, **SCORED)
        lengths = {0: len(PROMPTS[0])}
        for _ in range(4):
            tokens += decode(hand, lengths).tokens
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert type(hand.runner.executor) is EagerExecutor
    assert device.calls["Event.synchronize"] == 5


def test_closing_gives_everything_back(graph_hand: Any, device: FakeDevice) -> None:
    hand = graph_hand()
    begin(hand, 0)
    hand.row(0, 11, 1)
    hand.launch()
    graphs = executor(hand).graphs
    hand.runner.close()
    assert device.closed
    assert graphs.recorded == 0
