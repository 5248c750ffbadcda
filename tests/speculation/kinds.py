"""Requests of every kind of option."""

from __future__ import annotations

from random import Random
from typing import Any

__all__ = ["PROMPTS", "SCHEMA", "options_of", "sampled_options_of"]

PROMPTS = ("a list: 1 2 3, 1 2 3, 1 2 ", "once", "once upon a time there was", "x" * 40)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["ab", "ac"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def options_of(seed: int) -> dict[str, Any]:
    """Of one of many kinds of requests."""
    rng = Random(seed)
    options: dict[str, Any] = {
        "temperature": rng.choice((0.0, 1.0)),
        "seed": seed,
        "max_tokens": rng.choice((1, 2, 12, 30)),
        "logprobs": rng.choice((None, None, 2)),
        "prompt_logprobs": rng.choice((None, None, None, 0)),
        "n": rng.choice((1, 1, 1, 2)),
    }
    match rng.randrange(6):
        case 0:
            options |= {"stop": ["a", "fg"], "min_tokens": min(3, options["max_tokens"])}
        case 1:
            options |= {"stop_token_ids": list(range(10, 40))}
        case 2:
            options |= {"json_schema": SCHEMA, "max_tokens": 60}
        case 3:
            options |= {"regex": "(abc|[0-9]){3,9}", "max_tokens": 40}
        case 4:
            options |= {"min_tokens": min(5, options["max_tokens"])}
    return options


def sampled_options_of(seed: int) -> dict[str, Any]:
    """`options_of`, with those that a real sampler knows."""
    rng, options = Random(seed), options_of(seed)
    if not options.keys() & {"json_schema", "regex"}:
        # A real model takes longer.
        options["max_tokens"] = min(options["max_tokens"], 16)
    match rng.randrange(9):
        case 0:
            options |= {"top_p": 0.9, "repetition_penalty": 1.2}
        case 1:
            options |= {"top_k": 20, "presence_penalty": 0.5, "frequency_penalty": 0.3}
        case 2:
            options |= {"typical_p": 0.8, "min_p": 0.02}
        case 3:
            options |= {"sampler": ["dry", "top-n-sigma"], "logit_bias": {30: 2.0}}
            options["temperature"] = 0.8
        case 4:
            options |= {"guidance_scale": 1.6, "negative_prompt": "no"}
        case 5:
            options |= {"bad_words": ["e", "ab"], "temperature": 0.7}
        case 6:
            options |= {"sampler": "mirostat", "temperature": 1.0}
    return options
