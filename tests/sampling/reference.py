"""The whole sampling chain for one row in plain Python and float64: slow and obvious.

Tests compare the fast chain and the kernels with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from asyncinfer.params import SamplingParams

__all__ = ["changed_logits", "draw", "exponential", "guided_logits", "probabilities"]

_M32 = 2**32 - 1
_M64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _M64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _M64
    return x ^ (x >> 31)


def _lowbias(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D & _M32
    x = (x ^ (x >> 15)) * 0x846CA68B & _M32
    return x ^ (x >> 16)


def hashed(seed: int, position: int, token: int) -> int:
    """31 random bits for a (seed, position, token id): the definition of `kernels/noise.py`."""
    state = _splitmix((seed & _M64) + _GOLDEN & _M64)
    key = _splitmix(state + (position + 1) * _GOLDEN & _M64)
    x = (_lowbias(token) ^ (key & _M32)) * ((key >> 32) | 1) & _M32
    x = (x ^ (x >> 16)) * 0x846CA68B & _M32
    return x & (2**31 - 1)


def exponential(seed: int, position: int, token: int) -> float:
    """An exponential variable of rate 1."""
    return -math.log1p(-(hashed(seed, position, token) + 0.5) / 2**31)


def guided_logits(given: Sequence[float], free: Sequence[float], scale: float) -> list[float]:
    """Classifier-free guidance, before all else: logprobs after the prompt, and beside it."""
    one, other = (_log_softmax(each) for each in (given, free))
    return [y + scale * (x - y) for x, y in zip(one, other, strict=True)]


def _log_softmax(logits: Sequence[float]) -> list[float]:
    peak = max(logits)
    mass = peak + math.log(math.fsum(math.exp(x - peak) for x in logits))
    return [x - mass for x in logits]


def changed_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    stop_ids: Iterable[int] = (),
    bad_ids: Iterable[Sequence[int]] = (),
) -> list[float]:
    """The logits that the temperature divides: biased, barred, penalised."""
    out = list(logits)
    for token, bias in params.logit_bias.items():
        out[token] += bias
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
        out = [x if token in allowed else -math.inf for token, x in enumerate(out)]
    for word in bad_ids:
        before = list(word[:-1])
        if before == list(answer[len(answer) - len(before) :]):
            out[word[-1]] = -math.inf
    if len(answer) < params.min_tokens:
        for token in stop_ids:
            out[token] = -math.inf
    for token in set(prompt) | set(answer):
        by = params.repetition_penalty
        out[token] = out[token] / by if out[token] > 0 else out[token] * by
    for token, count in Counter(answer).items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    return out


def probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The distribution that a token is drawn from, given the changed logits, of which one at least
    is finite."""
    if params.greedy:
        best = max(logits)
        first = list(logits).index(best)
        return [float(token == first) for token in range(len(logits))]
    peak = max(logits)
    weights = [math.exp((x - peak) / params.temperature) for x in logits]
    if 0 < params.top_k < len(weights):
        weights = _at_least(weights, weights, sorted(weights, reverse=True)[params.top_k - 1])
    if params.top_p < 1:
        weights = _at_least(weights, weights, _crossing(weights, weights, params.top_p))
    weights = _at_least(weights, weights, params.min_p * max(weights))
    if params.typical_p < 1:
        probs = _normalised(weights)
        entropy = -sum(p * math.log(p) for p in probs if p)
        nearness = [-abs(-math.log(p) - entropy) if p else -math.inf for p in probs]
        weights = _at_least(weights, nearness, _crossing(nearness, probs, params.typical_p))
    return _normalised(weights)


def draw(probs: Sequence[float], seed: int, position: int) -> int:
    """The token that wins the exponential race."""
    arrival = {
        token: exponential(seed, position, token) / p for token, p in enumerate(probs) if p > 0
    }
    return min(arrival, key=arrival.__getitem__)


def _at_least(weights: Sequence[float], order: Sequence[float], cut: float) -> list[float]:
    return [w if at >= cut else 0.0 for w, at in zip(weights, order, strict=True)]


def _crossing(order: Sequence[float], weights: Sequence[float], share: float) -> float:
    """Where in `order`, best first, the weights reach `share` of their sum."""
    goal, mass = share * math.fsum(weights), 0.0
    ranked = sorted(range(len(order)), key=order.__getitem__, reverse=True)
    for token in ranked:
        mass += weights[token]
        if mass >= goal:
            return order[token]
    return order[ranked[-1]]


def _normalised(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]
