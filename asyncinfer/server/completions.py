"""`/v1/completions`."""

from __future__ import annotations

from dataclasses import astuple
from functools import partial
from typing import Any, Final

import anyio

from asyncinfer.bounds import MAX_BATCH
from asyncinfer.chunk import Usage
from asyncinfer.engine import Engine
from asyncinfer.errors import InvalidRequest, Size
from asyncinfer.server.call import Call, json_bytes
from asyncinfer.server.fields import COMPLETION, check_fields, flag, options_of
from asyncinfer.server.logprobs import TextOffsets, completion_logprobs, scored_bytes
from asyncinfer.server.models import Model, Models, Served
from asyncinfer.server.offload import offload
from asyncinfer.server.together import at_place, together
from asyncinfer.server.usage import (
    ChoiceEvents,
    finish_reason,
    head,
    request_options,
    stop_reason,
    usage_of,
    wants_usage,
)

__all__ = ["Completions"]

#: OpenAI's default of `max_tokens`.
_MAX_TOKENS: Final = 16


class Completions:
    """Completes one prompt or several."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, call: Call) -> None:
        body = call.body
        check_fields(body, COMPLETION)
        model = self._models.find(body.get("model"))
        prompts = prompts_of("prompt", body["prompt"])
        options = {**await call.offload(_options, body), **request_options(call, model)}
        _check_room(model.engine, len(prompts), options.get("n", 1))
        echo = flag(body, "echo")
        usage = wants_usage(body)
        placed, prompts = prompts is body["prompt"], [*prompts]
        encode = model.engine.tokenizer.encode
        if "logprobs" in options:
            # Their offsets need the tokens before an answer.
            for index, prompt in enumerate(prompts):
                if isinstance(prompt, str):
                    read = partial(offload, partial(encode, prompt))
                    prompts[index] = await at_place("prompt", index if placed else None, read)
        if flag(body, "stream"):
            if echo and "logprobs" in options:
                raise InvalidRequest("echo", echo, "with logprobs needs stream=false")
            await _CompletionEvents(call, model, options, echo, usage).send(prompts, placed)
            return
        scored = echo and "logprobs" in options
        if scored:
            options["prompt_logprobs"] = options["logprobs"]
        generate = model.engine.generate
        calls = [partial(generate, prompt, **options) for prompt in prompts]
        done = await together(
            [
                partial(at_place, "prompt", index if placed else None, each)
                for index, each in enumerate(calls)
            ]
        )
        texts = [await _text(model, prompt) if echo else "" for prompt in prompts]
        answer = head(call, model, "text_completion", "cmpl")
        total = _total([each.usage for each in done])
        tokenizer = model.engine.tokenizer if "logprobs" in options else None

        def written() -> dict[str, Any]:
            choices: list[dict[str, Any]] = []
            for prompt, text, each in zip(prompts, texts, done, strict=True):
                scores: list[Any] = list(zip(prompt, each.prompt_logprobs or (), strict=False))
                for choice in each.choices:
                    logprobs = None
                    if tokenizer is not None:
                        own = [(entry.token_id, entry) for entry in choice.logprobs]
                        assert isinstance(prompt, list)
                        offsets = TextOffsets(tokenizer, () if scored else prompt)
                        logprobs = completion_logprobs(tokenizer, [*scores, *own], offsets)
                    told: dict[str, Any] = {"index": len(choices), "text": text + choice.text}
                    reason = finish_reason(choice.finish_reason)
                    told |= {"logprobs": logprobs, "finish_reason": reason, **stop_reason(choice)}
                    choices.append(told)
            return {**answer, "choices": choices, "usage": usage_of(total)}

        await call.made(scored_bytes(options, total), written)


def prompts_of(field: str, value: Any, most: int = MAX_BATCH) -> list[str | list[int]]:
    """One prompt, or a list of `most` at most. Raises `InvalidRequest`."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if isinstance(value[0], int):
            return [value]
        if len(value) > most:
            raise InvalidRequest(field, Size(f"{len(value)} texts"), f"at most {most}")
        for index, each in enumerate(value):
            if not isinstance(each, str | list):
                bound = "must be a string or a list of token ids"
                raise InvalidRequest(f"{field}[{index}]", each, bound)
        return value
    bound = "must be a string, a list of token ids, or a list of these"
    raise InvalidRequest(field, value, bound)


def _check_room(engine: Served, prompts: int, n: Any) -> None:
    """Refuse more answers than the engine ever holds at once: `Overloaded` would invite a retry."""
    # The engine refuses a bad `n`, and one that is too large for each prompt, itself.
    if type(n) is not int or n < 1 or prompts == 1:
        return
    alone = isinstance(engine, Engine)
    if isinstance(engine, Engine):
        limits = [engine.config.max_requests]
    else:
        limits = [*engine.limits.values()]
    # The answers to one prompt are all on one replica.
    if limits and max(limits) >= n and prompts > sum(limit // n for limit in limits):
        size = Size(f"{prompts} texts, {n} answers each")
        where = "" if alone else f", each prompt's on one of {len(limits)} replicas"
        raise InvalidRequest("prompt", size, f"at most max_requests={sum(limits)} answers{where}")


def _options(body: dict[str, Any]) -> dict[str, Any]:
    options = options_of(body, COMPLETION)
    options["max_tokens"] = body.get("max_tokens", _MAX_TOKENS)
    best_of = body.get("best_of")
    if best_of is not None and (isinstance(best_of, bool) or best_of != body.get("n", 1)):
        raise InvalidRequest("best_of", best_of, "must equal n")
    return options


async def _text(model: Model, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return await offload(partial(model.engine.tokenizer.decode, prompt))


def _total(used: list[Usage]) -> Usage:
    """The usage of several prompts together."""
    return Usage(*(sum(values) for values in zip(*map(astuple, used), strict=True)))


class _CompletionEvents:
    """The answers to several prompts as they are made."""

    def __init__(
        self, call: Call, model: Model, options: dict[str, Any], echo: bool, usage: bool
    ) -> None:
        self._call = call
        self._model = model
        self._options = options
        self._echo = echo
        self._common = ChoiceEvents(call, model, b"text_completion", b"cmpl", usage)
        #: Choices of which something was sent, with the offsets of their tokens.
        self._sent: dict[int, TextOffsets | None] = {}
        self._missing = 0
        self._all_began = anyio.Event()
        # Several tasks send.
        self._sending = anyio.Lock()

    async def send(self, prompts: list[str | list[int]], placed: bool) -> None:
        """`placed`: an error names the place of its prompt."""
        self._missing = len(prompts)
        calls = [
            partial(
                at_place,
                "prompt",
                index if placed else None,
                partial(self._stream, index, prompt),
            )
            for index, prompt in enumerate(prompts)
        ]
        await self._common.end(_total([each or Usage() for each in await together(calls)]))

    async def _stream(self, place: int, prompt: str | list[int]) -> Usage | None:
        n = self._options.get("n", 1)
        begun = await _text(self._model, prompt) if self._echo else ""
        async with self._model.engine.stream(prompt, **self._options) as stream:
            # A prompt that is refused is answered with an error, so nothing is sent before.
            self._missing -= 1
            if not self._missing:
                self._all_began.set()
            await self._all_began.wait()
            async for chunk in stream:
                index = place * n + chunk.index
                text = chunk.text
                tokenizer = self._model.engine.tokenizer
                if index not in self._sent:
                    self._sent[index] = None
                    if isinstance(prompt, list) and "logprobs" in self._options:
                        self._sent[index] = TextOffsets(tokenizer, prompt)
                    text = begun + text
                logprobs, offsets = None, self._sent[index]
                if offsets is not None and chunk.logprobs:
                    scores = [(entry.token_id, entry) for entry in chunk.logprobs]
                    logprobs = completion_logprobs(tokenizer, scores, offsets)
                if text or logprobs is not None or chunk.finish_reason is not None:
                    choice = {
                        "index": index,
                        "text": text,
                        "logprobs": logprobs,
                        "finish_reason": finish_reason(chunk.finish_reason),
                        **stop_reason(chunk),
                    }
                    data = b"%b%b]}\n\n" % (self._common.opening, json_bytes(choice))
                    self._call.raw_events(data)
                if self._call.is_due(stream.ready):
                    async with self._sending:
                        await self._call.flush()
        return stream.usage
