"""`embed` and `score`: what a model makes of given texts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, get_args

import anyio.to_thread

from asyncinfer.checks import check_boolean, check_choice, check_integer, check_token_ids
from asyncinfer.chunk import Completion
from asyncinfer.engine.frontend import Frontend
from asyncinfer.engine.prompt_reader import PromptReader
from asyncinfer.engine.stream import Stream
from asyncinfer.errors import InvalidRequest, Size
from asyncinfer.params import SamplingParams
from asyncinfer.scheduler import Pooling

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Embeddings", "Score", "embed", "score"]

#: Texts of one call, and requests of it at once.
MOST_TEXTS: Final = 4096
AT_ONCE: Final = 64
#: What is computed is a prompt.
PARAMS: Final = SamplingParams(temperature=0.0, max_tokens=0)
SCORED: Final = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """What `Engine.embed` gives."""

    #: float32 `[texts, dimensions]`.
    vectors: npt.NDArray[np.float32]
    #: Of all texts together.
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Score:
    """What `Engine.score` gives for a continuation."""

    token_ids: tuple[int, ...]
    #: Natural logarithms, of each token after the prompt and the tokens before it.
    logprobs: tuple[float, ...]
    #: Whether every token is the likeliest at its place.
    greedy: bool

    @property
    def logprob(self) -> float:
        """Of the whole continuation."""
        return math.fsum(self.logprobs)


async def embed(
    texts: Sequence[Any],
    pooling: str,
    normalize: bool,
    dimensions: int | None,
    frontend: Frontend,
    begin: Callable[[Any, Pooling], Stream],
) -> Embeddings:
    """See `Engine.embed`; `begin` makes the request of a text."""
    import numpy as np  # An import of asyncinfer takes no time for it.

    spec = frontend.check().loaded.runner.spec
    _check_list("texts", texts)
    check_choice("pooling", pooling, get_args(Pooling))
    check_boolean("normalize", normalize)
    if not spec.hidden_size:
        raise InvalidRequest("texts", Size(f"{len(texts)}"), "this model gives no hidden states")
    if dimensions is not None:
        check_integer("dimensions", dimensions, 1, spec.hidden_size)
    chosen: Pooling = "mean" if pooling == "mean" else "last"
    done = await _each([partial(begin, text, chosen) for text in texts])
    rows = []
    for each in done:
        assert each.embedding is not None
        rows.append(each.embedding / (each.usage.prompt_tokens if chosen == "mean" else 1))
    vectors = np.stack(rows)
    if dimensions is not None:
        vectors = vectors[:, :dimensions]
    if normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    tokens = sum(each.usage.prompt_tokens for each in done)
    return Embeddings(np.ascontiguousarray(vectors, np.float32), tokens)


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
    most = frontend.config.max_prompt_chars

    def tokenise() -> tuple[list[int], list[list[int]]]:
        before, _ = reader.read(prompt, SCORED, None, lambda: None)
        rest = []
        for index, text in enumerate(continuations):
            name = f"continuations[{index}]"
            if isinstance(text, str):
                if len(text) > most:
                    value = Size(f"{len(text)} characters")
                    raise InvalidRequest(name, value, f"must have <= max_prompt_chars={most}")
                ids = tokenizer.encode_inner(text)
            else:
                ids = [*check_token_ids(name, text)]
            if not ids:
                raise InvalidRequest(name, text, "must hold at least one token")
            rest.append([*ids])
        return before, rest

    before, rest = await anyio.to_thread.run_sync(tokenise, abandon_on_cancel=True)
    first = len(before) - 1
    done = await _each([partial(begin, [*before, *ids], first) for ids in rest])
    scores = []
    for ids, each in zip(rest, done, strict=True):
        entries = [entry for entry in each.prompt_logprobs or () if entry is not None]
        logprobs = tuple(entry.logprob for entry in entries)
        scores.append(Score(tuple(ids), logprobs, all(entry.rank == 1 for entry in entries)))
    return scores


async def _each(begin: Sequence[Callable[[], Stream]]) -> list[Completion]:
    """The completions of requests, some at once. What one of them raises ends the others."""
    done: list[Completion] = []
    for start in range(0, len(begin), AT_ONCE):
        async with AsyncExitStack() as stack:
            streams: list[Awaitable[Completion]] = [
                await stack.enter_async_context(make()) for make in begin[start : start + AT_ONCE]
            ]
            done += [await stream for stream in streams]
    return done


def _check_list(name: str, value: Sequence[Any]) -> None:
    if not isinstance(value, list | tuple):
        raise InvalidRequest(name, value, "must be a list")
    if not 1 <= len(value) <= MOST_TEXTS:
        raise InvalidRequest(name, Size(f"{len(value)}"), f"must be 1 to {MOST_TEXTS}")
