"""`asyncinfer bench accuracy`: what smaller formats of weights and KV cost and save a model."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from asyncinfer import Engine, ModelLoadError
from asyncinfer.bench.record import BenchError, Figure
from asyncinfer.bench.workloads import SHIPPED
from asyncinfer.builtin import MODEL_PATH, read_corpus, standard_library
from asyncinfer.config import KV, Weights

__all__ = ["AccuracyOptions", "AccuracyResult", "Perplexity", "measure_accuracy"]

_PLAIN: Final[Literal["plain"]] = "plain"
#: Formats of weights and KV that the first model is measured in where none are chosen.
_FORMATS: Final[tuple[tuple[Weights, KV], ...]] = (
    (_PLAIN, _PLAIN),
    ("int8", _PLAIN),
    ("fp8", _PLAIN),
    ("int4", _PLAIN),
    ("int4-128", _PLAIN),
    (_PLAIN, "fp8"),
    (_PLAIN, "int8"),
    (_PLAIN, "int4"),
    ("int8", "fp8"),
    ("int8", "int8"),
)
#: Tokens of the prompt and of the answer that speed is measured with, and how often.
_PROMPT: Final = 16
_ANSWER: Final = 32
_TIMES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyOptions:
    """Options of the benchmark."""

    #: "shipped", folders, GGUF files, names or hub ids. The first one's tokenizer reads the text
    #: for all, so the others must have the same tokens.
    models: tuple[str, ...] = (SHIPPED,)
    #: Formats of weights and KV, of which every pair is measured; none: for the first model all,
    #: for the others what is in their files.
    weights: tuple[Weights, ...] = ()
    kv: tuple[KV, ...] = ()
    #: Files; none: those of the standard library that the shipped model was not trained on.
    text: tuple[str, ...] = ()
    #: Tokens of a sequence: a longer file is read in pieces.
    context: int = 2048
    #: Most tokens that are read; None: the whole text.
    tokens: int | None = None
    device: str = "auto"
    dtypes: tuple[str, ...] = ("auto",)
    #: A smoke run on a few tokens.
    quick: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Perplexity, size and speed of a model in one format."""

    #: The name or the file.
    model: str
    dtype: str
    weights: str
    kv: str
    perplexity: float
    #: Bytes of the weights in memory.
    weight_bytes: int
    #: Tokens a second of one request's answer, the fastest of a few.
    tokens_per_second: float

    @property
    def name(self) -> str:
        return f"{self.model}, {self.dtype}, weights {self.weights}, KV {self.kv}"


@dataclass(frozen=True, slots=True)
class AccuracyResult:
    """Everything measured, in order."""

    #: How many tokens were predicted.
    tokens: int
    rows: tuple[Perplexity, ...]

    def figures(self) -> tuple[Figure, ...]:
        """The figures; each row is compared with the first row of its dtype."""
        found = []
        first: dict[str, float] = {}
        for row in self.rows:
            if row.dtype not in first:
                first[row.dtype] = row.perplexity
                found.append(Figure(f"{row.name}: perplexity", row.perplexity, "", "lower"))
            else:
                change = 100 * (row.perplexity / first[row.dtype] - 1)
                found.append(Figure(f"{row.name}: more", change, "%", "lower"))
            size = row.weight_bytes / 1e6
            found.append(Figure(f"{row.name}: weights", size, "MB", "lower"))
            speed = row.tokens_per_second
            found.append(Figure(f"{row.name}: one request", speed, "tokens/s", "higher"))
        return tuple(found)


def measure_accuracy(
    options: AccuracyOptions, report: Callable[[str], None] = lambda line: None
) -> AccuracyResult:
    """Perplexity of the text in every format that the device takes, from prompts' logprobs. Raises
    `BenchError`, or the engine's own error where not even the plain one opens."""
    if options.context < 4:
        raise BenchError(f"context={options.context}: must be at least 4")
    if options.tokens is not None and options.tokens < 2:
        raise BenchError(f"tokens={options.tokens}: must be at least 2")
    if options.quick:
        options = replace(
            options, text=options.text or (__file__,), context=min(options.context, 256)
        )
    pieces = asyncio.run(_pieces(options))[: 1 if options.quick else None]
    predicted = sum(len(piece) - 1 for piece in pieces)
    rows: list[Perplexity] = []
    for dtype in options.dtypes:
        for place, (model, weights, kv) in enumerate(_chosen(options)):
            report(f"{model}, {dtype}: weights {weights}, KV {kv}")
            try:
                row = asyncio.run(_row(model, options, pieces, dtype, weights, kv))
            except ModelLoadError as error:
                if not place:
                    raise
                # Not every GPU has units for fp8.
                report(f"left out: {error}")
                continue
            rows.append(row)
    return AccuracyResult(predicted, tuple(rows))


def _chosen(options: AccuracyOptions) -> list[tuple[str, Weights, KV]]:
    """Model, weights and KV of each row."""
    first, *others = options.models or (SHIPPED,)
    if options.weights or options.kv:
        chosen = itertools.product(options.weights or (_PLAIN,), options.kv or (_PLAIN,))
        pairs = list(chosen)
        return [(model, *pair) for model in (first, *others) for pair in pairs]
    return [(first, *pair) for pair in _FORMATS] + [(other, _PLAIN, _PLAIN) for other in others]


async def _row(
    model: str,
    options: AccuracyOptions,
    pieces: Sequence[Sequence[int]],
    dtype: str,
    weights: Weights,
    kv: KV,
) -> Perplexity:
    nats, fastest = 0.0, math.inf
    async with Engine(
        _source(model),
        device=options.device,
        dtype=dtype,
        weights=weights,
        kv=kv,
        max_context=options.context,
        max_running=1,
        prefix_cache=False,
    ) as engine:
        for piece in pieces:
            done = await engine.generate(list(piece), max_tokens=1, prompt_logprobs=0)
            assert done.prompt_logprobs is not None
            nats -= sum(entry.logprob for entry in done.prompt_logprobs if entry is not None)
        prompt = list(pieces[0][: min(_PROMPT, options.context - 2)])
        answer = min(_ANSWER, options.context - len(prompt))
        for _ in range(1 if options.quick else _TIMES):
            done = await engine.generate(
                prompt, max_tokens=answer, temperature=0.0, ignore_eos=True
            )
            fastest = min(fastest, done.timings.per_token)
    predicted = sum(len(piece) - 1 for piece in pieces)
    return Perplexity(
        model=Path(model).name,
        dtype=dtype,
        weights=weights,
        kv=kv,
        perplexity=math.exp(nats / predicted),
        weight_bytes=_weight_bytes(model, options.device, dtype, weights),
        tokens_per_second=1 / fastest,
    )


def _source(model: str) -> Path | str:
    return MODEL_PATH if model == SHIPPED else model


def _weight_bytes(model: str, device: str, dtype: str, weights: str) -> int:
    """Bytes of the weights that an engine on this machine holds."""
    # Imported here, since they import torch.
    import torch

    from asyncinfer.bench.weight_bytes import weight_bytes
    from asyncinfer.models import check_fetched, load_model, read_config, resolve

    path = resolve(_source(model), check=check_fetched)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else read_config(path).dtype or "float32"
    numbers = getattr(torch, dtype.removeprefix("torch."))
    # So short a context needs next to no tables.
    return weight_bytes(load_model(path, device, numbers, storage=weights, max_context=1))


async def _pieces(options: AccuracyOptions) -> list[list[int]]:
    """Tokens of the text, which all models must have. A piece begins with the last token of the
    piece before it, so that every token but a file's first is predicted. A piece leaves room for
    one token more."""
    texts = list(_texts(options))
    step = options.context - 2
    pieces: list[list[int]] = []
    encoded: list[list[int]] = []
    left = options.tokens
    for place, model in enumerate(options.models or (SHIPPED,)):
        async with Engine(
            _source(model), device=options.device, max_context=3, max_running=1
        ) as engine:
            if not place:
                for text in texts:
                    ids = engine.tokenizer.encode(text)[:left]
                    left = None if left is None else left - len(ids)
                    encoded.append(ids)
                    pieces += [ids[at : at + step + 1] for at in range(0, len(ids) - 1, step)]
                read = [engine.tokenizer.decode(ids) for ids in encoded]
            elif [engine.tokenizer.decode(ids) for ids in encoded] != read:
                raise BenchError(f"model={model!r}: has other tokens than the first model")
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
