"""Which family a model is of, by the texts that its chat template writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from asyncinfer.tools.described import Undescribed, described
from asyncinfer.tools.family import CallSyntax, Span, ToolFamily
from asyncinfer.tools.gemma_calls import GemmaCalls
from asyncinfer.tools.harmony import Harmony
from asyncinfer.tools.json_calls import JsonCalls
from asyncinfer.tools.named_calls import MistralCalls, NamedCalls
from asyncinfer.tools.python_calls import PythonCalls
from asyncinfer.tools.xml_calls import XmlCalls

__all__ = ["FALLBACK", "SYNTAXES", "family_of", "response_notes"]

_DEEPSEEK: Final = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>")

#: A name for people, the texts by which a template shows the syntax, and the syntax. The first
#: whose texts are all in the template is taken, so the more particular stand first.
SYNTAXES: Final[tuple[tuple[str, tuple[str, ...], CallSyntax], ...]] = (
    ("mistral", ("[TOOL_CALLS]", "[ARGS]"), MistralCalls()),
    ("mistral-list", ("[TOOL_CALLS]",), MistralCalls(named=False)),
    (
        "deepseek-v3",
        (_DEEPSEEK[0], "```json"),
        NamedCalls(
            *_DEEPSEEK,
            "<｜tool▁call▁end｜>",
            "\n",
            "<｜tool▁sep｜>",
            before="```json\n",
            after="\n```",
        ),
    ),
    (
        "deepseek-v3.1",
        (_DEEPSEEK[0],),
        NamedCalls(*_DEEPSEEK, "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    ),
    (
        "gemma",
        ("<|tool_call>", "<tool_call|>"),
        GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    (
        "function-gemma",
        ("<start_function_call>",),
        GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    (
        "qwen-xml",
        ("<function=", "<parameter="),
        XmlCalls(
            *("<tool_call>", "</tool_call>", "<function=", ">", "<parameter=", ">"),
            *("", "</parameter>", "</function>"),
        ),
    ),
    (
        "glm",
        ("<arg_key>", "<arg_value>"),
        XmlCalls(
            *("<tool_call>", "</tool_call>", "", "", "<arg_key>", "</arg_key>"),
            *("<arg_value>", "</arg_value>"),
            line=False,
        ),
    ),
    ("granite", ("<|tool_call|>",), JsonCalls(("<|tool_call|>",), listed=True)),
    ("hermes", ("<tool_call>",), JsonCalls(("<tool_call>",), "</tool_call>")),
    ("llama-python", ("[func_name1(",), PythonCalls()),
    (
        "llama-json",
        ("<|start_header_id|>", '"parameters"'),
        JsonCalls(key="parameters", separator="; ", tag="<|python_tag|>"),
    ),
)
#: The syntax for models whose template knows no tools.
FALLBACK: Final = JsonCalls(separator="\n")
_HARMONY: Final = ("<|channel|>", "<|message|>", "<|start|>")
#: By what a template or a vocabulary has.
_REASONING: Final = (
    ("<|channel>", Span("<|channel>thought\n", "<channel|>")),
    ("[THINK]", Span("[THINK]", "[/THINK]")),
    ("</think>", Span("<think>", "</think>")),
)


def family_of(
    template: str, reads_tools: bool, response: Mapping[str, Any] | None = None
) -> ToolFamily:
    """The family of a model with this chat template, which may be empty.

    Args:
        reads_tools: whether the template writes the tools of a request.
        response: how the checkpoint describes its answers (`response_template`), which comes first
            as far as it goes.
    """
    guessed = _told_by(template, reads_tools)
    if response is None:
        return guessed
    try:
        own = described(response)
    except Undescribed:
        return guessed
    reasoning = own.reasoning or guessed.reasoning
    if own.calls is None or not reads_tools:
        return replace(guessed, reasoning=reasoning)
    return replace(own, reasoning=reasoning)


def response_notes(response: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Why a checkpoint's description of its answers is not followed; empty where it is."""
    try:
        _ = None if response is None else described(response)
    except Undescribed as error:
        return (f"response_template.{error}; its chat template tells how answers are read",)
    return ()


def _told_by(template: str, reads_tools: bool) -> ToolFamily:
    if all(text in template for text in _HARMONY):
        return Harmony("harmony")
    reasoning = next((span for text, span in _REASONING if text in template), None)
    if reads_tools:
        for name, texts, syntax in SYNTAXES:
            if all(text in template for text in texts):
                return ToolFamily(name, syntax, reasoning)
    return ToolFamily("json", FALLBACK, reasoning)
