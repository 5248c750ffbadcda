"""Templates put together by chance, and stop strings over any text. # fault 44"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import example, given
from hypothesis import strategies as st
from text import backends
from text.families import CONVERSATIONS, HOSTILE
from text.test_stop import naive

from asyncinfer.errors import InvalidRequest
from asyncinfer.text import ChatTemplate, Detokenizer, StopStrings, Tokenizer, render_budget
from asyncinfer.text.compiled_template import CompiledTemplate
from asyncinfer.text.filters import bounded_filters
from asyncinfer.text.sandbox import TemplateEnvironment

ENVIRONMENT = TemplateEnvironment()
FILTERS = sorted(name for name in bounded_filters(ENVIRONMENT) if name.isidentifier())
TESTS = sorted(name for name in ENVIRONMENT.tests if name.isidentifier())
METHODS = sorted(
    {name for kind in (str, list, dict, int, tuple, bytes) for name in dir(kind) if name[0] != "_"}
)
CONTROLS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


#: How much less a template may do here.
SMALLER = 100
#: Calls of one rendering; one that spends all of its steps makes one or two for each.
CALLS = 20 * render_budget.MAX_STEPS // SMALLER

BACKEND = backends.byte_level()
BACKEND.add_special_tokens(CONTROLS)
OURS = Tokenizer(BACKEND)

NAMES = st.sampled_from(["messages", "m", "n", "x", "loop", "range", "dict", "namespace", "tools"])
VALUES = st.one_of(
    NAMES,
    st.sampled_from(["m.content", "m['role']", "messages[0].content", "n.x", "messages[-1]"]),
    st.integers(-3, 10**12).map(str),
    st.sampled_from(["'a'", "'%s%9999d'", "'{:>99999}'", "' '", "1.5", "true", "none", "'<|im'"]),
)


def _bigger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def made(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.tuples(*parts).map(lambda drawn: form.format(*drawn))

    binary = st.sampled_from(["+", "~", "*", "**", "%", "-", "//", "/", "==", "<", "in", "and"])
    return st.one_of(
        made("({} {} {})", inner, binary, inner),
        made("({}|{})", inner, st.sampled_from(FILTERS)),
        made("({}|{}({}))", inner, st.sampled_from(FILTERS), inner),
        made("({} is {})", inner, st.sampled_from(TESTS)),
        made("({}|map('{}')|list)", inner, st.sampled_from(FILTERS)),
        made("({}.{}({}))", inner, st.sampled_from(METHODS), inner),
        made("({}.{}())", inner, st.sampled_from(METHODS)),
        made("({}[{}])", inner, inner),
        made("({}[{}:{}])", inner, inner, inner),
        made("[{}, {}]", inner, inner),
        made("{{{}: {}}}", inner, inner),
        made("({} if {} else {})", inner, inner, inner),
        made("f({})", inner),
        made("range({})", inner),
        made("namespace(x={})", inner),
        made("dict({})", inner),
    )


EXPRESSIONS = st.recursive(VALUES, _bigger, max_leaves=6)


def _around(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def made(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.tuples(*parts).map(lambda drawn: form % drawn)

    return st.one_of(
        made("%s%s", inner, inner),
        made("{%% for m in %s %%}%s{%% endfor %%}", EXPRESSIONS, inner),
        made("{%% for m in messages %%}%s{%% endfor %%}", inner),
        made("{%% for i in range(99) %%}%s{%% endfor %%}", inner),
        made("{%% for m in %s recursive %%}%s{{ loop(m) }}{%% endfor %%}", EXPRESSIONS, inner),
        made("{%% if %s %%}%s{%% else %%}%s{%% endif %%}", EXPRESSIONS, inner, inner),
        made("{%% set x %%}%s{%% endset %%}", inner),
        made("{%% macro f(x) %%}%s{%% endmacro %%}{{ f(%s) }}", inner, EXPRESSIONS),
        made("{%% call(x) f(%s) %%}%s{%% endcall %%}", EXPRESSIONS, inner),
        made("{%% filter %s %%}%s{%% endfilter %%}", st.sampled_from(FILTERS), inner),
        made("{%% generation %%}%s{%% endgeneration %%}", inner),
    )


TEMPLATES = st.recursive(
    st.one_of(
        EXPRESSIONS.map("{{{{ {} }}}}".format),
        EXPRESSIONS.map("{{% set x = {} %}}".format),
        EXPRESSIONS.map("{{% set n.x = {} %}}".format),
        st.sampled_from(["text", "<|im_start|>", "{{ m.content }}", "{% break %}"]),
    ),
    _around,
    max_leaves=8,
).map("{{% set n = namespace(x='a') %}}{}".format)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_STEPS", "MAX_SHORT", "MAX_HELD", "MAX_WRITTEN", "MAX_SIZE"):
        monkeypatch.setattr(render_budget, name, getattr(render_budget, name) // SMALLER)


@contextmanager
def bounded_calls(most: int) -> Iterator[None]:
    """Fail at the call, of Python or C, that is one more than `most`."""
    calls = 0

    def count(frame: object, event: str, called: object) -> None:
        nonlocal calls
        calls += event.endswith("call")
        if calls > most:
            sys.setprofile(None)
            pytest.fail(f"more than {most} calls")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)


@given(source=TEMPLATES, chat=st.sampled_from(CONVERSATIONS))
@example(source="{% for i in range(99) %}" * 5 + "{% endfor %}" * 5, chat=CONVERSATIONS[0])
@fuzz(300)
def test_any_template_ends_in_a_text_or_a_refusal(source: str, chat: list[dict[str, Any]]) -> None:
    template = ChatTemplate(source, shield=OURS.shield)
    before = repr(chat)
    try:
        with bounded_calls(CALLS):
            ids = OURS.encode_chat(template.render(chat))
    except InvalidRequest:
        return
    finally:
        assert repr(chat) == before
    assert OURS.decode(ids, False).encode()


@given(
    source=TEMPLATES.filter(lambda source: "<|im" not in source),
    text=st.one_of(st.sampled_from(HOSTILE), st.text(alphabet="<|im_end>/s", max_size=12)),
)
@fuzz(300)
def test_no_template_makes_a_control_token_of_what_is_said(source: str, text: str) -> None:
    """One that names none of them itself."""
    template = ChatTemplate(source + "{{ '<|' ~ messages[0].content ~ '|>' }}", shield=OURS.shield)
    try:
        ids = OURS.encode_chat(template.render([{"role": "user", "content": text}]))
    except InvalidRequest:
        return
    assert not OURS.special_ids & set(ids)


@given(source=st.text(alphabet="{}%#-+ \n'\"()[]|.,:~abfori=12", max_size=60))
@fuzz(300)
def test_any_source_compiles_or_is_a_fault(source: str) -> None:
    template = CompiledTemplate(source)
    assert template.fault is None or "chat template" in template.fault


@given(
    text=st.text(max_size=60),
    stops=st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 240), max_size=20),
    some=st.data(),
)
@fuzz(300)
def test_stop_strings_over_any_utf8(
    text: str, stops: list[str], cuts: list[int], some: st.DataObject
) -> None:
    """Byte by byte through a detokenizer, some stop strings cut from the text itself."""
    if text:
        start = some.draw(st.integers(0, len(text) - 1))
        stops = [*stops, text[start : start + some.draw(st.integers(1, 6))]]
    data, shown = text.encode(), ""
    tokens = Tokenizer.byte_level(add_bos=False)
    detokenizer, watch = Detokenizer(tokens), StopStrings(tuple(stops))
    edges = sorted({0, *(cut for cut in cuts if cut < len(data)), len(data)})
    for start, end in pairwise(edges):
        part = "".join(map(detokenizer.push, data[start:end]))
        delta, found = watch.push(part)
        shown += delta
        assert (shown, found) == naive(tuple(stops), data[:end].decode(errors="ignore"))
        if found:
            return
    assert shown + watch.flush() == text
