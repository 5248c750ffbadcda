"""The built-in samplers in plain Python: those that draw as probabilities, the others as logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sampling import reference

from asyncinfer.kernels.noise import row_uniforms
from asyncinfer.params import SamplingParams
from asyncinfer.samplers import DRY, XTC, DynamicTemperature, Mirostat, TopNSigma

TEMPERATURE = 1.3

#: The logits that a sampler leaves: the sampler, the logits it gets, what is known.
Change = Callable[[Any, list[float], list[int]], list[float]]
#: The probabilities that a sampler draws from: the same, the seed, and the twin's own memory.
Draw = Callable[[Any, list[float], list[int], int, dict[str, float]], list[float]]


def softmax(logits: Sequence[float], temperature: float = 1.0) -> list[float]:
    return reference.probabilities(logits, SamplingParams(temperature=temperature))


def cut(probs: Sequence[float], keep: Callable[[float], bool]) -> list[float]:
    kept = [p if keep(p) else 0.0 for p in probs]
    return [p / math.fsum(kept) for p in kept]


def mirostat(
    params: Mirostat, logits: list[float], known: list[int], seed: int, memory: dict[str, float]
) -> list[float]:
    probs = softmax(logits, TEMPERATURE)
    if "before" in memory:
        surprise = -math.log2(memory["before"])
        memory["mu"] -= params.eta * (surprise - params.tau)
    mu = memory.setdefault("mu", 2 * params.tau)
    best = max(probs)
    kept = cut(probs, lambda p: p == best or (p > 0 and -math.log2(p) <= mu))
    memory["before"] = probs[reference.draw(kept, seed, len(known))]
    return kept


def xtc(
    params: XTC, logits: list[float], known: list[int], seed: int, memory: dict[str, float]
) -> list[float]:
    probs = softmax(logits, TEMPERATURE)
    chance = row_uniforms(np.array([seed], np.uint64), np.array([len(known)]), 0)[0]
    likely = sorted(p for p in probs if p >= params.threshold)
    if chance >= params.probability or len(likely) < 2:
        return probs
    return cut(probs, lambda p: p <= likely[0])


def top_n_sigma(params: TopNSigma, logits: list[float], known: list[int]) -> list[float]:
    there = [x for x in logits if x > -math.inf]
    mean = math.fsum(there) / len(there)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in there) / len(there))
    low = max(logits) - params.n * sigma
    return [x if x >= low else -math.inf for x in logits]


def dynamic_temperature(
    params: DynamicTemperature, logits: list[float], known: list[int]
) -> list[float]:
    probs = [p for p in softmax(logits) if p > 0]
    entropy = -math.fsum(p * math.log(p) for p in probs)
    share = (entropy / math.log(max(2, len(probs)))) ** params.exponent
    temperature = params.low + (params.high - params.low) * share
    return [x / temperature for x in logits]


def dry(params: DRY, logits: list[float], known: list[int]) -> list[float]:
    text = known[-params.window :]
    lengths: dict[int, int] = {}
    for end in range(1, len(text)):
        # The tokens before `end`, and the last ones.
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length]:
            if text[-1 - length] in params.breakers:
                break
            length += 1
        lengths[text[end]] = max(lengths.get(text[end], 0), min(length, 48))
    out = list(logits)
    for token, length in lengths.items():
        if length >= params.allowed_length and token not in params.breakers:
            out[token] -= params.multiplier * params.base ** (length - params.allowed_length)
    return out


CHANGES: dict[type, Change] = {
    DRY: dry,
    DynamicTemperature: dynamic_temperature,
    TopNSigma: top_n_sigma,
}
DRAWS: dict[type, Draw] = {Mirostat: mirostat, XTC: xtc}


def twin(
    samplers: Sequence[Any],
    logits: list[float],
    known: list[int],
    seed: int,
    memory: dict[str, float],
) -> list[float]:
    """What these samplers, in this order, draw the next token from."""
    for sampler in samplers:
        if type(sampler) in DRAWS:
            return DRAWS[type(sampler)](sampler, logits, known, seed, memory)
        logits = CHANGES[type(sampler)](sampler, logits, known)
    return softmax(logits, TEMPERATURE)
