"""Every family whose layers keep a state, differ in keys and values, or attend to a part of the
tokens, computes what transformers computes, in two shapes, and an engine's greedy answers are those
of transformers through prefix hits, forks, preemption and wrong drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models.families import GLOBAL, randomised
from models.gemmas import GEMMAS
from models.held import Held
from models.hybrids import HYBRIDS, LINEAR
from models.sparse import SPARSE
from safetensors.torch import load_file, save_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from asyncinfer import EngineConfig, ModelLoadError
from asyncinfer.models import load_model, read_config
from asyncinfer.models.family_calls import FamilyCalls
from asyncinfer.models.load import load_weights
from asyncinfer.protocols import DraftRequest
from asyncinfer.runner.device import use_cpu_threads
from asyncinfer.runner.memory import plan_memory
from asyncinfer.testing import check_family
from asyncinfer.testing.family_trial import FamilyTrial, runs
from asyncinfer.testing.inline import InlineEngine, InlineStream

CONFIGS = {**HYBRIDS, **GEMMAS, **SPARSE}
KINDS = sorted(CONFIGS)
#: Small steps cut prompts at odd places.
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_context": 96,
    "max_step_tokens": 23,
    "block_size": 8,
}
ANSWER = 12
#: Blocks of KV: fewer than six answers take that run side by side.
BLOCKS = 26
#: Two logits as near as this are a tie.
TIE = 3e-4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads."""
    before = torch.get_num_threads()
    use_cpu_threads(1)
    yield
    use_cpu_threads(before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_family_computes_what_transformers_computes(kind: str) -> None:
    family, configs = CONFIGS[kind]
    check_family(family, configs[0])


@pytest.mark.parametrize("kind", KINDS)
def test_another_shape(kind: str, tmp_path: Path) -> None:
    family, configs = CONFIGS[kind]
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(configs[1])]
    trial = FamilyTrial(model_class, configs[1], tmp_path, seed=1)
    calls = FamilyCalls(model_class.__name__, family(), kind)
    decoder = trial.load(trial.read(calls))
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, 190, (count,), generator=generator).tolist() for count in (70, 37, 45)]
    ids[2][:32] = ids[1][:32]
    right = [trial.right(each) for each in ids]
    for how, run in runs(decoder, ids).items():
        for row, got in enumerate(run.logits):
            # What a prefix hit left out was not computed, nor what was not fed.
            done = slice(32 if "prefix" in how and row == 2 else 0, run.done[row])
            torch.testing.assert_close(got[done], right[row][done], rtol=0.0, atol=1e-4)


def test_other_names_and_cuts_of_an_olmo_hybrid(tmp_path: Path) -> None:
    """As its makers publish it, and with the norms' names of transformers' modules."""
    _, configs = HYBRIDS["olmo-hybrid"]
    config: Any = configs[1]
    randomised(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    saved, right = load_file(file), load_weights(tmp_path, "cpu", torch.float32)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    published, named = {}, {}
    for name, tensor in saved.items():
        kind = config.layer_types[int(name.split(".")[2])] if ".layers." in name else None
        after = name.replace("feedforward_layer_norm", "post_attention_layernorm")
        published[after if kind == GLOBAL else name] = tensor
        named[after.replace("attention_layer_norm", "input_layernorm")] = tensor
    for layer in (at for at, kind in enumerate(config.layer_types) if kind == LINEAR):
        names = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
        cut = torch.cat([saved[name] for name in names]).split([keys, keys, values])
        # transformers cuts them elsewhere.
        assert any(part.shape != saved[name].shape for name, part in zip(names, cut, strict=True))
        published |= {name: part.clone() for name, part in zip(names, cut, strict=True)}
    for tensors in (published, named):
        assert tensors.keys() != saved.keys()
        save_file(tensors, file)
        found = load_weights(tmp_path, "cpu", torch.float32)
        assert found.keys() == right.keys()
        assert all(torch.equal(found[name], right[name]) for name in right)


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


def bytes_of(folder: Path, blocks: int) -> int:
    """The least `kv_bytes` of so many blocks."""
    config, cpu = read_config(folder), torch.device("cpu")
    low, high = 1, 1 << 26
    while low < high:
        middle = (low + high) // 2
        options = EngineConfig(**OPTIONS, kv_bytes=middle)
        try:
            spec = plan_memory(options, config, torch.float32, cpu, config.vocab_size)
            enough = spec.groups[0].num_pages >= blocks
        except ModelLoadError:
            enough = False
        low, high = (low, middle) if enough else (middle + 1, high)
    return low


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_through_hits_forks_preemption_and_wrong_drafts(
    kind: str, tmp_path: Path
) -> None:
    config = CONFIGS[kind][1][0]
    assert type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    model = randomised(config)
    model.save_pretrained(tmp_path)
    guesses = Guesses()
    engine = InlineEngine(
        Held(load_model(tmp_path, "cpu", torch.float32, max_context=96)),
        **OPTIONS,
        kv_bytes=bytes_of(tmp_path, BLOCKS),
        proposers=[guesses],
    )
    assert engine.stats().blocks_total == BLOCKS
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 190, (count,), generator=generator).tolist()

    def ask(prompt: list[int], count: int = ANSWER, **options: Any) -> InlineStream:
        return engine.submit(prompt, max_tokens=count, temperature=0.0, ignore_eos=True, **options)

    def check(prompt: list[int], stream: InlineStream, answers: int = 1) -> list[int]:
        stream.read()
        assert stream.error is None
        answer = stream.token_ids(0)
        with torch.inference_mode():
            right = model(torch.tensor([[*prompt, *answer]])).logits[0].float()
        for at, token in enumerate(answer, len(prompt) - 1):
            assert right[at].max() - right[at, token] < TIE, (kind, at)
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
    streams = [ask(each, 4 * ANSWER) for each in prompts]
    engine.run()
    for each, stream in zip(prompts, streams, strict=True):
        check(each, stream)
    assert engine.stats().preemptions > 0
