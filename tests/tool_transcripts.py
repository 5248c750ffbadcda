"""Answers as the models of each family write them, made of one list of messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import tokenizers

from asyncinfer.text import Detokenizer, Tokenizer
from asyncinfer.text.bytelevel import byte_level_backend
from asyncinfer.tools import Delimiters, MessageReader, Tool, ToolFamily, family_of, message_text
from asyncinfer.tools.tool import check_tools

_OBJECT = {"type": "object"}
TOOLS: tuple[Tool, ...] = check_tools(
    [
        {"name": "now", "parameters": {**_OBJECT, "properties": {}}},
        {
            "name": "get_weather",
            "description": "The weather.",
            "parameters": {
                **_OBJECT,
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
        {
            "name": "save",
            "parameters": {
                **_OBJECT,
                "properties": {
                    "text": {"type": "string"},
                    "ok": {"type": "boolean"},
                    "share": {"type": "number"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "deep": {"type": "object"},
                    "nothing": {"type": "null"},
                },
            },
        },
    ]
)


@dataclass(frozen=True)
class Said:
    """One answer: calls are pairs of a name and arguments."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()


NOW = ("now", {})
PARIS = ("get_weather", {"city": "Paris", "days": 3})
_TEXTS = (
    "plain",
    'with "quotes" and \\backslash\\',
    "two\nlines",
    "héllo wörld ☃ 🎉",
    "braces } ] { [ and , : ; ( )",
    "almost <tool_cal and </paramete and [TOOL",
    "it's 100 % \t tab",
    '{"name": "now", "arguments": {}}',
    "1",
    "true",
    "null",
    "a" * 60,
    "-",
    "[1, 2]",
    "https://example.com/?a=b&c=d",
    "  spaces inside  only",
    "<b>bold</b> &amp;",
    "None",
    "0.50",
    "日本語のテキスト",
)
MESSAGES: tuple[Said, ...] = (
    Said("Hello there."),
    Said("Two\n\nparagraphs, and a < sign."),
    Said("I have thought.", "Let me see: 1 < 2."),
    Said("", "Only thought.", (NOW,)),
    Said("", "", (NOW,)),
    Said("", "", (PARIS,)),
    Said("Let me look.", "", (PARIS,)),
    Said("Let me look.", "I need it.", (PARIS,)),
    Said("", "", (PARIS, NOW)),
    Said("", "", (NOW, NOW, NOW)),
    Said("Both:", "Hm.\n\nYes.", (PARIS, ("get_weather", {"city": "Rome"}))),
    Said("", "", (("save", {"ok": True, "share": -0.5, "nothing": None}),)),
    Said("", "", (("save", {"tags": ["a", "b c", 'd"e'], "deep": {"a": {"b": [1, 2]}}}),)),
    Said("", "", (("save", {"tags": [], "deep": {}}),)),
    Said("", "", (("save", {"share": 1e-7, "ok": False}), PARIS, ("save", {"text": "x"}))),
    *(Said("", "", (("save", {"text": text, "ok": True}),)) for text in _TEXTS),
    *(Said("Then:", "Why?", (("get_weather", {"city": text}), NOW)) for text in _TEXTS[:4]),
)

_DEEPSEEK = (
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> "
    "<｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>"
)


@dataclass(frozen=True)
class Syntax:
    """How a family writes calls, and what tells it in a template."""

    template: str
    write: Callable[[tuple[tuple[str, dict[str, Any]], ...]], str]
    special: str = ""
    added: str = ""
    #: Whether content may come before calls.
    beside: bool = True
    reasons: bool = True
    tools: tuple[Tool, ...] = field(default=TOOLS)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _each(form: Callable[[str, dict[str, Any]], str], between: str = "") -> Any:
    return lambda calls: between.join(form(name, args) for name, args in calls)


def _hermes(name: str, args: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {_json(args)}}}\n</tool_call>'


def _bare(key: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, args: f'{{"name": "{name}", "{key}": {_json(args)}}}'


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _qwen(name: str, args: dict[str, Any]) -> str:
    inner = "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in args.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _glm(name: str, args: dict[str, Any]) -> str:
    inner = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in args.items()
    )
    return f"<tool_call>{name}\n{inner}</tool_call>"


def _gemma_value(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            inner = (f"{k}:{_gemma_value(v, quote)}" for k, v in value.items())
            return "{" + ",".join(inner) + "}"
        case list():
            return "[" + ",".join(_gemma_value(v, quote) for v in value) + "]"
    return _json(value)


def _gemma(begin: str, end: str, quote: str) -> Any:
    return _each(lambda name, args: f"{begin}call:{name}{_gemma_value(args, quote)}{end}")


def _deepseek(inner: Callable[[str, dict[str, Any]], str]) -> Any:
    def write(calls: tuple[tuple[str, dict[str, Any]], ...]) -> str:
        each = (f"<｜tool▁call▁begin｜>{inner(*call)}<｜tool▁call▁end｜>" for call in calls)
        return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"

    return write


def _python(name: str, args: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})"


def _listed(begin: str) -> Any:
    return lambda calls: f"{begin}[{', '.join(_bare('arguments')(*call) for call in calls)}]"


_THINK = "<think></think>"
SYNTAXES: dict[str, Syntax] = {
    "hermes": Syntax(
        f"<tool_call>{_THINK}",
        _each(_hermes, "\n"),
        "",
        "<tool_call> </tool_call> <think> </think>",
    ),
    "hermes-spelled": Syntax(f"<tool_call>{_THINK}", _each(_hermes, "\n")),
    "qwen-xml": Syntax(
        f"<function=<parameter={_THINK}", _each(_qwen, "\n"), "", "<tool_call> </tool_call>"
    ),
    "glm": Syntax(
        f"<arg_key><arg_value>{_THINK}",
        _each(_glm),
        "",
        "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <think> </think>",
    ),
    "llama-json": Syntax(
        '<|start_header_id|>"parameters"',
        _each(_bare("parameters"), "; "),
        "<|python_tag|>",
        beside=False,
        reasons=False,
    ),
    "llama-python": Syntax(
        "[func_name1(",
        lambda calls: f"[{_each(_python, ', ')(calls)}]" if calls else "",
        beside=False,
        reasons=False,
    ),
    "mistral": Syntax(
        "[TOOL_CALLS][ARGS][THINK]",
        _each(lambda name, args: f"[TOOL_CALLS]{name}[ARGS]{_json(args)}"),
        "[TOOL_CALLS] [ARGS] [THINK] [/THINK]",
    ),
    "mistral-list": Syntax("[TOOL_CALLS]", _listed("[TOOL_CALLS]"), "[TOOL_CALLS]", reasons=False),
    "deepseek-v3": Syntax(
        f"<｜tool▁calls▁begin｜>```json{_THINK}",
        _deepseek(lambda n, a: f"function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```"),
        _DEEPSEEK,
    ),
    "deepseek-v3.1": Syntax(
        f"<｜tool▁calls▁begin｜>{_THINK}",
        _deepseek(lambda name, args: f"{name}<｜tool▁sep｜>{_json(args)}"),
        _DEEPSEEK,
    ),
    "gemma": Syntax(
        "<|tool_call><tool_call|><|channel>",
        _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        '<|tool_call> <tool_call|> <|"|> <|channel> <channel|>',
    ),
    "function-gemma": Syntax(
        "<start_function_call>",
        _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
        "<start_function_call> <end_function_call> <escape>",
        reasons=False,
    ),
    "granite": Syntax("<|tool_call|>", _listed("<|tool_call|>"), "<|tool_call|>", reasons=False),
    "json": Syntax("", _each(_bare("arguments"), "\n"), beside=False, reasons=False),
}


def tokenizer_of(syntax: Syntax) -> Tokenizer:
    """Byte by byte, but for the tokens of the syntax."""
    backend = byte_level_backend(add_bos=False)
    for words, special in ((syntax.special, True), (syntax.added, False)):
        added = [
            tokenizers.AddedToken(word, special=special, normalized=False) for word in words.split()
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return Tokenizer(backend, bos_id=256, eos_ids=[257])


def family_named(name: str) -> ToolFamily:
    """As its template tells it."""
    return family_of(SYNTAXES[name].template, reads_tools=name != "json")


def written(name: str, said: Said) -> str | None:
    """An answer in the family's syntax; None where it has none for it."""
    syntax, family = SYNTAXES[name], family_named(name)
    if (said.reasoning and not syntax.reasons) or (
        said.content and said.calls and not syntax.beside
    ):
        return None
    text = said.content
    if said.reasoning and family.reasoning is not None:
        span = family.reasoning
        text = f"{span.open}\n{said.reasoning}\n{span.close}\n\n{text}"
    if not said.calls:
        return text
    gap = "\n" if said.content else ""
    return f"{text}{gap}{syntax.write(said.calls)}"


class Reading:
    """Parses texts of one family."""

    def __init__(
        self,
        family: ToolFamily,
        tokenizer: Tokenizer,
        tools: tuple[Tool, ...] = TOOLS,
        **options: Any,
    ) -> None:
        delimiters = Delimiters(tokenizer, family.texts())
        self.reader = MessageReader(family, delimiters, tools, **options)
        self._tokenizer = tokenizer

    def marked(self, text: str) -> str:
        """The text as the engine hands it to the parser."""
        detok = message_text(self.reader, Detokenizer(self._tokenizer))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return "".join(map(detok.push, ids)) + detok.flush()

    def parse(self, *parts: str) -> tuple[str, str, list[tuple[str, str, str]]]:
        """Content, reasoning and calls of what the parser finds in these parts."""
        numbers = count()
        parser = self.reader.parser(lambda: f"call{next(numbers)}")
        deltas = [*map(parser.feed, parts), parser.end()]
        calls: list[tuple[str, str, str]] = []
        for each in (call for delta in deltas for call in delta.tool_calls):
            if each.name is not None:
                assert each.index == len(calls)
                calls.append((each.id or "", each.name, ""))
            call_id, name, arguments = calls[each.index]
            assert each.index == len(calls) - 1
            calls[-1] = (call_id, name, arguments + each.arguments)
        content = "".join(delta.content for delta in deltas)
        return content, "".join(delta.reasoning for delta in deltas), calls
