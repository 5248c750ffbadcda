"""Every family through an engine: its greedy answers are those of transformers in chunks, after a
prefix hit, forked, beside others, preempted, and with drafts that are wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import FAMILIES, causal_class, config_of, randomised
from models.gemmas import GEMMAS
from models.held import Held
from models.hybrids import HYBRIDS
from models.sparse import SPARSE
from models.test_qwen3_5_multimodal import CLASSES as TOWERS
from models.test_qwen3_5_multimodal import saved
from transformers import PreTrainedConfig

from asyncinfer import EngineConfig, ModelLoadError
from asyncinfer.cache import KVGroupSpec
from asyncinfer.models import load_model, read_config
from asyncinfer.plugins import models
from asyncinfer.protocols import DraftRequest
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.runner.memory import plan_memory
from asyncinfer.scheduler import RunnerSpec
from asyncinfer.testing.inline import InlineEngine, InlineStream

#: Small steps cut prompts at odd places.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 96,
    "max_step_tokens": 23,
    "block_size": 8,
}
ANSWER = 12
#: Tokens of answers that have to be preempted.
LONG = 30
#: Family -> more of them, where states or windows have so much of the memory that few run side by
#: side.
LONGER = {"granite_swa": 48, "nemotron-h": 48}
#: Blocks of KV: fewer than six answers take that run side by side.
BLOCKS = 26
#: The pages of a model all of whose layers have a window, which frees those that it has passed.
WINDOW_PAGES = 10
#: Two logits as near as this are a tie.
TIE = 3e-4
#: Family -> the shape that is taken where its first will not do: with a tied head so small a model
#: repeats itself.
SHAPES = {
    "gemma2": "no caps, untied",
    "gemma3_text": "scaled",
    "gpt_neox": "one after the other",
    "granite_swa": "listed, bases of their own, untied",
}
#: Family -> a shape all of whose layers have a window, beside one without any.
WINDOWED = {
    "ministral3": "window, tied",
    "mixtral": "window, one of three",
    "phi3": "window",
    "qwen3_moe": "windows",
    "starcoder2": "window",
}


def configs() -> dict[str, PreTrainedConfig]:
    """One shape of each family."""
    found = {
        family: config_of(family, SHAPES.get(family, next(iter(kinds))))
        for family, kinds in FAMILIES.items()
    }
    found["starcoder2"] = config_of("starcoder2", "no bias")
    found |= {
        f"{family}-windows": config_of(family, kind, tie_word_embeddings=False, sliding_window=22)
        for family, kind in WINDOWED.items()
    }
    return found | {
        kind: shapes[0] for kind, (_, shapes) in {**HYBRIDS, **GEMMAS, **SPARSE}.items()
    }


CONFIGS = configs()
#: The one whose text is published within a model of more than text alone.
WITH_A_TOWER = "qwen3-vl"
KINDS = [*sorted(CONFIGS), WITH_A_TOWER]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    use_cpu_threads(1)
    yield
    use_cpu_threads(before)


class Guesses:
    """Drafts of a known answer, in which every second has a wrong token."""

    def __init__(self) -> None:
        self.known: list[int] = []
        self._calls = 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: DraftRequest) -> list[int]:
        tokens = list(request.tokens())
        if self.known[: len(tokens)] != tokens:
            return []
        draft = self.known[len(tokens) : len(tokens) + 4]
        self._calls += 1
        if self._calls % 2 and len(draft) > 1:
            draft[1] = 3 + (draft[1] + 1) % 100
        return draft[: request.most]

    def end(self, request: DraftRequest) -> None:
        return None


def scarce(spec: RunnerSpec) -> KVGroupSpec:
    """The group that a test has few pages of: blocks, or those of a window that all layers have."""
    first, *others = spec.groups
    return first if first.layers else others[0]


def bytes_of(folder: Path) -> int:
    """The least `kv_bytes` of so few pages."""
    config, cpu = read_config(folder), torch.device("cpu")
    low, high = 1, 1 << 26
    while low < high:
        middle = (low + high) // 2
        options = EngineConfig(**OPTIONS, kv_bytes=middle)
        try:
            spec = plan_memory(options, config, torch.float32, cpu, config.vocab_size)
            group = scarce(spec)
            enough = group.num_pages >= (BLOCKS if group.window is None else WINDOW_PAGES)
        except ModelLoadError:
            enough = False
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


def test_no_family_is_left_out() -> None:
    """Neither here nor in the tests of logits, which take two shapes of each. Models of more than
    text are their text models."""
    shipped = {
        name
        for name in filter(models.is_built_in, models.names())
        if not name.endswith("ForConditionalGeneration")
    }
    # Other spellings of names that transformers has.
    shipped -= {"ExaoneMoEForCausalLM", "PhiMoEForCausalLM"}
    assert {causal_class(config).__name__ for config in CONFIGS.values()} == shipped
    shapes = [
        *FAMILIES.values(),
        *(shapes for _, shapes in {**HYBRIDS, **GEMMAS, **SPARSE}.values()),
    ]
    assert min(map(len, shapes)) >= 2
    assert sum(kind.startswith("vl") for kind in TOWERS) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_through_hits_forks_preemption_and_wrong_drafts(
    kind: str, tmp_path: Path
) -> None:
    if kind == WITH_A_TOWER:
        model = saved("vl", tmp_path)
    else:
        model = randomised(CONFIGS[kind])
        model.save_pretrained(tmp_path)
    guesses = Guesses()
    engine = InlineEngine(
        Held(load_model(tmp_path, "cpu", torch.float32, max_context=96)),
        **OPTIONS,
        kv_bytes=bytes_of(tmp_path),
        proposers=[guesses],
    )
    assert scarce(engine.core.runner.spec).num_pages in (BLOCKS, WINDOW_PAGES)
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 190, (count,), generator=generator).tolist()

    def ask(prompt: list[int], count: int = ANSWER, **options: Any) -> InlineStream:
        # Scored, since a state that is wrong by a token need not change which token is likeliest.
        options |= {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        return engine.submit(prompt, **options)

    def check(prompt: list[int], stream: InlineStream, answers: int = 1) -> list[int]:
        stream.read()
        assert stream.error is None
        answer = stream.token_ids(0)
        with torch.inference_mode():
            right = model(torch.tensor([[*prompt, *answer]])).logits[0].float()
        for at, token in enumerate(answer, len(prompt) - 1):
            assert right[at].max() - right[at, token] < TIE, (kind, at)
        scored = [each for chunk in stream.chunks if not chunk.index for each in chunk.logprobs]
        assert len(scored) == len(answer)
        for at, each in enumerate(scored, len(prompt) - 1):
            chance = right[at].log_softmax(-1)[each.token_id].item()
            assert each.logprob == pytest.approx(chance, abs=1e-4)
        for other in range(1, answers):
            assert stream.token_ids(other) == answer
        return answer

    # Alone, computed in chunks.
    prompt = tokens(45)
    first = ask(prompt)
    engine.run()
    answer = check(prompt, first)
    assert len(set(answer)) > 3
    before = engine.stats()
    assert before.cached_tokens == 0
    # After a prefix hit that a state is restored for, with drafts that are wrong at times.
    guesses.known = [*prompt, *answer]
    again = ask(prompt)
    engine.run()
    assert check(prompt, again) == answer
    stats = engine.stats()
    assert stats.cached_tokens == 40
    (drafted,) = stats.drafts
    assert sum(drafted.rejected) > 0
    assert sum(drafted.accepted) > 0
    # A fork of a prompt that begins as another and ends in its own way.
    forked = [*prompt[:27], *tokens(10)]
    stream = ask(forked, n=3)
    engine.run()
    check(forked, stream, answers=3)
    assert engine.stats().cached_tokens >= 40 + 24
    assert len(stream.token_ids(2)) == ANSWER
    # Six side by side, which do not fit.
    prompts = [tokens(9 + 3 * number) for number in range(6)]
    streams = [ask(each, LONGER.get(kind, LONG)) for each in prompts]
    engine.run()
    for each, stream in zip(prompts, streams, strict=True):
        check(each, stream)
    assert engine.stats().preemptions > 0
