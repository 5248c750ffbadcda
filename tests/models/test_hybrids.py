"""A hybrid of each kind of state computes what transformers computes, whatever an engine does with
its states: chunks, mixed batches, prefix hits, preemption, forks, drafts that are wrong, steps
without room."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from models.families import randomised
from models.hybrids import HYBRIDS

from asyncinfer import Engine, EngineConfig, ModelLoadError, RequestFailed
from asyncinfer.attention import KVCache
from asyncinfer.builtin import MODEL_PATH
from asyncinfer.models import Decoder, read_config
from asyncinfer.protocols import DraftRequest
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.memory import plan_memory, state_bytes

#: The tokenizer's.
VOCABULARY = 4096
#: Convolutions; gated delta nets in place of attention; Mamba-2 beside attention.
KINDS = ("lfm2", "qwen3-next", "falcon-h1")
#: What every engine here is opened with: small steps cut prompts at odd places.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "kv_bytes": 1 << 22,
    "max_context": 256,
    "max_step_tokens": 23,
    "block_size": 8,
}


@pytest.fixture
def anyio_backend() -> str:
    """One is enough: streams have their own tests."""
    return "asyncio"


class Hybrid:
    """A checkpoint, and transformers' greedy answers."""

    def __init__(self, kind: str, folder: Path) -> None:
        config = copy.deepcopy(HYBRIDS[kind][1][0])
        config.vocab_size = VOCABULARY
        self.model = randomised(config)
        self.model.save_pretrained(folder)
        for file in MODEL_PATH.glob("tokenizer*.json"):
            shutil.copy(file, folder)
        self.path = str(folder)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def bytes_of(self, pages: int) -> int:
        """Bytes for KV and states that are divided into so many pages of states."""
        config = read_config(Path(self.path))
        attending = len(config.kv_layers)
        block = KVCache.bytes_per_block(config, 8, torch.float32) // config.num_layers * attending
        page = state_bytes(config, torch.float32)
        return pages * (block + page if page <= block else 2 * page)

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy answer of so many tokens, past any end of text."""
        key = (*prompt, count)
        if key not in self._answers:
            with torch.inference_mode():
                out = self.model.generate(
                    torch.tensor([list(prompt)]),
                    max_new_tokens=count,
                    min_new_tokens=count,
                    do_sample=False,
                    eos_token_id=-1,
                )
            self._answers[key] = out[0, len(prompt) :].tolist()
        return self._answers[key]


@pytest.fixture(scope="module", params=KINDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(request.param, tmp_path_factory.mktemp(request.param))


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 4000, (count,), generator=generator).tolist()


async def greedy(engine: Engine, prompt: list[int], count: int, **options: Any) -> list[int]:
    done = await engine.generate(
        prompt, max_tokens=count, temperature=0.0, ignore_eos=True, **options
    )
    return list(done.token_ids)


@pytest.mark.anyio
async def test_prefix_hits_go_on_from_a_state(hybrid: Hybrid) -> None:
    prompt, other = tokens(61), tokens(50, seed=1)
    async with Engine(hybrid.path, **OPTIONS) as engine:
        assert await greedy(engine, prompt, 20) == hybrid.answer(prompt, 20)
        assert engine.stats().state_pages_cached > 0
        # The whole prompt, a part of it, one that ends within an answer, and another one.
        longer = [*prompt, *hybrid.answer(prompt, 20)[:13], 5]
        hits = {56: prompt, 40: [*prompt[:43], *other], 72: longer, 0: other}
        for hit, asked in hits.items():
            done = await engine.generate(asked, max_tokens=12, temperature=0.0, ignore_eos=True)
            assert list(done.token_ids) == hybrid.answer(asked, 12)
            assert done.usage.cached_tokens == hit
        stats = engine.stats()
        assert stats.state_pages_free + stats.state_pages_cached == stats.state_pages_total > 0
        assert stats.window_pages_total == 0


@pytest.mark.anyio
async def test_hits_go_back_to_a_state_that_was_kept(hybrid: Hybrid) -> None:
    prompt, answer = tokens(45), hybrid.answer(tokens(45), 12)
    async with Engine(hybrid.path, **OPTIONS, state_interval=3) as engine:
        # Of seven full blocks the third and the sixth are kept, and the last.
        assert await greedy(engine, prompt, 12) == answer
        assert engine.stats().state_pages_cached == 3
        hits = {24: prompt, 48: [*prompt, *answer[:4], 5, 6], 56: [*prompt, *answer, 5]}
        for hit, asked in hits.items():
            done = await engine.generate(asked, max_tokens=5, temperature=0.0, ignore_eos=True)
            assert list(done.token_ids) == hybrid.answer(asked, 5)
            assert done.usage.cached_tokens == hit


@pytest.mark.parametrize("interval", [2, 5])
def test_fewer_states_leave_room_for_blocks(hybrid: Hybrid, interval: int) -> None:
    config, cpu, free = read_config(Path(hybrid.path)), torch.device("cpu"), hybrid.bytes_of(100)
    options = EngineConfig(kv_bytes=free, max_running=8, block_size=8)
    groups = [
        plan_memory(each, config, torch.float32, cpu, VOCABULARY).groups
        for each in (options, options.replace(state_interval=interval))
    ]
    assert [made[1].interval for made in groups] == [1, interval]
    (blocks, pages), (more, fewer) = ([group.num_pages for group in made] for made in groups)
    assert more > blocks
    # What is kept of so many blocks, and what eight requests go on with.
    assert more // interval + 8 * 3 <= fewer < pages
    block = KVCache.bytes_per_block(config, 8, torch.float32) // config.num_layers
    used = fewer * state_bytes(config, torch.float32) + more * block * len(config.kv_layers)
    assert 0.95 * free < used <= free


@pytest.mark.anyio
async def test_a_mixed_batch_under_preemption(hybrid: Hybrid) -> None:
    # 26 pages of states for six requests of up to ten blocks.
    tight = {"kv_bytes": hybrid.bytes_of(26), "max_context": 96}
    async with Engine(hybrid.path, **OPTIONS | tight) as engine:
        assert engine.stats().state_pages_total == 26
        prompts = [tokens(9 + 7 * number, seed=number) for number in range(6)]
        answers: dict[int, list[int]] = {}

        async def ask(number: int) -> None:
            answers[number] = await greedy(engine, prompts[number], 36)

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(ask, number)
        assert engine.stats().preemptions > 0
        assert answers == {n: hybrid.answer(prompts[n], 36) for n in range(6)}


@pytest.mark.anyio
@pytest.mark.parametrize("cached", [True, False])
async def test_answers_of_one_prompt(hybrid: Hybrid, cached: bool) -> None:
    prompt = tokens(37)
    async with Engine(hybrid.path, **OPTIONS, prefix_cache=cached) as engine:
        done = await engine.generate(prompt, n=3, max_tokens=15, temperature=0.0, ignore_eos=True)
    assert [list(each.token_ids) for each in done.choices] == [hybrid.answer(prompt, 15)] * 3


@pytest.mark.anyio
async def test_beams_take_a_copy_of_the_state(hybrid: Hybrid) -> None:
    prompt = tokens(21)
    with torch.inference_mode():
        right = hybrid.model.generate(
            torch.tensor([prompt]),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=14,
            min_new_tokens=14,
            do_sample=False,
            eos_token_id=-1,
            length_penalty=1.0,
        )
    async with Engine(hybrid.path, **OPTIONS) as engine:
        done = await engine.beam_search(prompt, beams=3, max_tokens=14, ignore_eos=True)
        assert [list(each.token_ids) for each in done.choices] == right[:, len(prompt) :].tolist()


@pytest.mark.anyio
async def test_guidance_is_the_same_however_prompts_are_cut(hybrid: Hybrid) -> None:
    prompt, options = tokens(41), {"guidance_scale": 1.7, "negative_prompt": tokens(29, seed=5)}
    async with Engine(hybrid.path, **OPTIONS | {"max_step_tokens": 256}) as engine:
        right = await greedy(engine, prompt, 20, **options)
    async with Engine(hybrid.path, **OPTIONS) as engine:
        for _ in range(2):
            assert await greedy(engine, prompt, 20, **options) == right
    assert right != hybrid.answer(prompt, 20)


class Guesses:
    """Drafts that are right up to a token that moves."""

    def __init__(self, hybrid: Hybrid, prompt: list[int], count: int) -> None:
        self._right = [*prompt, *hybrid.answer(prompt, count)]
        self.calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        drafts = []
        for request in requests:
            self.calls += 1
            known = len(request.tokens())
            draft = self._right[known : known + 5]
            wrong = self.calls % 7
            if wrong < len(draft):
                draft[wrong] = 3 + draft[wrong] % 1000
            drafts.append(draft[: request.most])
        return drafts

    def end(self, request: DraftRequest) -> None:
        return None


@pytest.mark.anyio
async def test_wrong_drafts_are_rolled_back(hybrid: Hybrid) -> None:
    prompt, count = tokens(30), 48
    guesses = Guesses(hybrid, prompt, count)
    async with Engine(hybrid.path, **OPTIONS, proposers=[guesses]) as engine:
        for _ in range(2):
            # The second time after a prefix hit.
            assert await greedy(engine, prompt, count) == hybrid.answer(prompt, count)
        # What drafts left in the cache is right, too.
        longer = [*prompt, *hybrid.answer(prompt, count)[:41]]
        assert await greedy(engine, longer, 7) == hybrid.answer(longer, 7)
        (drafted,) = engine.stats().drafts
    assert sum(drafted.accepted) > 20
    assert sum(drafted.rejected) > 5


@pytest.mark.anyio
async def test_a_step_without_room_leaves_states_as_they_were(
    hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, lacks = tokens(30), 0
    draw = EagerExecutor.sample

    def lacking(self: EagerExecutor, logits: torch.Tensor, slots: Any, positions: Any) -> Any:
        nonlocal lacks
        # All three answers decode; prompts would fail for a second lack.
        if len(positions) == 3 and min(positions) > len(prompt) + 2:
            lacks += 1
            if lacks % 2:
                raise MemoryError("no room to draw")
        return draw(self, logits, slots, positions)

    monkeypatch.setattr(EagerExecutor, "sample", lacking)
    async with Engine(hybrid.path, **OPTIONS) as engine:
        done = await engine.generate(prompt, n=3, max_tokens=40, temperature=0.0, ignore_eos=True)
    assert lacks > 1
    assert [list(each.token_ids) for each in done.choices] == [hybrid.answer(prompt, 40)] * 3


@pytest.mark.anyio
async def test_a_state_that_is_not_finite_fails_before_it_is_kept(
    hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch
) -> None:  # fault 26
    """That of a token in the middle of a prompt's last chunk, whose own logits nobody draws from
    and which the last token need not show."""
    prompt, forward, broken = tokens(21), Decoder.forward, [True]

    def breaking(self: Decoder, *arguments: Any) -> torch.Tensor:
        hidden = forward(self, *arguments)
        if broken:
            broken.pop()
            hidden[3, 5] = torch.nan
        return hidden

    monkeypatch.setattr(Decoder, "forward", breaking)
    async with Engine(hybrid.path, **OPTIONS) as engine:
        with pytest.raises(RequestFailed, match="hidden states are not finite"):
            await greedy(engine, prompt, 4)
        done = await engine.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
    assert done.usage.cached_tokens == 0
    assert list(done.token_ids) == hybrid.answer(prompt, 8)


@pytest.mark.parametrize("context", [8, 16, 64])
def test_one_request_of_a_short_context_has_the_pages_that_it_goes_on_with(
    hybrid: Hybrid, context: int
) -> None:
    config, cpu = read_config(Path(hybrid.path)), torch.device("cpu")
    options = EngineConfig(max_running=1, max_context=context, block_size=8)
    spec = plan_memory(options, config, torch.float32, cpu, VOCABULARY)
    assert [group.num_pages for group in spec.groups] == [context // 8, max(3, context // 8)]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"deterministic": True}, "deterministic=True"),
        ({"kv_bytes": 3000}, "kv_bytes=3000"),
        ({"draft": "itself"}, "draft model"),
    ],
)
async def test_what_states_cannot_do_is_refused_at_open(
    hybrid: Hybrid, options: dict[str, Any], why: str
) -> None:
    if "draft" in options:
        options = {"draft": hybrid.path}
    with pytest.raises(ModelLoadError, match=why):
        await Engine.open(hybrid.path, **OPTIONS | options)
