"""`embed` and `score`, which compute prompts and generate nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, get_args

import anyio.to_thread

from asyncinfer.checks import (
    check_boolean,
    check_choice,
    check_integer,
    check_string,
    check_token_ids,
)
from asyncinfer.chunk import Completion
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.prompt_reader import PromptReader, checked_ids
from asyncinfer.engine.stream import Stream
from asyncinfer.errors import InvalidRequest, Overloaded, Size, renaming
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Pooling

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from asyncinfer.models.embedding_modules import DenseModule, EmbeddingModules

__all__ = ["Embeddings", "Score", "embed", "score"]

#: The most texts of one call, and its concurrent requests.
MOST_TEXTS: Final = 4096
AT_ONCE: Final = 64
#: Sampling options of a request that computes its prompt and generates nothing.
PARAMS: Final = SamplingParams(temperature=0.0, max_tokens=0)
SCORED: Final = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The result of `Engine.embed`."""

    #: float32 `[texts, dimensions]`.
    vectors: npt.NDArray[np.float32]
    #: Prompt tokens of all texts together.
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Score:
    """The result of `Engine.score` for one continuation."""

    token_ids: tuple[int, ...]
    #: Natural logarithms, of each token after the prompt and the tokens before it.
    logprobs: tuple[float, ...]
    #: Whether every token is the most likely one at its place.
    greedy: bool

    @property
    def logprob(self) -> float:
        """The logprob of the whole continuation."""
        return math.fsum(self.logprobs)


async def embed(
    texts: Sequence[Any],
    pooling: str | None,
    normalize: bool | None,
    dimensions: int | None,
    prompt_name: str | None,
    frontend: Frontend,
    begin: Callable[[Any, Pooling], Stream],
) -> Embeddings:
    """See `Engine.embed`; `begin` makes the request of a text."""
    loaded = frontend.check().loaded
    hidden_size, modules = loaded.runner.spec.hidden_size, loaded.modules
    _check_list("texts", texts)
    if pooling is None:
        pooling = "last" if modules is None else modules.pooling
    check_choice("pooling", pooling, get_args(Pooling))
    if normalize is None:
        normalize = modules is None or modules.normalize
    check_boolean("normalize", normalize)
    if not hidden_size:
        raise InvalidRequest("texts", Size(f"{len(texts)}"), "this model gives no hidden states")
    dense = () if modules is None else modules.dense
    if dimensions is not None:
        most = len(dense[-1].weight) if dense else hidden_size
        check_integer("dimensions", dimensions, 1, most)
    before = _prompt(prompt_name, modules)
    asked = (before + text if isinstance(text, str) else text for text in texts)
    chosen: Pooling = "mean" if pooling == "mean" else "last"
    done = await _each(frontend, "texts", (begin(text, chosen) for text in asked))
    finish = partial(_vectors, done, chosen, dense, dimensions, normalize)
    # Thousands of vectors, or a product with some, are too long for the event loop.
    long = dense or len(done) > AT_ONCE
    vectors = await anyio.to_thread.run_sync(finish) if long else finish()
    return Embeddings(vectors, sum(each.usage.prompt_tokens for each in done))


def _prompt(name: str | None, modules: EmbeddingModules | None) -> str:
    """The text that `modules` puts before each input, by the name of the prompt."""
    prompts = {} if modules is None else modules.prompts
    if name is None:
        name = None if modules is None else modules.default_prompt
        return "" if name is None else prompts[name]
    check_string("prompt_name", name)
    if name not in prompts:
        known = ", ".join(sorted(prompts))
        bound = f"must be one of {known}" if prompts else "this model has no prompts"
        raise InvalidRequest("prompt_name", name, bound)
    return prompts[name]


def _vectors(
    done: Sequence[Completion],
    pooling: Pooling,
    dense: Sequence[DenseModule],
    dimensions: int | None,
    normalize: bool,
) -> npt.NDArray[np.float32]:
    import numpy as np  # Imported here, so that `import asyncinfer` stays quick.

    rows = []
    for each in done:
        assert each.embedding is not None
        tokens = each.usage.prompt_tokens if pooling == "mean" else 1
        rows.append(each.embedding / np.float32(tokens))
    vectors: npt.NDArray[np.float32] = np.stack(rows)
    for module in dense:
        vectors = module(vectors)
    if dimensions is not None:
        vectors = vectors[:, :dimensions]
    if normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return np.ascontiguousarray(vectors, np.float32)


async def score(
    prompt: Any,
    continuations: Sequence[Any],
    frontend: Frontend,
    begin: Callable[[list[int], int], Stream],
) -> list[Score]:
    """See `Engine.score`; `begin` makes the request that scores tokens from a place on."""
    core = frontend.check()
    _check_list("continuations", continuations)
    reader, tokenizer = PromptReader(core.loaded, frontend.config), core.loaded.tokenizer
    most, vocab_size = frontend.config.max_prompt_chars, core.loaded.runner.spec.vocab_size

    def tokenise() -> tuple[list[int], list[list[int]]]:
        before, _ = reader.read(prompt, SCORED, None, lambda: None)
        rest = []
        for index, text in enumerate(continuations):
            name = f"continuations[{index}]"
            if isinstance(text, str):
                if len(text) > most:
                    value = Size(f"{len(text)} characters")
                    raise InvalidRequest(name, value, f"must have <= max_prompt_chars={most}")
                ids = tokenizer.encode_inner(text, name)
            else:
                ids = checked_ids(name, check_token_ids(name, text), vocab_size)
            if not ids:
                raise InvalidRequest(name, text, "must hold at least one token")
            rest.append(ids)
        return before, rest

    before, rest = await anyio.to_thread.run_sync(tokenise, abandon_on_cancel=True)
    first = len(before) - 1
    streams = (begin([*before, *ids], first) for ids in rest)
    done = await _each(frontend, "continuations", streams)
    scores = []
    for ids, each in zip(rest, done, strict=True):
        entries = [entry for entry in each.prompt_logprobs or () if entry is not None]
        logprobs = tuple(entry.logprob for entry in entries)
        scores.append(Score(tuple(ids), logprobs, all(entry.rank == 1 for entry in entries)))
    return scores


async def _each(frontend: Frontend, name: str, streams: Iterable[Stream]) -> list[Completion]:
    """The completions of the requests, one for each entry of the argument `name`. As many run at
    once as the engine has room for beside others, and further ones are not made: thousands of
    prompts together would hold more than requests may. An error of one request ends the others."""
    done: list[Completion] = []
    left, most = enumerate(streams), min(AT_ONCE, frontend.config.max_requests)
    batch: list[tuple[int, Stream]] = []
    while batch := [*batch, *islice(left, most - len(batch))]:
        begun = 0
        async with AsyncExitStack() as stack:
            for index, stream in batch:
                try:
                    with renaming("prompt", f"{name}[{index}]"):
                        await stack.enter_async_context(stream)
                except Overloaded:
                    if not begun:
                        raise
                    break
                begun += 1
            for index, stream in batch[:begun]:
                with renaming("prompt", f"{name}[{index}]"):
                    done.append(await stream)
        del batch[:begun]
    return done


def _check_list(name: str, value: Sequence[Any]) -> None:
    if not isinstance(value, list | tuple):
        raise InvalidRequest(name, value, "must be a list")
    if not 1 <= len(value) <= MOST_TEXTS:
        raise InvalidRequest(name, Size(f"{len(value)}"), f"must be 1 to {MOST_TEXTS}")
