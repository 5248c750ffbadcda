"""Chat templates: as transformers renders them, and nothing a template should not do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from asyncinfer.builtin import MODEL_PATH
from asyncinfer.errors import InvalidRequest, ModelLoadError
from asyncinfer.text import ChatTemplate, render_budget

CHATML = """{% for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.role == 'ipython' %}{% continue %}{% endif %}
    {%- generation %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}
{{- message['content'] + eos_token}}
{%- endif %}
{%- endfor %}"""

CHAT = [
    {"role": "system", "content": " Be brief. <é> "},
    {"role": "user", "content": "2 < 3 & 'x'?"},
    {"role": "ipython", "content": "skipped"},
    {"role": "assistant", "content": "☃"},
]
TOOLS = [{"name": "f", "parameters": {"é": ["<a>", 1.5, None, True]}}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("source", "chat", "options"),
    [
        (CHATML, CHAT, {}),
        (LLAMA3, CHAT, {}),
        (LLAMA3, CHAT, {"tools": TOOLS}),
        (LLAMA3, CHAT, {"custom_tools": TOOLS}),
        (MISTRAL, CHAT[1:2] + CHAT[3:], {}),
    ],
    ids=["chatml", "llama3", "llama3 tools", "llama3 option", "mistral"],
)
@pytest.mark.parametrize("prompted", [True, False])
def test_as_transformers(
    source: str, chat: list[dict[str, str]], options: dict[str, Any], prompted: bool
) -> None:
    theirs, _ = render_jinja_template(
        conversations=[chat],
        chat_template=source,
        add_generation_prompt=prompted,
        **{**TOKENS, **options},
    )
    ours = ChatTemplate(source, special_tokens=TOKENS).render(chat, prompted, **options)
    assert ours == theirs[0]
    assert len(ours) > 30


def test_the_shipped_model_has_a_template() -> None:
    template = ChatTemplate.from_folder(MODEL_PATH)
    assert template
    assert "add two numbers" in template.render([{"role": "user", "content": "add two numbers"}])


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    template = ChatTemplate(CHATML)
    assert template.render([{"role": "user", "content": parts}]) == template.render(HELLO)
    assert parts[0]["text"] == "hel"


def test_what_a_message_carries_beside_its_content() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].name }}:{{ messages[0].content }}")
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    # As in transformers, what is None is not there.
    assert template.render([message]) == "f:"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        ([], "messages"),
        (["hello"], r"messages\[0\]"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([*HELLO, {"role": 7, "content": "x"}], r"messages\[1\].role"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 7}], r"messages\[0\].content"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\].content\[0\].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\].text"),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\].extra"),
        ([{"role": "user", "content": "x", 3: 4}], r"messages\[0\]"),
    ],
)
def test_bad_messages_are_named(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}="):
        ChatTemplate(CHATML).render(messages)


def test_messages_without_end() -> None:
    loop: dict[str, Any] = {"role": "user", "content": "x"}
    loop["self"] = loop
    with pytest.raises(InvalidRequest, match="levels deep"):
        ChatTemplate(CHATML).render([loop])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages|attr('__class__') }}",
        "{{ messages['__class__'] }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__ }}",
        "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{% do messages.clear() %}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_reaching_for_the_interpreter(source: str) -> None:  # fault 43
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * [1] }}",
        "{{ 2 ** (10 ** 9) }}",
        "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ '%1000000000d' % 1 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(999) %}{% for j in range(999) %}{{ 'a' * 999 }}{% endfor %}{% endfor %}",
    ],
)
def test_growing_without_bound(source: str) -> None:  # fault 44
    with pytest.raises(InvalidRequest):
        ChatTemplate(source).render(HELLO)


DOUBLING = "{%% set n = namespace(x='abcd') %%}{%% for i in range(99) %%}%s{%% endfor %%}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
            "steps of work",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
            "{{ f(60) }}",
            "steps of work",
        ),
        (DOUBLING % "{% set n.x = n.x + n.x %}", r"'\+' is too large"),
        (DOUBLING % "{% set n.x = n.x ~ n.x %}", "'~' is too large"),
        (DOUBLING % "{% set n.x = [n.x, n.x]|join(n.x) %}", "join is too large"),
        (DOUBLING % "{% set n.x = n.x.join([n.x, n.x]) %}", "join is too large"),
        (DOUBLING % "{% set n.x = n.x.replace('a', n.x) %}", "replace is too large"),
        (DOUBLING % "{% set n.x = n.x|replace('a', n.x) %}", "replace is too large"),
        (DOUBLING % "{% set n.x = [n.x]|string %}", "writing a value is too large"),
        (DOUBLING % "{% set n.x = [n.x, n.x] %}" + "{{ n.x }}", "steps of work"),
        (DOUBLING % "{% set n.x = [n.x, n.x] %}" + "{{ n.x|tojson }}", "steps of work"),
        (DOUBLING % "{% set n.x = {0: n.x, 1: n.x} %}" + "{{ '%s' % n.x }}", "steps of work"),
        (DOUBLING % "{% set n.x = [n.x, n.x] %}" + "{{ '{}'.format(n.x) }}", "steps of work"),
        ("{{ 'a'.center(1000000000) }}", "center is too large"),
        (DOUBLING % "{% set n.x = [n.x, n.x] %}" + "{{ '{a}'.format(a=n.x) }}", "steps of work"),
        ("{{ [1]|tojson(indent=1000000000) }}", "tojson is too large"),
        ("{{ [1]|batch(1000000000, 0)|list }}", "batch is too large"),
        ("{{ [1]|slice(1000000000)|list }}", "slice is too large"),
        ("{{ lipsum(1000000) }}", "lipsum"),
        ("{{ 'a b'|wordwrap(1, wrapstring='x') }}", "wordwrap"),
        ("{{ '1'.zfill(1000000000) }}", "zfill is too large"),
        ("{{ 'a\tb'.expandtabs(1000000000) }}", "expandtabs is too large"),
        ("{{ 'a'.translate({97: 'b' * 9}) }}", "translate"),
        ("{{ 'a'|center(1000000000) }}", "center is too large"),
        ("{{ 'a'|indent(1000000000, true) }}", "indent is too large"),
        ("{{ '%1000000000d'|format(1) }}", "'%' is too large"),
        ("{{ '{:1000000000}'.format(1) }}", "format is too large"),
    ],
)
def test_what_takes_too_long_or_too_much(
    source: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fault 44
    monkeypatch.setattr(render_budget, "MAX_STEPS", 400_000)
    with pytest.raises(InvalidRequest, match=says):
        ChatTemplate(source).render(HELLO)


def test_one_rendering_does_not_pay_for_another() -> None:
    template = ChatTemplate(
        "x{% for i in range(1000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}"
    )
    for _ in range(2):
        assert template.render(HELLO) == "x"


def test_what_is_bounded_still_works() -> None:
    source = (
        "{% macro tag(x) %}<{{ x ~ 1 }}>{% endmacro %}{{ tag('a') }}"
        "{{ messages|join('-', attribute='role') }}{{ ['x', 2]|join(', ') }}"
        "{{ 'aXb'|replace('X', '-') }}{{ 'a.b'.replace('.', '!') }}{{ '-'.join(['p', 'q']) }}"
        "{{ 'c'.center(3, '*') }}{{ '%05d'|format(42) }}{{ 'a\nb'|indent(2) }}"
        "{% for x in [1, 2] recursive %}{{ loop.index ~ '/' ~ loop.length }} {% endfor %}"
        "{% for x in [] %}{% else %}none{% endfor %}"
    )
    expected = "<a1>userx, 2a-ba!bp-q*c*00042a\n  b1/2 2/2 none"
    assert ChatTemplate(source).render([{"role": "user", "content": "x"}]) == expected


def test_long_messages_pass() -> None:
    text = "word " * 400_000
    template = ChatTemplate("{% for m in messages %}{{ '<' + m.content + '>' ~ '\n' }}{% endfor %}")
    assert template.render([{"role": "user", "content": text}]) == f"<{text}>\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.name.first }}", "no attribute"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "does not compile"),
        ("{{ x|nofilter }}", "does not compile"),
    ],
)
def test_a_template_that_fails(source: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        ChatTemplate(source).render(HELLO)


def test_only_options_the_template_reads() -> None:
    template = ChatTemplate("{{ bos_token }}{{ enable_thinking }}{{ messages|length }}")
    assert template.render(HELLO, enable_thinking=False) == "False1"
    for name in ("thinking", "bos_token", "raise_exception", "range"):
        with pytest.raises(InvalidRequest, match=rf"^{name}=.*it reads: enable_thinking"):
            template.render(HELLO, **{name: "x"})
    with pytest.raises(InvalidRequest, match=r"^enable_thinking="):
        template.render(HELLO, enable_thinking=object())


def test_without_a_template() -> None:
    template = ChatTemplate(None)
    assert not template
    with pytest.raises(InvalidRequest, match="no chat template"):
        template.render(HELLO)


def test_where_a_template_is_found(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert not ChatTemplate.from_folder(tmp_path)
    config.write_text(json.dumps({"chat_template": "one{{ bos_token }}", "bos_token": "B"}))
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "oneB"
    named = [
        {"name": "default", "template": "two"},
        {"name": "tool_use", "template": "{{ tools[0].name }}"},
    ]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "two"
    assert ChatTemplate.from_folder(tmp_path).render(HELLO, tools=TOOLS) == "f"
    (tmp_path / "chat_template.jinja").write_text("three")
    assert ChatTemplate.from_folder(tmp_path).render(HELLO) == "three"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text(json.dumps({"chat_template": [1]}))
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_folder(tmp_path)
