"""Tools through a whole engine, whose model draws at random among what fits."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel
from support import OpenEngine
from tool_transcripts import SYNTAXES, tokenizer_of

from asyncinfer import Engine, EngineConfig, InvalidRequest, ToolCall
from asyncinfer.engine import transcript
from asyncinfer.engine.chats import Chats
from asyncinfer.testing import FakeModel, Said, ScriptedModel
from asyncinfer.text import ChatTemplate
from asyncinfer.tools import ChatOptions, MessageParser

pytestmark = pytest.mark.asyncio
HI = [{"role": "user", "content": "hi"}]
_BODY = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"
_END = "{% if add_generation_prompt %}A:{% endif %}"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "code": {"type": "string", "minLength": 2, "maxLength": 4},
        "days": {"type": "integer"},
        "deep": {
            "type": "object",
            "properties": {
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}},
                "ok": {"type": "boolean"},
            },
            "required": ["ok"],
            "additionalProperties": False,
        },
        "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "name": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    },
    "required": ["unit", "code", "days", "deep", "name"],
    "additionalProperties": False,
}
TOOLS = [{"name": "f", "description": "Does it.", "parameters": SCHEMA}, {"name": "g"}]


def model_of(name: str) -> FakeModel:
    """A fake model with the template and the tokens of a family."""
    syntax = SYNTAXES[name]
    tokenizer = tokenizer_of(syntax)
    tools = "" if name == "json" else "{{ tools }}{# " + syntax.template + " #}"
    template = ChatTemplate(f"{_BODY}{tools}{_END}", shield=tokenizer.shield)
    return FakeModel(tokenizer=tokenizer, template=template, strict=False)


async def test_a_long_call_is_read_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each quote costs a few microseconds, for which the event loop would stand still."""
    fed, feed = [], MessageParser.feed

    def counted(self: MessageParser, text: str) -> Any:
        fed.append((len(text), turns))
        return feed(self, text)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(MessageParser, "feed", counted)
    monkeypatch.setattr(transcript, "READ", 512)
    turns, text = 0, '"\n' * 500
    async with Engine(ScriptedModel([Said(tool_calls=[("g", {"text": text})])])) as engine:
        other = asyncio.create_task(turn())
        done = await engine.generate(HI, tools=TOOLS, max_tokens=8_000)
        other.cancel()
    assert done.tool_calls[0].parsed == {"text": text}
    assert max(size for size, _ in fed) <= transcript.READ
    assert len({turn for _, turn in fed}) == len(fed) > 3, "other tasks had a turn"


@pytest.mark.parametrize("text", ["Yes.", ""])
async def test_tokens_of_reasoning_are_counted(text: str) -> None:
    """By whatever chunks they come. A token of this model is a byte, so a snowman is three."""
    said = Said(text, reasoning="A <b> \N{SNOWMAN}: </thin, I see.")
    want = len(f"\n{said.reasoning}\n".encode())
    many = Said(text, reasoning="x" * 50)
    model = ScriptedModel([said, said, said, many, "No.", said])
    async with Engine(model, buffer=8) as engine:
        done = await engine.generate(HI)
        assert (done.reasoning, done.usage.reasoning_tokens) == (said.reasoning, want)
        async with engine.stream(HI) as stream:
            async for _ in stream:
                pass
            assert stream.usage is not None
            assert stream.usage.reasoning_tokens == want
            assert (await stream).usage.reasoning_tokens == want
        # Text is held back for these, and so comes later than its token.
        held = await engine.generate(HI, stop=["I see no"])
        assert held.usage.reasoning_tokens == want
        coarse = await engine.generate(HI, stream_interval=7)
        # The end of it is parted from the token that ends the answer by its characters.
        assert abs(coarse.usage.reasoning_tokens - len(f"\n{many.reasoning}\n")) <= 1
        assert (await engine.generate(HI)).usage.reasoning_tokens == 0
        plain = await engine.generate("no chat", max_tokens=200)
        assert plain.usage.reasoning_tokens == 0


@pytest.mark.parametrize("name", SYNTAXES)
async def test_required_calls_fit_their_schema(name: str, open_engine: OpenEngine) -> None:
    whole: set[str] = set()
    async with open_engine(model_of(name)) as engine:
        for seed in range(6):
            choice = ("required", "f", "g")[seed % 3]
            if choice in whole:
                continue
            done = await engine.generate(
                HI, tools=TOOLS, tool_choice=choice, max_tokens=850, seed=seed
            )
            if done.finish_reason != "stop":
                continue
            whole.add(choice)
            assert not done.text.strip()
            assert done.tool_calls
            for call in done.tool_calls:
                assert call.name == choice or choice == "required"
                if call.name == "f":
                    jsonschema.validate(call.parsed, SCHEMA)
                else:
                    assert call.parsed is not None
    assert whole


@pytest.mark.parametrize("name", ["hermes", "qwen-xml", "mistral", "gemma"])
async def test_one_call_where_one_is_asked_for(name: str, open_engine: OpenEngine) -> None:
    async with open_engine(model_of(name)) as engine:
        for seed in range(4):
            done = await engine.generate(
                HI,
                tools=TOOLS[1:],
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=300,
                seed=seed,
            )
            assert len(done.tool_calls) <= 1


async def test_deltas_are_what_the_whole_answer_has(open_engine: OpenEngine) -> None:
    async with open_engine(model_of("hermes")) as engine:
        stream = engine.stream(HI, tools=TOOLS, tool_choice="f", max_tokens=400, seed=1, n=2)
        texts: dict[int, str] = {0: "", 1: ""}
        calls: dict[tuple[int, int], list[str]] = {}
        async for chunk in stream:
            texts[chunk.index] += chunk.text
            for delta in chunk.tool_calls:
                if delta.name is not None:
                    calls[chunk.index, delta.index] = [delta.id or "", delta.name, ""]
                calls[chunk.index, delta.index][2] += delta.arguments
        done = await stream
    for choice in done.choices:
        assert choice.text == texts[choice.index]
        for at, call in enumerate(choice.tool_calls):
            assert [call.id, call.name, call.arguments] == calls[choice.index, at]
    assert calls


async def test_none_bars_what_begins_a_call() -> None:
    loaded = model_of("hermes").load(EngineConfig())
    chats = Chats(loaded)
    reader = chats.reader(HI, "A:", ChatOptions.of(TOOLS, "none", True, None, False))
    assert reader is not None
    assert reader.grammar() is None
    tokens = loaded.tokenizer.added_tokens
    assert reader.barred_ids(loaded.tokenizer) == ((tokens["<tool_call>"],),)


async def test_a_call_of_auto_fits_its_schema(open_engine: OpenEngine) -> None:
    calls: list[ToolCall] = []
    async with open_engine(model_of("hermes")) as engine:
        for seed in range(6):
            done = await engine.generate(HI, tools=TOOLS, max_tokens=600, seed=seed)
            # The last one may be cut short.
            calls += done.tool_calls[:-1]
    for call in calls:
        jsonschema.validate(call.parsed, SCHEMA if call.name == "f" else {})
    assert calls


FACT: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", SYNTAXES)
async def test_an_answer_calls_or_fits_its_schema(name: str, open_engine: OpenEngine) -> None:
    called, told = 0, 0
    async with open_engine(model_of(name)) as engine:
        for seed in range(12):
            if called and told > 1:
                break
            done = await engine.generate(
                HI, tools=TOOLS, json_schema=FACT, max_tokens=1000, seed=seed
            )
            if done.finish_reason != "stop":
                continue
            if done.tool_calls:
                called += 1
                assert not done.text.strip()
                assert done.parsed is None
                for call in done.tool_calls:
                    jsonschema.validate(call.parsed, SCHEMA if call.name == "f" else {})
            else:
                told += 1
                jsonschema.validate(done.parsed, FACT)
        # A call that has to come is no JSON of the answer's own.
        done = await engine.generate(
            HI, tools=TOOLS, tool_choice="g", json_schema=FACT, max_tokens=300, seed=2
        )
        assert done.finish_reason == "length" or done.tool_calls[0].name == "g"
    assert told
    assert called or name == "json"


async def test_an_answer_calls_or_is_of_a_type(open_engine: OpenEngine) -> None:
    async with open_engine(model_of("hermes")) as engine:
        for seed in range(40):
            done = await engine.generate(
                HI, tools=TOOLS[1:], json_schema=Weather, max_tokens=400, seed=seed
            )
            if done.finish_reason == "stop" and not done.tool_calls:
                assert isinstance(done.parsed, Weather)
                return
    raise AssertionError("no answer but calls")


class Weather(BaseModel):
    """The weather somewhere."""

    days: int


async def test_tools_of_every_kind(open_engine: OpenEngine) -> None:
    def look(days: int, unit: str = "C") -> str:
        """Look at the weather.

        Args:
            days: how many days
                from today on.
            unit: of the temperature.
        """
        raise NotImplementedError

    async with open_engine(model_of("hermes")) as engine:
        shown = engine.tokenizer.render_chat(HI, tools=[look, Weather])
        assert "Look at the weather." in shown
        assert "how many days from today on." in shown
        assert "The weather somewhere." in shown
        done = await engine.generate(
            HI, tools=[look, Weather], tool_choice="Weather", max_tokens=300, seed=0
        )
        assert isinstance(done.tool_calls[0].parsed, Weather)
        again = [*HI, done.message, {"role": "tool", "content": "x", "tool_call_id": "1"}]
        assert engine.tokenizer.count(again, tools=[look]) > engine.tokenizer.count(HI)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "f"}, "tools='f': must be a list"),
        ({"tools": [3]}, "tools[0]=3: must be a function"),
        ({"tools": [{"name": "a b"}]}, "tools[0].name='a b': must be 1 to 128"),
        ({"tools": [{"name": "f"}] * 2}, "tools[1].name='f': is the name of another tool"),
        ({"tools": [{"name": "f", "parameters": {"type": "array"}}]}, "must be 'object'"),
        ({"tools": [{"name": "f"}], "tool_choice": "g"}, "tool_choice='g': must be one of"),
        (
            {"tools": [{"name": "none"}], "tool_choice": {"function": {"name": "none"}}},
            "tool_choice='none': must be the name of a tool, and none of auto, none, required",
        ),
        ({"tool_choice": "required"}, "needs tools="),
        ({"template_options": [1]}, "template_options=[1]: must map names to values"),
        ({"template_options": {"tools": []}}, "the request has an option for it"),
        ({"template_options": {"thinking": True}}, "the chat template reads no such option"),
        (
            {"tools": TOOLS, "regex": "a+"},
            "regex=<beside tools>: with tools it must be json_schema or json_object",
        ),
        (
            {"tools": TOOLS, "json_object": True, "constrain_after": "x"},
            "constrain_after='x': not with tools",
        ),
        (
            {"tools": TOOLS, "json_schema": {"type": "number", "uniqueItems": True}},
            "json_schema=",
        ),
        ({"continue_final_message": True}, "must be the assistant's"),
        ({"parallel_tool_calls": 1}, "must be True or False"),
    ],
)
async def test_bad_options(options: dict[str, Any], message: str, open_engine: OpenEngine) -> None:
    async with open_engine(model_of("hermes")) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.generate(HI, max_tokens=2, **options)
        assert message in str(caught.value)


async def test_a_text_takes_no_tools(open_engine: OpenEngine) -> None:
    async with open_engine(model_of("hermes")) as engine:
        with pytest.raises(InvalidRequest, match="must be chat messages"):
            await engine.generate("hi", tools=TOOLS)


async def test_template_options_and_continuing(open_engine: OpenEngine) -> None:
    async with open_engine(model_of("hermes")) as engine:
        render = engine.tokenizer.render_chat
        assert "calm" in render(HI, template_options={"mood": "calm"})
        begun = [*HI, {"role": "assistant", "content": "The answer is "}]
        assert render(begun, continue_final_message=True) == "hiThe answer is "
        ids = engine.tokenizer.encode_chat(begun, continue_final_message=True)
        assert engine.tokenizer.decode(ids) == "hiThe answer is "
        done = await engine.generate(begun, continue_final_message=True, max_tokens=4, seed=0)
        assert done.usage.prompt_tokens == len(ids)


async def test_a_call_that_was_cut_short_goes_back_to_a_template_of_names(
    open_engine: OpenEngine,
) -> None:
    """The conversation was a bad request from then on."""
    named = (
        "{{ tools }}{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v }};"
        "{% endfor %}){% endfor %}{{ m.content }}{% endfor %}"
    )
    tokenizer = tokenizer_of(SYNTAXES["qwen-xml"])
    model = FakeModel(tokenizer=tokenizer, template=ChatTemplate(named), strict=False)
    async with open_engine(model) as engine:
        for text, shown in (('{"days": 3}', "f(days=3;)"), ('{"days": ', "f()")):
            call = {"role": "assistant", "tool_calls": [ToolCall("1", "f", text).message]}
            assert shown in engine.tokenizer.render_chat([*HI, call, *HI], tools=TOOLS)
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            engine.tokenizer.render_chat([{"role": "user", "content": "\ud800"}], tools=TOOLS)


async def test_a_model_without_tools_is_told_of_them(open_engine: OpenEngine) -> None:
    async with open_engine(model_of("json")) as engine:
        shown = engine.tokenizer.render_chat(HI, tools=TOOLS)
        assert '"name": "f"' in shown
        assert shown.index('"name": "f"') < shown.index("hi")
        call = ToolCall("1", "f", '{"days": 3}').message
        told = [
            *HI,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"},
        ]
        text = engine.tokenizer.render_chat(told, tools=TOOLS)
        assert '{"name": "f", "arguments": {"days": 3}}' in text
        assert "Result of f:\nrain" in text
        # Ids that are none tell nothing.
        odd = [*HI, {"role": "assistant", "tool_calls": [{**call, "id": ["1"]}]}, told[-1]]
        odd.append({"role": "tool", "tool_call_id": {"1": 1}, "content": "sun"})
        text = engine.tokenizer.render_chat(odd, tools=TOOLS)
        assert "Result of the tool:\nrain" in text
        assert "Result of the tool:\nsun" in text


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen-xml"])
async def test_a_schema_that_is_wrong_is_named_by_its_tool(name: str) -> None:
    """Of thirty tools, one may say what no answer can be held to."""
    unique = {"type": "array", "uniqueItems": True}
    wrong: dict[str, Any] = {"type": "object", "properties": {"a": unique}}
    tools = [*TOOLS, {"name": "odd", "parameters": wrong}]
    async with Engine(model_of(name)) as engine:
        with pytest.raises(InvalidRequest, match=r"^tools/odd/properties/a=.*uniqueItems"):
            await engine.generate(HI, tools=tools, tool_choice="required")
        wrong["properties"]["a"] = {"const": 2**60 + 1}
        with pytest.raises(
            InvalidRequest, match=r"^tools/odd/properties/a/const=1152921504606846977"
        ):
            await engine.generate(HI, tools=tools, tool_choice="required")
        wrong["properties"]["a"] = {"type": "text"}
        with pytest.raises(InvalidRequest, match=r"^tools/odd/properties/a=.*Invalid type: text"):
            await engine.generate(HI, tools=tools)
        assert engine.stats().running == 0


def arguments(**properties: Any) -> dict[str, Any]:
    node = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "required": ["n"]}
    named = {
        "circle": {"$ref": "#/$defs/circle"},
        "either": {"anyOf": [{"$ref": "#/$defs/other"}]},
        "other": {"oneOf": [{"$ref": "#/$defs/either"}]},
        "node": node,
        "list": {"type": "array", "items": {"$ref": "#/$defs/list"}, "minItems": 1},
    }
    return {"type": "object", "$defs": named, "properties": properties}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (arguments(x={"$ref": "#/$defs/circle"}), "/$defs/circle"),
        (arguments(x={"$ref": "#/$defs/either"}), "/$defs/other/oneOf/0"),
        (arguments(x={"$ref": "#/$defs/node"}), "/$defs/node/properties/n"),
        (arguments(x={"$ref": "#/$defs/list"}), "/$defs/list/items"),
        (arguments(x={"$ref": "#"}) | {"required": ["x"]}, "/properties/x"),
    ],
)
@pytest.mark.parametrize("name", SYNTAXES)
async def test_a_schema_that_needs_itself_is_refused(
    name: str, schema: dict[str, Any], place: str
) -> None:
    """The answer failed in its middle, or went on for ever."""
    tools = [*TOOLS, {"name": "odd", "parameters": schema}]
    async with Engine(model_of(name)) as engine:
        with pytest.raises(InvalidRequest, match=r"^tools/odd/") as caught:
            await engine.generate(HI, tools=tools, tool_choice="required")
        if "calls in this model's syntax cannot be held to it" not in str(caught.value):
            assert caught.value.field == f"tools/odd{place}"
            assert str(caught.value).endswith("needs itself, so that no text fits it")
        assert engine.stats().running == 0


@pytest.mark.parametrize("name", ["qwen-xml", "glm", "gemma", "llama-python"])
async def test_an_argument_that_none_fits_is_named(name: str) -> None:
    """It may be left out, so by itself the schema is right: the error had a grammar's lines."""
    schema = arguments(low={"type": "integer", "minimum": 5, "maximum": 3})
    async with Engine(model_of(name)) as engine:
        with pytest.raises(InvalidRequest, match=r"^tools/odd=[^|]*property 'low'"):
            await engine.generate(
                HI, tools=[{"name": "odd", "parameters": schema}], tool_choice="odd"
            )


@pytest.mark.parametrize("name", ["json", "deepseek-v3.1"])
async def test_letters_stay_letters_in_a_prompt(name: str) -> None:
    """Where the template writes no JSON itself: models read their numbers badly."""
    tool = {"name": "f", "description": "天气", "parameters": {"type": "object"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"ö": "北京"}}}
    told = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    model = model_of(name)
    if name != "json":
        source = "{{ messages[1].tool_calls[0].function.arguments }}{{ tools }}{# "
        source += SYNTAXES[name].template + " #}"
        model.template = ChatTemplate(source)
    async with Engine(model) as engine:
        text = engine.tokenizer.render_chat(told, tools=[tool])
        assert '{"ö": "北京"}' in text
        assert "天气" in text


async def test_facts_of_the_model() -> None:
    async with Engine() as engine:
        model = engine.model
        assert model.max_context == engine.model.max_context > 0
        assert (model.architecture, model.has_chat_template) == ("LlamaForCausalLM", True)
        assert model.tool_format == "json"
        ids = engine.tokenizer.encode("import os")
        assert engine.tokenizer.decode(ids) == "import os"
        assert engine.tokenizer.count("import os") == len(ids)
        assert model.name == "embedded"
    async with Engine(model.name) as named:
        assert named.model == model
