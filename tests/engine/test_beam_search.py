"""Beam search against transformers, and in an engine full of other requests."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models.families import FAMILIES, random_model
from support import OpenEngine, Until, core_of

from asyncinfer import Completion, Engine, InvalidRequest, SyncEngine
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.testing import FakeModel

pytestmark = pytest.mark.asyncio

PROMPT = [5, 900, 17, 33, 2100, 8, 64]
NEW = 9


@dataclass(frozen=True)
class Checkpoint:
    folder: str
    model: Any
    #: A token at which answers end, though not all of them and not at once.
    eos: int

    def open(self) -> Engine:
        return Engine(self.folder, device="cpu", dtype="float32", kv_bytes=1 << 24)


@pytest.fixture(scope="module", params=["gpt2", "qwen3", "gemma2"])
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    """A random model whose distribution is neither flat nor certain."""
    folder = tmp_path_factory.mktemp(request.param)
    kind = next(iter(FAMILIES[request.param]))
    model = random_model(request.param, kind, vocab_size=4096).float().eval()
    with torch.inference_mode():
        spread = model(torch.tensor([PROMPT])).logits[0, -1].std()
    with torch.no_grad():
        model.get_output_embeddings().weight *= 2.5 / spread
    model.save_pretrained(folder)
    for file in MODEL_PATH.glob("tokenizer*.json"):
        shutil.copy(file, folder)
    found = Counter(t for tokens, _ in theirs(model, 4, 0) for t in tokens[2:])
    return Checkpoint(str(folder), model, found.most_common(3)[-1][0])


def theirs(model: Any, beams: int, eos: int, **options: Any) -> list[tuple[tuple[int, ...], float]]:
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            num_beams=beams,
            num_return_sequences=beams,
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=eos,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    scores = out.sequences_scores.tolist() if beams > 1 else [0.0]
    return [
        (cut(row, eos), score)
        for row, score in zip(out.sequences[:, len(PROMPT) :].tolist(), scores, strict=True)
    ]


def cut(tokens: list[int], eos: int) -> tuple[int, ...]:
    return tuple(tokens[: tokens.index(eos) + 1] if eos in tokens else tokens)


def ours(done: Completion) -> list[tuple[tuple[int, ...], float]]:
    return [(choice.token_ids, choice.score or 0.0) for choice in done.choices]


def check(found: Any, expected: Any) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [s for _, s in found] == pytest.approx([s for _, s in expected], rel=1e-4, abs=1e-4)


CASES: list[dict[str, Any]] = [
    {},
    {"length_penalty": 0.0},
    {"length_penalty": 2.0, "early_stopping": "never"},
    {"length_penalty": -1.0, "early_stopping": True},
]


async def test_sequences_and_scores_are_those_of_transformers(checkpoint: Checkpoint) -> None:
    model, eos = checkpoint.model, checkpoint.eos
    options: dict[str, Any] = {"max_tokens": NEW, "stop_token_ids": [eos], "ignore_eos": True}
    async with checkpoint.open() as engine:
        ended = set()
        others = [
            asyncio.ensure_future(engine.generate([9, i], max_tokens=40, seed=i)) for i in range(3)
        ]
        for beams in range(1, 9):
            for case in CASES if beams == 3 else CASES[:1]:
                done = await engine.beam_search(PROMPT, beams=beams, **options, **case)
                expected = theirs(model, beams, eos, **case)
                if beams == 1:
                    assert done.token_ids == expected[0][0]
                else:
                    check(ours(done), expected)
                ended |= {choice.finish_reason for choice in done.choices}
                lengths = [len(choice.token_ids) for choice in done.choices]
                assert done.usage.completion_tokens == sum(lengths)
        assert ended == {"stop", "length"}
        await asyncio.gather(*others)


def textbook(
    logits: Callable[[list[list[int]]], torch.Tensor],
    beams: int,
    groups: int,
    penalty: float,
    eos: int,
) -> list[tuple[tuple[int, ...], float]]:
    """Diverse beam search by its definition, without a cache, one group after the other."""
    size = beams // groups
    running: list[list[tuple[list[int], float]]] = [[([], 0.0)] for _ in range(groups)]
    ended: list[list[tuple[tuple[int, ...], float]]] = [[] for _ in range(groups)]
    over = [False] * groups
    for length in range(1, NEW + 1):
        taken: Counter[int] = Counter()
        for g in range(groups):
            if over[g]:
                continue
            scores = torch.log_softmax(logits([PROMPT + tokens for tokens, _ in running[g]]), -1)
            for token, count in taken.items():
                scores[:, token] -= penalty * count
            scores += torch.tensor([total for _, total in running[g]])[:, None]
            best = scores.flatten().topk(min(2 * size, scores.numel()))
            places = [divmod(i, scores.shape[1]) for i in best.indices.tolist()]
            ranked = [
                ([*running[g][beam][0], token], value)
                for (beam, token), value in zip(places, best.values.tolist(), strict=True)
            ]
            for tokens, value in ranked[:size]:
                if tokens[-1] == eos or length == NEW:
                    ended[g].append((tuple(tokens), value / length))
            ended[g] = sorted(ended[g], key=lambda each: -each[1])[:size]
            going = [each for each in ranked if each[0][-1] != eos and length < NEW][:size]
            full = len(ended[g]) == size
            over[g] = not going or (full and going[0][1] / length <= ended[g][-1][1])
            running[g] = going
            taken.update(tokens[-1] for tokens, _ in going if not over[g])
    return sorted((each for group in ended for each in group), key=lambda each: -each[1])


async def test_groups_are_those_of_the_definition(checkpoint: Checkpoint) -> None:
    model, eos = checkpoint.model, checkpoint.eos

    def logits(sequences: list[list[int]]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor(sequences)).logits[:, -1].float()

    options: dict[str, Any] = {"max_tokens": NEW, "stop_token_ids": [eos], "ignore_eos": True}
    async with checkpoint.open() as engine:
        check(
            ours(await engine.beam_search(PROMPT, beams=3, **options)),
            textbook(logits, 3, 1, 0, eos),
        )
        for beams, groups, penalty in ((4, 2, 0.7), (6, 3, 2.0), (4, 4, 1.0)):
            done = await engine.beam_search(
                PROMPT, beams=beams, groups=groups, diversity_penalty=penalty, **options
            )
            check(ours(done), textbook(logits, beams, groups, penalty, eos))


async def test_bars_and_formats_hold_in_every_answer() -> None:
    async with Engine(max_context=128) as engine:
        prompt = "def add(a, b):"
        numbers = await engine.beam_search(prompt, beams=4, regex="[0-9]{3}x?", max_tokens=9)
        assert len({choice.text for choice in numbers.choices}) == 4
        for choice in numbers.choices:
            assert choice.text.rstrip("x").isdigit()
            assert choice.finish_reason == "stop"
        some = await engine.beam_search(prompt, beams=3, allowed_token_ids=range(300), max_tokens=5)
        assert max(max(choice.token_ids) for choice in some.choices) < 300
        data = await engine.beam_search(
            prompt, beams=2, json_schema={"enum": ["a", "b", 3]}, max_tokens=20
        )
        assert {choice.parsed for choice in data.choices} <= {"a", "b", 3}
        # There are fewer answers than beams.
        few = await engine.beam_search(prompt, beams=8, choice=["yes", "no"], max_tokens=9)
        assert {choice.text for choice in few.choices} == {"yes", "no"}


async def test_the_same_answers_beside_others_and_without_room(open_engine: OpenEngine) -> None:
    async def search(engine: Engine, beams: int) -> Any:
        done = await engine.beam_search(
            "a prompt that takes two blocks", beams=beams, max_tokens=40
        )
        return ours(done)

    async with open_engine(FakeModel()) as engine:
        alone = [await search(engine, beams) for beams in (2, 5)]
    for model in (FakeModel(blocks=36, max_context=256), FakeModel(strict=True)):
        async with open_engine(model, max_running=7) as engine:
            others = [engine.generate(f"{i}", max_tokens=90, seed=i) for i in range(8)]
            searches = [search(engine, beams) for beams in (2, 5)]
            found = await asyncio.gather(*searches, *others)
            assert found[:2] == alone
            if model.blocks == 36:
                assert engine.stats().preemptions > 0


async def test_cancelled_at_any_step_it_leaves_nothing(open_engine: OpenEngine) -> None:
    for turns in range(0, 60, 3):
        async with open_engine(FakeModel()) as engine:
            task = asyncio.ensure_future(engine.beam_search("x" * 20, beams=4, max_tokens=400))
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns > 30:
                while engine.stats().steps < turns:
                    await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len((await engine.generate("y", max_tokens=3)).token_ids) == 3


async def test_a_deadline_and_a_failing_row_end_the_search(
    open_engine: OpenEngine, until: Until
) -> None:
    async with open_engine() as engine:
        with pytest.raises(TimeoutError):
            await engine.beam_search("x", beams=3, max_tokens=100_000 // 64, deadline=0.05)
        # The watchdog may have told of it while a step ran.
        await until(lambda: not core_of(engine).requests.live)


async def test_best_of_gives_the_likeliest_of_the_answers() -> None:
    async with Engine(max_context=128) as engine:
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
        every = await engine.generate("def add(a, b):", n=6, logprobs=0, **options)
        means = [
            sum(each.logprob for each in choice.logprobs) / len(choice.logprobs)
            for choice in every.choices
        ]
        best = await engine.best_of("def add(a, b):", candidates=6, n=2, **options)
        assert [choice.score for choice in best.choices] == pytest.approx(sorted(means)[:-3:-1])
        assert best.token_ids == every.choices[means.index(max(means))].token_ids
        assert best.logprobs == ()
        assert [choice.index for choice in best.choices] == [0, 1]


async def test_without_an_event_loop() -> None:
    await asyncio.to_thread(search_without_a_loop)


def search_without_a_loop() -> None:
    with SyncEngine(FakeModel()) as engine:
        done = engine.beam_search("x", beams=3, max_tokens=5)
        assert len(done.choices) == 3
        assert done.choices[0].score == max(choice.score or 0.0 for choice in done.choices)
        assert len(engine.best_of("x", candidates=3, max_tokens=5).choices) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"beams": 0}, "beams"),
        ({"beams": 65}, "beams"),
        ({"beams": 4, "groups": 3, "diversity_penalty": 1.0}, "groups"),
        ({"beams": 4, "groups": 2}, "diversity_penalty"),
        ({"beams": 4, "diversity_penalty": 1.0}, "diversity_penalty"),
        ({"beams": 4, "early_stopping": "soon"}, "early_stopping"),
        ({"beams": 4, "length_penalty": float("nan")}, "length_penalty"),
        ({"beams": 4, "temperature": 1.0}, "temperature"),
        ({"beams": 4, "seed": 1}, "seed"),
        ({"beams": 4, "stop": "a"}, "stop"),
        ({"beams": 4, "max_tokens": 0}, "max_tokens"),
    ],
)
async def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match=field):
            await engine.beam_search("x", **options)
        with pytest.raises(InvalidRequest, match="candidates"):
            await engine.best_of("x", candidates=0)
