"""Every bound of what comes from outside: at the bound, one past it, and in the reference."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import lines_run

from asyncinfer import Engine, EngineConfig, InvalidRequest, PromptTooLong, SamplingParams, bounds
from asyncinfer.cache import KVGroupSpec
from asyncinfer.checks import check_arguments, check_token_ids
from asyncinfer.engine.beam_group import BeamOptions
from asyncinfer.engine.footprint import submitted_bytes
from asyncinfer.engine.options import RequestOptions
from asyncinfer.grammar.compiler import LIMITS
from asyncinfer.scheduler import RunnerSpec, check_fits
from asyncinfer.server import body
from asyncinfer.testing import FakeModel
from asyncinfer.text import compiled_template, messages, render_budget, tokenizer
from asyncinfer.tools import ChatOptions

REFERENCE = Path(__file__).parent.parent / "docs" / "reference.md"

Attempt = Callable[[Any], object]


def option(name: str, **others: Any) -> Attempt:
    """Sampling parameters with this value."""
    return lambda value: SamplingParams(**{name: value, **others})


def beams(value: Any) -> object:
    return BeamOptions(beams=value)


def request_option(name: str, **others: Any) -> Attempt:
    usual = {
        "priority": 0,
        "deadline": None,
        "cache_scope": "",
        "buffer": 1,
        "on_full": "pause",
    }
    return lambda value: RequestOptions(**{**usual, **others, name: value})  # type: ignore[arg-type]


def prompt_scores(prompt_len: int) -> Attempt:
    spec = RunnerSpec((KVGroupSpec(10**6),), 16, 1, 10**7, vocab_size=9, max_step_tokens=9)
    return lambda value: check_fits(spec, prompt_len, 1, value)


def nested(levels: int) -> dict[str, Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return {"tau": value}


def arguments(value: Any) -> object:
    return SamplingParams(sampler="mirostat", sampler_args=value)


def tool_name(value: Any) -> object:
    return ChatOptions.of([{"name": value}], None, True, None, False)


def chat(prompt: Any) -> object:
    return submitted_bytes(prompt, 0)


MESSAGE: dict[str, Any] = {"role": "user", "content": "x"}


#: What is bounded: how to try a value, the largest that goes and the smallest that does not.
BOUNDS: dict[str, tuple[Attempt, Any, Any]] = {
    "max_tokens": (option("max_tokens"), 2**31 - 1, 2**31),
    "min_tokens": (option("min_tokens"), 2**31 - 1, 2**31),
    "temperature": (option("temperature"), 1e6, 1_000_001),
    "top_k": (option("top_k"), 2**31 - 1, 2**31),
    "n": (option("n"), 128, 129),
    "logprobs": (option("logprobs"), 128, 129),
    "prompt_logprobs": (option("prompt_logprobs"), 128, 129),
    "prompt_logprobs of a prompt": (prompt_scores(2**18), 3, 4),
    "prompt_logprobs of a long prompt": (prompt_scores(2**20 + 1), None, 0),
    "prompt: messages": (chat, [MESSAGE] * 16_384, [MESSAGE] * 16_385),
    "prompt: parts of messages": (
        chat,
        [MESSAGE, MESSAGE | {"content": ["x"] * 16_384}],
        [MESSAGE, MESSAGE | {"content": ["x"] * 16_385}],
    ),
    "prompt: values in messages": (
        chat,
        [MESSAGE | {"x": ["x"] * 131_069}],
        [MESSAGE | {"x": ["x"] * 131_070}],
    ),
    "negative_prompt": (
        option("negative_prompt", guidance_scale=2.0),
        [MESSAGE] * 16_384,
        [MESSAGE] * 16_385,
    ),
    "stop: how many": (option("stop"), ["x"] * 64, ["x"] * 65),
    "stop: how long": (option("stop"), "x" * 4096, "x" * 4097),
    "stop_regex: how many": (option("stop_regex"), ["x"] * 16, ["x"] * 17),
    "stop_regex: how long": (option("stop_regex"), "x" * 1024, "x" * 1025),
    "repetition_stop[0]": (option("repetition_stop"), (256, 2), (257, 2)),
    "repetition_stop[1]": (option("repetition_stop"), (1, 4096), (1, 4097)),
    "thinking_budget": (option("thinking_budget"), 2**31 - 1, 2**31),
    "thinking_tags": (option("thinking_tags"), ["x" * 64] * 2, ["x", "x" * 65]),
    "logprob_token_ids": (option("logprob_token_ids"), range(128), range(129)),
    "stop_token_ids: how many": (option("stop_token_ids"), range(65_536), range(65_537)),
    "stop_token_ids: how large": (option("stop_token_ids"), [2**31 - 1], [2**31]),
    "allowed_token_ids: how many": (option("allowed_token_ids"), range(65_536), range(65_537)),
    "allowed_token_ids: how large": (option("allowed_token_ids"), [2**31 - 1], [2**31]),
    "logit_bias: how many": (
        option("logit_bias"),
        dict.fromkeys(range(4096), 1.0),
        dict.fromkeys(range(4097), 1.0),
    ),
    "logit_bias: how large": (option("logit_bias"), {1: 1e4}, {1: 10_001}),
    "bad_words: how many": (option("bad_words"), ["x"] * 1024, ["x"] * 1025),
    "bad_words: how long": (option("bad_words"), ["x" * 256], ["x" * 257]),
    "bad_words: together": (option("bad_words"), ["x" * 256] * 64, ["x" * 256] * 64 + ["x"]),
    "sampler: how many": (option("sampler"), ["xtc"] * 16, ["xtc"] * 17),
    "sampler: a pair's name": (option("sampler"), ("x" * 256, {}), ("x" * 257, {})),
    "sampler: a pair's arguments": (
        option("sampler"),
        [("xtc", {"a": [0] * 65_535})],
        [("xtc", {"a": [0] * 65_536})],
    ),
    "sampler: its name": (option("sampler"), "x" * 256, "x" * 257),
    "sampler_args: names": (
        arguments,
        dict.fromkeys(map(str, range(64)), 1),
        dict.fromkeys(map(str, range(65)), 1),
    ),
    "sampler_args: nesting": (arguments, nested(8), nested(9)),
    "sampler_args: values": (arguments, {"a": [0] * 65_535}, {"a": [0] * 65_536}),
    "sampler_args: characters": (arguments, {"a": "x" * 65_535}, {"a": "x" * 65_536}),
    "sampler_args: integers": (arguments, {"a": 2**128 - 1}, {"a": 2**128}),
    "json_schema: characters": (option("json_schema"), {"const": "x" * 65_000}, "x" * 65_537),
    "json_schema: values": (
        option("json_schema"),
        {"enum": [0] * 16_382},
        {"enum": [0] * 16_383},
    ),
    "regex": (option("regex"), "x" * 65_536, "x" * 65_537),
    "grammar": (option("grammar"), "x" * 65_536, "x" * 65_537),
    "choice: how many": (option("choice"), ["x"] * 4096, ["x"] * 4097),
    "choice: how long": (option("choice"), ["x" * 4096], ["x" * 4097]),
    "choice: together": (option("choice"), ["x" * 4096] * 16, ["x" * 4096] * 16 + ["x"]),
    "constrain_after": (
        lambda value: SamplingParams(regex="a", constrain_after=value),
        "x" * 256,
        "x" * 257,
    ),
    "tools[0].name": (tool_name, "x" * 128, "x" * 129),
    "priority": (request_option("priority"), 2**31 - 1, 2**31),
    "priority, low": (request_option("priority"), -(2**31) + 1, -(2**31)),
    "deadline": (request_option("deadline"), 1e9, 1e9 + 1),
    "cache_scope": (request_option("cache_scope"), "x" * 256, "x" * 257),
    "adapter": (request_option("adapter"), "x" * 256, "x" * 257),
    "prediction": (request_option("prediction"), "x" * 1_000_000, "x" * 1_000_001),
    "prediction, ids": (request_option("prediction"), [1] * 65_536, [1] * 65_537),
    "beams": (beams, 64, 65),
    "buffer": (request_option("buffer"), 1_000_000, 1_000_001),
    "stream_interval": (request_option("stream_interval", buffer=10**6), 1024, 1025),
}


@pytest.mark.parametrize("name", BOUNDS)
# fault 39
def test_at_the_bound_and_one_past_it(name: str) -> None:
    attempt, most, more = BOUNDS[name]
    attempt(most)
    with pytest.raises(InvalidRequest) as caught:
        attempt(more)
    # The entry that is wrong may be named, too.
    named = (caught.value.field, re.sub(r"\[\d+\]$", "", caught.value.field))
    assert re.split(r"[:, ]", name)[0] in named
    assert len(str(caught.value)) < 300


class Endless(Sequence[int]):
    """Says that it has three entries, and never ends."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return 1

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


def test_a_count_is_no_value_in_quotes() -> None:
    with pytest.raises(InvalidRequest, match=r"^stop=<65 entries>: at most 64$"):
        SamplingParams(stop=["x"] * 65)
    with pytest.raises(PromptTooLong, match=r"^prompt=<40 tokens>: at most 31 fit the context"):
        check_fits(RunnerSpec((KVGroupSpec(9),), 16, 1, 32, 9, max_step_tokens=9), 40, None)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "stop", "bad_words"])
@pytest.mark.parametrize(
    "value", [range(2**31), range(2**70), Endless()], ids=["2^31", "2^70", "endless"]
)
def test_a_list_is_measured_before_it_is_copied(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == name


def test_arguments_that_hold_themselves_are_refused() -> None:
    around: list[Any] = []
    around.append(around)
    shared: list[Any] = [0]
    for _ in range(7):
        shared = [shared] * 30
    for value in (around, shared):
        with pytest.raises(InvalidRequest):
            check_arguments("sampler_args", {"a": value})


def test_what_is_no_plain_integer_is_still_looked_at() -> None:
    class Odd(int):
        pass

    assert check_token_ids("stop_token_ids", [1, Odd(2)]) == (1, 2)
    for ids in ([1, True], [1, 2.0], [1, -1], [1, Odd(-1)]):
        with pytest.raises(InvalidRequest):
            check_token_ids("stop_token_ids", ids)


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize("kind", ["text", "a subclass", "lists", "a mapping", "a number"])
def test_a_message_writes_no_more_than_it_shows(kind: str) -> None:
    """Nor does it take the memory to: the whole value was written, and then cut off."""
    values: dict[str, Any] = {
        "text": "x" * 10**7,
        "a subclass": Text("x" * 10**7),
        "lists": [["x" * 10**6] * 100] * 1000,
        "a mapping": dict.fromkeys(range(10**5), "x" * 10**6),
        "a number": 10**4999,
    }
    tracemalloc.start()
    try:
        error = InvalidRequest("stop", values[kind], "too long")
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()
    assert len(str(error)) < 200


# -- the reference ---------------------------------------------------------------------------------

#: Row of the table -> the numbers in it, in order. Those of `bounds` are named.
ROWS: dict[str, list[float]] = {
    "`max_tokens`, `min_tokens`": [bounds.MAX_TOKENS],
    "`n`": [bounds.MAX_N],
    "`logprobs`": [bounds.MAX_LOGPROBS],
    "`prompt_logprobs`": [bounds.MAX_LOGPROBS, bounds.MAX_PROMPT_SCORES],
    "`stop`": [bounds.MAX_STOP, bounds.MAX_STOP_CHARS],
    "`stop_regex`": [
        bounds.MAX_STOP_REGEX,
        bounds.MAX_STOP_REGEX_CHARS,
        bounds.MAX_STOP_REGEX_SPAN,
    ],
    "`repetition_stop`": [bounds.MAX_LOOP_TOKENS, bounds.MAX_LOOP_TIMES],
    "`thinking_budget`, `thinking_tags`": [bounds.MAX_TOKENS, bounds.MAX_TAG_CHARS],
    "`logprob_token_ids`": [bounds.MAX_LOGPROBS],
    "`beams`": [bounds.MAX_BEAMS],
    "`stream_interval`": [bounds.MAX_STREAM_INTERVAL],
    "`stop_token_ids`, `allowed_token_ids`": [bounds.MAX_TOKEN_LIST],
    "`logit_bias`": [bounds.MAX_LOGIT_BIAS],
    "`bad_words`": [
        bounds.MAX_BAD_WORDS,
        bounds.MAX_BAD_WORD_CHARS,
        bounds.MAX_BAD_WORDS_CHARS,
    ],
    "`sampler`": [bounds.MAX_SAMPLERS, bounds.MAX_SAMPLER_NAME],
    "`sampler_args`, or a sampler's arguments": [
        bounds.MAX_SAMPLER_ARGS,
        bounds.MAX_SAMPLER_DEPTH,
        bounds.MAX_SAMPLER_VALUES,
        bounds.MAX_SAMPLER_CHARS,
        bounds.MAX_SAMPLER_BITS,
    ],
    "`json_schema`, `structural_tag`": [
        bounds.MAX_GRAMMAR_CHARS,
        bounds.MAX_SCHEMA_DEPTH,
        bounds.MAX_SCHEMA_VALUES,
    ],
    "`regex`, `grammar`": [bounds.MAX_GRAMMAR_CHARS],
    "`choice`": [bounds.MAX_CHOICES, bounds.MAX_CHOICE_CHARS, bounds.MAX_GRAMMAR_CHARS],
    "`constrain_after`": [bounds.MAX_CLOSING_CHARS],
    "work of a mask": [LIMITS["step_lexer_fuel"], LIMITS["step_max_items"]],
    "`tools`": [bounds.MAX_TOOLS, bounds.MAX_TOOL_NAME, bounds.MAX_TOOL_CHARS],
    "`template_options`": [bounds.MAX_TEMPLATE_OPTION_CHARS],
    "`cache_scope`": [bounds.MAX_SCOPE_CHARS],
    "`adapter`": [bounds.MAX_ADAPTER_NAME],
    "`prediction`": [bounds.MAX_PREDICTION, bounds.MAX_TOKEN_LIST],
    "`buffer`": [bounds.MAX_BUFFER],
    "`priority`": [bounds.MAX_PRIORITY],
    "`deadline`": [bounds.MAX_DEADLINE],
    "characters of a prompt": [EngineConfig().max_prompt_chars],
    "messages of a chat": [bounds.MAX_MESSAGES, bounds.MAX_MESSAGE_VALUES],
    "a chat message": [messages.MAX_DEPTH, tokenizer.MAX_COVERED],
    "work of a chat template": [render_budget.MAX_STEPS],
    "what a chat template makes": [
        render_budget.MAX_SIZE,
        render_budget.MAX_HELD,
        render_budget.MAX_SHORT,
        render_budget.MAX_WRITTEN,
    ],
    "a chat template's source": [compiled_template.MAX_SOURCE],
    "answers of requests that are held": [EngineConfig().max_requests],
    "bytes that requests hold": [EngineConfig().max_held_bytes],
    "sequences computed together": [EngineConfig().max_running],
    "query tokens of a step": [EngineConfig().max_step_tokens],
    "seconds of a step": [EngineConfig().step_timeout],
    "seconds of a sampler plugin": [EngineConfig().sampler_timeout],
    "seconds that a full stream is not read": [EngineConfig().stall_timeout],
    "an HTTP request's body": [
        bounds.MAX_BODY_BYTES,
        body.SMALL,
        bounds.MAX_BODY_CONTAINERS,
        bounds.BODY_SECONDS,
    ],
    "seconds that a client takes none of an HTTP answer": [bounds.UNREAD_SECONDS],
    "prompts of an HTTP request": [bounds.MAX_BATCH, bounds.MAX_EMBEDDED],
    "seconds of a clean close": [EngineConfig().drain_timeout],
}


def table() -> dict[str, str]:
    chapter = REFERENCE.read_text("utf-8").split("\n## Bounds\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]*) \| ([^|]*) \|", chapter, re.MULTILINE)
    return {name: bound for name, bound in rows if not set(name) <= set("- ") and bound != "bound"}


def test_the_reference_has_every_bound() -> None:
    found = table()
    assert sorted(found) == sorted(ROWS)
    for name, bound in found.items():
        numbers = [
            2.0 ** int(power.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789"))) - (less == "−1")
            if power
            else float(plain.replace(",", ""))
            for power, less, plain in re.findall(r"2([⁰¹²³⁴⁵⁶⁷⁸⁹]+)(−1)?|(\d[\d,.]*\d|\d)", bound)
        ]
        assert numbers == ROWS[name], name


def test_every_constant_is_in_the_table() -> None:
    constants = {name: value for name, value in vars(bounds).items() if name.startswith("MAX_")}
    shown = {number for numbers in ROWS.values() for number in numbers}
    assert set(constants.values()) <= shown


# -- what only an engine knows ---------------------------------------------------------------------


@pytest.mark.anyio
async def test_bounds_that_an_engine_knows() -> None:
    async with Engine(FakeModel(max_context=64), max_requests=3, max_prompt_chars=50) as engine:
        await engine.generate([1] * 63, max_tokens=1)
        await engine.generate("x" * 50, max_tokens=1, n=3, prompt_logprobs=128)
        for prompt, options, field in (
            ([1] * 64, {}, "prompt"),
            ("x" * 51, {}, "prompt"),
            ("x", {"n": 4}, "n"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await engine.generate(prompt, **options)
            assert caught.value.field == field
        with pytest.raises(InvalidRequest, match=r"at most 63 fit the context of 64 tokens \(max_"):
            await engine.generate([1] * 64)


@pytest.mark.parametrize("context", [0, 1])
def test_a_context_that_serves_nothing_is_refused(context: int) -> None:
    EngineConfig(max_context=2)
    with pytest.raises(ValueError, match="max_context"):
        EngineConfig(max_context=context)


def test_the_checks_at_the_bounds_keep_no_event_loop_waiting() -> None:
    """In lines of Python: a busy machine does not matter. Half a million take 15 ms."""
    folder = str(Path(bounds.__file__).parent)
    for value in ({"a": [0] * 65_535}, {"a": [0.5] * 65_535}, {"a": ["x"] * 65_535}):
        assert lines_run(lambda value=value: arguments(value), folder) < 500_000
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        attempt, most, _ = BOUNDS[f"{name}: how many"]
        assert lines_run(lambda: attempt(most), folder) < 20_000, name  # noqa: B023
