"""`asyncinfer bench accuracy`: what smaller formats of weights and KV cost a model's perplexity."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from asyncinfer import Engine, ModelLoadError
from asyncinfer.bench.record import BenchError, Figure
from asyncinfer.builtin import MODEL_PATH, read_corpus, standard_library
from asyncinfer.testing import Tokenizer

__all__ = ["AccuracyOptions", "AccuracyResult", "Perplexity", "measure_accuracy"]

_PLAIN: Final = ("plain", "plain")
#: Of weights and KV, the plain one first: the others are held against it.
_FORMATS: Final = (
    _PLAIN,
    ("int8", "plain"),
    ("plain", "fp8"),
    ("plain", "int8"),
    ("int8", "fp8"),
    ("int8", "int8"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyOptions:
    """The work."""

    #: A checkpoint's folder; None: the shipped model.
    model: str | None = None
    #: Files; none: those of the standard library that the shipped model was not trained on.
    text: tuple[str, ...] = ()
    #: Tokens of a sequence: a longer file is read in pieces.
    context: int = 2048
    device: str = "auto"
    dtypes: tuple[str, ...] = ("auto",)
    #: A smoke run on a few tokens.
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Of one way to hold the model."""

    dtype: str
    weights: str
    kv: str
    perplexity: float


@dataclass(frozen=True, slots=True)
class AccuracyResult:
    """Everything measured, in order."""

    #: How many were predicted.
    tokens: int
    rows: tuple[Perplexity, ...]

    def figures(self) -> tuple[Figure, ...]:
        found = []
        for row in self.rows:
            name = f"{row.dtype}, weights {row.weights}, KV {row.kv}"
            if (row.weights, row.kv) == _PLAIN:
                plain = row.perplexity
                found.append(Figure(f"{name}: perplexity", plain, "per token", "lower"))
            else:
                change = 100 * (row.perplexity / plain - 1)
                found.append(Figure(f"{name}: more", change, "%", "lower"))
        return tuple(found)


def measure_accuracy(
    options: AccuracyOptions, report: Callable[[str], None] = lambda line: None
) -> AccuracyResult:
    """Perplexity of the text in every format that the device takes, from prompts' logprobs. Raises
    `BenchError`, or the engine's own error where not even the plain one opens."""
    if options.context < 3:
        raise BenchError(f"context={options.context}: must be at least 3")
    if options.quick:
        options = replace(options, text=(__file__,), context=min(options.context, 256))
    pieces = _pieces(options)[: 1 if options.quick else None]
    predicted = sum(len(piece) - 1 for piece in pieces)
    rows = []
    for dtype in options.dtypes:
        for weights, kv in _FORMATS:
            report(f"{dtype}: weights {weights}, KV {kv}")
            try:
                nats = asyncio.run(_nats(options, pieces, dtype=dtype, weights=weights, kv=kv))
            except ModelLoadError as error:
                if (weights, kv) == _PLAIN:
                    raise
                # Not every GPU has units for fp8.
                report(f"left out: {error}")
                continue
            found = math.exp(nats / predicted)
            rows.append(Perplexity(dtype=dtype, weights=weights, kv=kv, perplexity=found))
    return AccuracyResult(predicted, tuple(rows))


async def _nats(options: AccuracyOptions, pieces: Iterable[Sequence[int]], **formats: Any) -> float:
    """Negative logarithm of the text's probability, given the first token of each piece."""
    total = 0.0
    async with Engine(
        options.model,
        device=options.device,
        max_context=options.context,
        max_running=1,
        prefix_cache=False,
        **formats,
    ) as engine:
        for piece in pieces:
            done = await engine.generate(list(piece), max_tokens=1, prompt_logprobs=0)
            assert done.prompt_logprobs is not None
            total -= sum(entry.logprob for entry in done.prompt_logprobs if entry is not None)
    return total


def _pieces(options: AccuracyOptions) -> list[list[int]]:
    """Tokens of the text. A piece begins with the last token of the piece before it, so that every
    token but a file's first is predicted. A piece leaves room for one token more."""
    tokenizer = Tokenizer.from_folder(Path(options.model or MODEL_PATH))
    step = options.context - 2
    pieces = []
    for text in _texts(options):
        ids = tokenizer.encode(text)
        pieces += [ids[start : start + step + 1] for start in range(0, len(ids) - 1, step)]
    if not pieces:
        raise BenchError("the text has not even two tokens")
    return pieces


def _texts(options: AccuracyOptions) -> Iterable[str]:
    if not options.text:
        return read_corpus(standard_library()).held_out.values()
    try:
        return [Path(name).read_text("utf-8") for name in options.text]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"text: {error}") from error
