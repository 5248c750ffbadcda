"""`deterministic=True` with window pages: to the last bit the same alone and in a batch, though
what windows no longer see is given back, and spoilt at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncinfer.layers import RopeConfig
from asyncinfer.models import ExpertsConfig, LayerConfig, ModelConfig
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.testing import InlineEngine, RandomModel

WINDOW = 24
ROPE = RopeConfig(original_context=256)
EXPERTS = ExpertsConfig(count=3, active=2, intermediate_size=16)


def model(kind: str) -> RandomModel:
    windows = (WINDOW, WINDOW) if kind == "all" else (None, WINDOW, WINDOW // 2)
    return RandomModel(
        ModelConfig(
            architecture="MixtralForCausalLM" if kind == "experts" else "MistralForCausalLM",
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_layers=len(windows),
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_context=256,
            layers=tuple(LayerConfig(rope=ROPE, window=window) for window in windows),
            experts=EXPERTS if kind == "experts" else None,
        )
    )


#: Prompts beside one another, alike and not, shorter and longer than the window.
PROMPTS = [list(range(3, 93)), [*range(3, 83), 5, 6], [7, 8, 9], list(range(50, 80))]
Answer = tuple[tuple[int, ...], tuple[Any, ...]]


def engine(kind: str, **options: Any) -> InlineEngine:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "kv_bytes": 1 << 20,
        "block_size": 8,
        "max_running": 4,
        "deterministic": True,
    }
    return InlineEngine(model(kind), **{**defaults, **options})


def answers(inline: InlineEngine, numbers: list[int], **options: Any) -> list[Answer]:
    """Of these prompts at once; what is free is NaN."""
    _, windows = inline.scheduler.states.slots.blocks.groups
    _, kv = inline.core.runner.kv  # type: ignore[attr-defined]
    streams = [
        inline.submit(
            PROMPTS[n],
            max_tokens=40,
            temperature=0.9,
            seed=n,
            logprobs=2,
            ignore_eos=True,
            **options,
        )
        for n in numbers
    ]
    least = windows.available
    while inline.core.busy or not inline.core.inbox.empty():
        inline.pump()
        kv.storage[:, :, windows.pool.free] = torch.nan
        least = min(least, windows.available)
    held = windows.pool.size - least
    assert 0 < held * 8 < sum(len(PROMPTS[n]) + 40 for n in numbers) / 1.2
    found = []
    for stream in streams:
        stream.read()
        assert stream.error is None
        scores = tuple(score for chunk in stream.chunks for score in chunk.logprobs)
        found.append((tuple(stream.token_ids()), scores))
    return found


@pytest.mark.parametrize("kind", ["some", "all", "experts"])
def test_alone_and_in_a_batch(kind: str) -> None:
    everyone = list(range(len(PROMPTS)))
    alone = [
        answers(engine(kind, prefix_cache=False, max_step_tokens=64), [number])[0]
        for number in (0, 1)
    ]
    assert all(len(tokens) == len(scores) == 40 for tokens, scores in alone)
    assert answers(engine(kind, prefix_cache=False, max_step_tokens=24), everyone)[:2] == alone
    inline = engine(kind, max_step_tokens=20, overlap=2)
    for _ in range(2):
        assert answers(inline, everyone[::-1])[::-1][:2] == alone
    assert inline.stats().cached_tokens > 150


def test_it_is_what_others_compute() -> None:
    """An engine with one pool, that is not deterministic, gets nearly the same."""
    for (tokens, scores), (right, expected) in zip(
        answers(engine("some"), [0, 3]),
        answers(engine("some", deterministic=False), [0, 3]),
        strict=True,
    ):
        assert tokens == right
        for score, other in zip(scores, expected, strict=True):
            assert score.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_token_that_no_window_shows_is_looked_at(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fault 26
    """What is wrong with a token in the middle of a prompt reaches its last token by layers that
    attend to everything, and by no others."""
    broken, run = [True], EagerExecutor.run

    def running(self: EagerExecutor, *arguments: Any) -> Any:
        forward = self.forward

        def breaking(arrays: Any) -> torch.Tensor:
            hidden = forward(arrays)
            if broken:
                broken.pop()
                hidden[3, 5] = torch.nan
            return hidden

        monkeypatch.setattr(self, "forward", breaking)
        return run(self, *arguments)

    monkeypatch.setattr(EagerExecutor, "run", running)
    inline = engine("some", deterministic=deterministic)
    streams = []
    for _ in range(2):
        streams.append(inline.submit(PROMPTS[0], max_tokens=2, temperature=0.0))
        inline.run()
        streams[-1].read()
    failed, whole = streams
    assert not failed.chunks
    assert "hidden states are not finite" in str(failed.error)
    outcome = whole.request.buffer.outcome
    assert outcome is not None
    assert (outcome.error, outcome.usage.cached_tokens) == (None, 0)
    assert len(whole.token_ids()) == 2
