"""The table of sampling options: one record per slot, on the host."""

from __future__ import annotations

from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Uses", "options_table"]


class Uses(IntFlag):
    """The options that a request uses beyond greedy decoding. A filter that the operator
    `ops.sample` lacks stays out of `FUSED`; rows that use it are then drawn by the unfused chain.
    """

    LOGPROBS = 1
    BIAS = 2
    ALLOWED = 4
    BAD_WORDS = 8
    MIN_TOKENS = 16
    REPETITION = 32
    OCCURRENCE = 64
    DRAW = 128
    TEMPERATURE = 256
    LIKELY = 512  # Top-k, top-p or min-p.
    TYPICAL = 1024
    PLUGIN = 2048
    GRAMMAR = 4096
    #: Options that change logits before the temperature.
    LOGITS = BIAS | ALLOWED | BAD_WORDS | GRAMMAR | MIN_TOKENS | REPETITION | OCCURRENCE
    #: Options that may bar tokens.
    BARS = BIAS | ALLOWED | BAD_WORDS | GRAMMAR | MIN_TOKENS
    #: Options that bar tokens by the weights after the temperature, in the order of the members.
    FILTERS = LIKELY | TYPICAL
    #: Options of a draw that `ops.sample` applies by itself.
    FUSED = DRAW | TEMPERATURE | LIKELY


_OPTIONS = np.dtype(
    [
        ("uses", np.int64),
        ("seed", np.uint64),
        ("prompt_len", np.int64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("typical_p", np.float64),
        ("plugin", np.int64),
    ]
)


def options_table(slots: int) -> npt.NDArray[Any]:
    """`[slots]` records, all zero, which is greedy."""
    return np.zeros(slots, _OPTIONS)
