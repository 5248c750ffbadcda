"""The work of `asyncinfer bench serve`: one definition, so that every engine's row means the same.

All requests are greedy and go on past the end of text; prompts are random token ids, new ones in
every repetition. A rate is output tokens (for `prefill` prompt tokens) over the seconds from the
first submission to the last token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncinfer.bench.checkpoint import write_checkpoint
from asyncinfer.bench.shapes import LLAMA_125M, LLAMA_TINY
from asyncinfer.builtin import MODEL_PATH

__all__ = ["MAX_RUNNING", "QUICK", "RANDOM", "SHIPPED", "WORKLOADS", "Workload", "model_source"]

#: The model in the package, and the random one that engines are compared on.
SHIPPED: Final = "shipped"
RANDOM: Final = "llama-125m"
#: Requests that an engine computes together at most.
MAX_RUNNING: Final = 16
SEED: Final = 20_261_120


def model_source(model: str, scratch: Path, *, quick: bool = False, **about: Any) -> Path | str:
    """What an engine opens for `SHIPPED`, `RANDOM`, a checkpoint's folder or a hub id. Random
    weights are written to `scratch`, those of a smaller model if it is `quick`; `about`: fields of
    their config."""
    if model == SHIPPED:
        return MODEL_PATH
    if model == RANDOM:
        write_checkpoint({**(LLAMA_TINY if quick else LLAMA_125M), **about}, scratch)
        return scratch
    return Path(model) if Path(model).exists() else model


@dataclass(frozen=True, slots=True)
class Workload:
    """One workload: a column of the table."""

    name: str
    title: str
    #: Prompt and output tokens of each request; all are submitted at once, in this order.
    requests: tuple[tuple[int, int], ...]
    #: Prompt tokens that all requests begin with. They are in the cache before the clock starts.
    shared: int = 0
    #: Whether prompt tokens are counted, and a request ends with its first token.
    prefill: bool = False

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt for prompt, _ in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(output for _, output in self.requests)

    @property
    def counted(self) -> int:
        """The tokens a rate counts."""
        return self.prompt_tokens if self.prefill else self.output_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that a warm prefix cache gives, and no more may be."""
        return self.shared * len(self.requests)

    def prompts(self, vocab_size: int, repetition: int) -> list[list[int]]:
        """Token ids of each prompt; no two repetitions share a block."""
        draw = random.Random(f"{SEED} {self.name} {repetition}")
        common = draw.choices(range(vocab_size), k=self.shared)
        return [
            common + draw.choices(range(vocab_size), k=prompt - self.shared)
            for prompt, _ in self.requests
        ]


def _mixed(
    count: int, prompts: tuple[int, int], outputs: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Lengths drawn evenly, the same ones for everybody."""
    draw = random.Random(SEED)
    return tuple((draw.randint(*prompts), draw.randint(*outputs)) for _ in range(count))


WORKLOADS: Final[Mapping[str, Workload]] = {
    workload.name: workload
    for workload in (
        Workload("one", "1 request, 128+128", ((128, 128),)),
        Workload("sixteen", "16 at once, 128+128", ((128, 128),) * 16),
        Workload("mixed", "64 mixed, 16..512 + 16..256", _mixed(64, (16, 512), (16, 256))),
        Workload("prefill", "prefill of 1,024", ((1024, 1),), prefill=True),
        Workload("shared", "32 sharing 512, warm", ((528, 32),) * 32, shared=512),
    )
}

#: Smaller workloads of a second or two, whose figures mean nothing.
QUICK: Final[Mapping[str, Workload]] = {
    workload.name: workload
    for workload in (
        Workload("one", "1 request, 16+8", ((16, 8),)),
        Workload("sixteen", "16 at once, 16+8", ((16, 8),) * 16),
        Workload("mixed", "20 mixed, 4..40 + 2..10", _mixed(20, (4, 40), (2, 10))),
        Workload("prefill", "prefill of 64", ((64, 1),), prefill=True),
        Workload("shared", "18 sharing 32, warm", ((40, 4),) * 18, shared=32),
    )
}
