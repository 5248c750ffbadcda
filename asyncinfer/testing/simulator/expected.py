"""`Expected`: the right answer of one request, from the oracle alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

from asyncinfer.params import SamplingParams
from asyncinfer.testing.invariants import hold
from asyncinfer.testing.oracle import EOS_ID, MASK, A, answer_digests, guided_oracle, mix, oracle
from asyncinfer.testing.simulator.adapters import AdapterHistory
from asyncinfer.testing.simulator.formats import allowed, fits, must_follow
from asyncinfer.testing.simulator.samplers import sampled
from asyncinfer.testing.simulator.scenario import Ask, Scenario
from asyncinfer.testing.simulator.vocabulary import VOCAB, bytes_of, text_of

__all__ = ["Expected", "Received"]

_GOLDEN = 0x9E3779B97F4A7C15


class Received(Protocol):
    """What a consumer received, by answer."""

    tokens: list[list[int]]
    texts: list[str]
    reasons: list[str | None]
    stop_reasons: list[str | int | None]
    #: Whether its stream was stopped, and whether another task closed it.
    stopped: bool
    closed: bool


@dataclass(frozen=True, slots=True)
class _ExpectedAnswer:
    tokens: list[int]
    text: str
    reason: str
    #: The stop string that ended it.
    stop: str | None = None


class Expected:
    """What the `n` answers to `prompt` must be. Computed when the first chunk is looked at."""

    def __init__(
        self,
        scenario: Scenario,
        ask: Ask,
        prompt: Sequence[int],
        max_total: int,
        adapters: AdapterHistory,
    ) -> None:
        self._scenario = scenario
        self._ask = ask
        self._prompt = prompt
        self._max_total = max_total
        self._history = adapters
        self._begun = 0
        #: The adapters that it may have; which one it is only its answers tell.
        self._adapters: list[int] | None = None if ask.adapter is not None else [0]
        self._answers: dict[tuple[int, int], _ExpectedAnswer] = {}

    def begin(self) -> None:
        """The request is about to be submitted."""
        self._begun = self._history.now

    def answer(self, index: int, adapter: int) -> _ExpectedAnswer:
        found = self._answers.get((index, adapter))
        if found is None:
            found = self._answers[index, adapter] = self._compute(index, adapter)
        return found

    def check_chunk(self, consumer: Received, index: int, *, ended: bool) -> None:
        """I7: what came so far is where the answer begins."""
        self._check(lambda adapter: self._chunk_problem(adapter, consumer, index, ended))

    def check_whole(self, consumer: Received) -> None:
        """I7: the answers are whole, or were stopped."""
        for index in range(self._ask.n):
            if not consumer.closed or consumer.reasons[index] not in (None, "aborted"):
                # One closed under its reader has been compared as far as it goes.
                self._check(partial(self._whole_problem, consumer=consumer, index=index))

    def _check(self, problem: Callable[[int], str]) -> None:
        if self._adapters is None:
            name = self._ask.adapter
            assert name is not None
            self._adapters = self._history.since(name, self._begun)
            hold("I7", bool(self._adapters), "{}: an answer of an adapter that is gone", name)
        problems = {adapter: problem(adapter) for adapter in self._adapters}
        right = [adapter for adapter, problem in problems.items() if not problem]
        hold("I7", bool(right), "{}", "; ".join(problems.values()))
        self._adapters = right

    def _chunk_problem(self, adapter: int, consumer: Received, index: int, ended: bool) -> str:
        """Where an error has ended the stream, the text also has what was held back, since a stop
        string could have begun with it."""
        tokens, text = consumer.tokens[index], consumer.texts[index]
        if self._ask.format is not None:
            return self._format_problem(adapter, consumer, index)
        answer = self.answer(index, adapter)
        so_far = answer.tokens[: len(tokens)]
        if tokens != so_far:
            return f"{consumer}: tokens {tokens}, not {so_far}"
        right = answer.text.startswith(text) or consumer.stopped
        if right or (ended and text_of(tokens)[0].startswith(text)):
            return ""
        return f"{consumer}: text {text!r}, not {answer.text!r}"

    def _whole_problem(self, adapter: int, consumer: Received, index: int) -> str:
        if self._ask.format is not None:
            return self._format_problem(adapter, consumer, index)
        answer = self.answer(index, adapter)
        reason, stop = consumer.reasons[index], consumer.stop_reasons[index]
        got = consumer.tokens[index], consumer.texts[index], reason, stop
        right = answer.tokens, answer.text, answer.reason, answer.stop
        if consumer.stopped and reason == "stopped":
            tokens = answer.tokens[: len(got[0])]
            right = tokens, text_of(tokens)[0], "stopped", None
        return "" if got == right else f"{consumer}: answer {index} is {got}, not {right}"

    def _format_problem(self, adapter: int, consumer: Received, index: int) -> str:
        """Each token is the one that is drawn of those that may follow, or has to follow. Which of
        those are drawn all the same is the engine's affair, and so only what came can be
        checked."""
        name = self._ask.format
        assert name is not None
        tokens, reason = consumer.tokens[index], consumer.reasons[index]
        params = _params(self._ask)
        seed = self._seed(index)
        digests = answer_digests(self._prompt, tokens, self._scenario.windows, adapter)
        text = b""
        for count, token in enumerate(tokens):
            position = len(self._prompt) + count - 1
            key = 0 if params.greedy else mix((seed + position * A) & MASK)
            ids = allowed(name, text)
            drawn = ids[mix(digests[count] ^ key) % len(ids)]
            if token != drawn and not must_follow(name, text, token):
                return f"{consumer}: token {token} after {text!r}, not {drawn}"
            text += bytes_of(token)
        shown, whole = consumer.texts[index].encode(), reason in ("stop", "complete")
        if whole and (not fits(name, text) or shown != text):
            return f"{consumer}: {text!r} is whole"
        if reason == "length" and len(self._prompt) + len(tokens) != self._max_total:
            return f"{consumer}: too short for its end"
        right = shown == text if whole else text_of(tokens)[0].startswith(consumer.texts[index])
        return "" if right else f"{consumer}: {shown!r} of {text!r}"

    def _seed(self, index: int) -> int:
        return ((self._ask.seed & MASK) + index * _GOLDEN) & MASK

    def _compute(self, index: int, adapter: int) -> _ExpectedAnswer:
        ask = self._ask
        params = _params(ask)
        count = self._max_total - len(self._prompt)
        draws = partial(
            oracle, self._prompt, sampler=None if ask.sampler is None else sampled(ask.sampler)
        )
        if ask.guide:
            draws = partial(guided_oracle, self._prompt, ask.guide)
        tokens = draws(
            params,
            self._seed(index),
            count,
            vocab_size=VOCAB,
            eos_every=self._scenario.eos_every,
            stop_ids=frozenset((EOS_ID,)),
            windows=self._scenario.windows,
            adapter=adapter,
        )
        reason = "length"
        for i, token in enumerate(tokens):
            if token == EOS_ID and i + 1 >= ask.min_tokens:
                tokens, reason = tokens[: i + 1], "stop"
                break
        text, known = text_of(tokens, ask.stop)
        if known is not None:
            whole = text_of(tokens)[0]
            found = next(stop for stop in ask.stop if whole.startswith(stop, len(text)))
            return _ExpectedAnswer(tokens[:known], text, "stop", found)
        return _ExpectedAnswer(tokens, text, reason)


def _params(ask: Ask) -> SamplingParams:
    """The options that change an answer's tokens, shared by requests with the same ones."""
    return _made(ask.temperature, ask.min_tokens, 1.0 if ask.guidance is None else ask.guidance)


@cache
def _made(temperature: float, min_tokens: int, guidance: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, min_tokens=min_tokens, guidance_scale=guidance)
