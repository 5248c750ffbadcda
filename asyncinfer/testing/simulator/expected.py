"""`Expected`: the right answer of one request, from the oracle alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncinfer.params import SamplingParams
from asyncinfer.testing.invariants import hold
from asyncinfer.testing.oracle import EOS_ID, oracle
from asyncinfer.testing.simulator.scenario import Ask, Scenario
from asyncinfer.testing.simulator.vocabulary import VOCAB, text_of

if TYPE_CHECKING:
    from asyncinfer.testing.simulator.consumer import Consumer

__all__ = ["Expected"]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: list[int]
    text: str
    reason: str


class Expected:
    """What the `n` answers to `prompt` must be. Computed when the first chunk is looked at."""

    def __init__(self, scenario: Scenario, ask: Ask, prompt: Sequence[int], max_total: int) -> None:
        self._scenario = scenario
        self._ask = ask
        self._prompt = prompt
        self._max_total = max_total
        self._answers: list[_Answer | None] = [None] * ask.n

    def answer(self, index: int) -> _Answer:
        found = self._answers[index]
        if found is None:
            found = self._answers[index] = self._compute(index)
        return found

    def check_chunk(self, consumer: Consumer, index: int) -> None:
        """I7: what came so far is where the answer begins."""
        answer, tokens = self.answer(index), consumer.tokens[index]
        so_far = answer.tokens[: len(tokens)]
        hold("I7", tokens == so_far, "{}: tokens {}, not {}", consumer, tokens, so_far)
        text = consumer.texts[index]
        hold(
            "I7",
            answer.text.startswith(text) or consumer.stopped,
            "{}: text {!r}, not {!r}",
            consumer,
            text,
            answer.text,
        )

    def check_whole(self, consumer: Consumer) -> None:
        """I7: the answers are whole, or were stopped."""
        for index in range(self._ask.n):
            answer = self.answer(index)
            if consumer.closed and consumer.reasons[index] in (None, "aborted"):
                # Closed under its reader: what there is has been compared.
                continue
            got = consumer.tokens[index], consumer.texts[index], consumer.reasons[index]
            right = answer.tokens, answer.text, answer.reason
            if consumer.stopped and got[2] == "stopped":
                tokens = answer.tokens[: len(got[0])]
                right = tokens, text_of(tokens)[0], "stopped"
            hold("I7", got == right, "{}: answer {} is {}, not {}", consumer, index, got, right)

    def _compute(self, index: int) -> _Answer:
        ask = self._ask
        params = SamplingParams(temperature=ask.temperature, min_tokens=ask.min_tokens)
        count = self._max_total - len(self._prompt)
        seed = ((ask.seed & _MASK) + index * _GOLDEN) & _MASK
        stop_ids = frozenset((EOS_ID,))
        tokens = oracle(
            self._prompt,
            params,
            seed,
            count,
            vocab_size=VOCAB,
            eos_every=self._scenario.eos_every,
            stop_ids=stop_ids,
            windows=() if self._scenario.window is None else (self._scenario.window,),
        )
        reason = "length"
        for i, token in enumerate(tokens):
            if token == EOS_ID and i + 1 >= ask.min_tokens:
                tokens, reason = tokens[: i + 1], "stop"
                break
        text, known = text_of(tokens, ask.stop)
        if known is not None:
            return _Answer(tokens[:known], text, "stop")
        return _Answer(tokens, text, reason)
