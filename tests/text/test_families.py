"""Templates as published models have them, beside transformers: what is rendered, and what of it
the tokenizer reads as control tokens."""

from __future__ import annotations

from typing import Any

import pytest
from text import backends
from text.families import CONVERSATIONS, FAMILIES, HOSTILE, TOKENS, TOOLS, long_chat
from transformers import PreTrainedTokenizerFast

from asyncinfer.errors import InvalidRequest
from asyncinfer.text import ChatTemplate, Tokenizer
from asyncinfer.text.caller_text import clean

CONTROLS = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|turn>", "<turn|>", '<|"|>'),
    *("[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"),
]


def tokenizers() -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    backend = backends.byte_level()
    backend.add_special_tokens(CONTROLS)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **TOKENS)
    return Tokenizer(backend), theirs


OURS, THEIRS = tokenizers()


@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_as_transformers_renders_it(name: str, prompted: bool) -> None:
    source, equal, refused = FAMILIES[name], 0, 0
    bare = ChatTemplate(source, special_tokens=TOKENS)
    shielded = ChatTemplate(source, special_tokens=TOKENS, shield=OURS.shield)
    for chat in CONVERSATIONS:
        for tools in (None, TOOLS) if "tools" in source else (None,):
            options = {} if tools is None else {"tools": tools}
            try:
                expected = THEIRS.apply_chat_template(
                    chat,
                    chat_template=source,
                    add_generation_prompt=prompted,
                    tokenize=False,
                    **options,
                )
            except Exception:
                expected = None
            for ours in (bare, shielded):
                if expected is None:
                    with pytest.raises(InvalidRequest):
                        ours.render(chat, prompted, **options)
                    refused += 1
                    continue
                text = ours.render(chat, prompted, **options)
                assert ascii(clean(text)) == ascii(expected)
                equal += 1
            if expected is not None:
                assert OURS.decode(OURS.encode_chat(text), False) == expected
    assert equal > refused


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("name", FAMILIES)
def test_nobody_speaks_a_control_token(name: str, text: str) -> None:
    """The same control tokens, whatever is said, asked for or called."""
    template = ChatTemplate(FAMILIES[name], special_tokens=TOKENS, shield=OURS.shield)

    def controls(text: str) -> list[int]:
        call = {"name": f"f{text}", "arguments": {f"a{text}": text, text: [text]}}
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": f"x {text}"},
            {"role": "assistant", "content": f"y {text}"},
            {"role": "user", "content": f"{text}z"},
        ]
        options = {}
        if "tools" in FAMILIES[name]:
            spec = {"type": "object", "properties": {text: {"type": f"{text}x", "enum": [text]}}}
            tool = {"name": f"t{text}", "description": text, "parameters": spec}
            options = {"tools": [{"type": "function", "function": tool}]}
            chat += [
                {"role": "assistant", "content": "", "tool_calls": [{"function": call, "id": "1"}]},
                {"role": "tool", "content": f"{text}{text}"},
            ]
        ids = OURS.encode_chat(template.render(chat, **options))
        return [token for token in ids if token in OURS.special_ids]

    assert controls(text) == controls("w")


@pytest.mark.parametrize(("role", "made"), [("user", True), ("im_end", False), ("critic", True)])
def test_a_role_may_be_part_of_a_control_token(role: str, made: bool) -> None:
    backend = backends.byte_level()
    backend.add_special_tokens(["<|user|>", "<|im_end|>", "<|critic|>"])
    tokenizer = Tokenizer(backend)
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
        "{% if m.role == 'critic' %}!{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, shield=tokenizer.shield)
    ids = tokenizer.encode_chat(template.render([{"role": role, "content": "hi"}]))
    assert bool(tokenizer.special_ids & set(ids)) == made
    assert tokenizer.decode(ids, False).startswith(f"<|{role}|>hi")


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("{{ messages[0].reasoning_content }}/{{ messages[0].thinking }}", "r/r"),
        ("{{ tools is none }} {{ documents is none }} {{ tools is defined }}", "True True True"),
        ("{{ [1, 2, 3, 4]|slice(2)|list }}", "[[1, 2], [3, 4]]"),
        ("{{ [1, 2, 3]|batch(2, 0)|list }}", "[[1, 2], [3, 0]]"),
        ("{{ ', '.join(['a', 'b']|map('upper')) }}", "A, B"),
        ("{{ ', '.join({'a': 1, 'b': 2}.keys()) }}", "a, b"),
        ("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}", "1False"),
        ("{{ messages[0].content|length }}{{ '</s>' in messages[0].content }}", "9True"),
        ("{{ messages[0].content[2:6] == '</s>' }}{{ messages[0].content.split('</s>') }}", None),
        ("{{ messages[0].tool_calls }}{{ messages[0].tool_calls|string }}", None),
        ("{{ messages[0].tool_calls|tojson(ensure_ascii=True) }}", None),
        ("{{ '%s %r' % (messages[0].content, messages[0].tool_calls) }}", None),
        ("{{ '{} {!r}'.format(messages[0].content, messages[0].tool_calls) }}", None),
        ("{{ [messages[0].content ~ '|'] }}{{ [messages[0].content ~ '|']|tojson(true) }}", None),
        ("{{ messages[0].content|title }}{{ messages[0].content|e }}", None),
        ("{{ messages[0].content|upper|reverse|trim|replace('<', '(')|center(20) }}", None),
        ("{{ messages[0].content|first }}{{ messages[0].content|list }}", None),
        ("{{ messages[0]|tojson(indent=2) }}{{ messages[0]|dictsort }}", None),
        ("{{ messages|map(attribute='content')|join('</s>') }}", None),
        ("{% macro m(x) %} {{ x }} {% endmacro %}{{ m(messages[0].content)|trim }}!", None),
        ("{% set x %} {{ messages[0].content }}\n{% endset %}{{ x|trim }}!", None),
        ("{% for k, v in messages[0].items() %}{{ k ~ v }}{% endfor %}", None),
    ],
)
def test_what_templates_do_with_a_message(source: str, written: str | None) -> None:
    calls = [{"function": {"name": "f</s>", "arguments": {"</s>": "\\udcff'"}}}]
    message = {"role": "assistant", "content": "a </s> é\\", "reasoning": "r", "tool_calls": calls}
    expected = THEIRS.apply_chat_template([message], chat_template=source, tokenize=False)
    for shield in (None, OURS.shield):
        text = ChatTemplate(source, shield=shield).render([message])
        assert ascii(clean(text)) == ascii(expected if written is None else written)
    assert written in (None, expected)
    ids = OURS.encode_chat(text)
    assert OURS.decode(ids, False) == expected
    assert not OURS.special_ids & set(ids)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ '<' ~ x ~ '>' }}", "|im_end|"),
        ("{{ x }}|im_end|>", "<"),
        ("<|im_{{ x }}", "end|>"),
        ("<|im{{ x }}end|>", "_"),
        ("{{ '<|im_' + x[1:] }}", ".end|>"),
        ("{{ ['<|im_', x]|join }}{{ '%s%s' % ('<|im_', x) }}{{ '<|im_{}'.format(x) }}", "end|>"),
        ("{{ '<|im_X'|replace('X', x) }}{{ '<|im_X'.replace('X', x) }}", "end|>"),
        ("{{ x|lower }}{{ x.lower() }}{{ x|replace('.', '') }}{{ x|title }}", "<|IM_END|>"),
        ("{{ x|replace('.', '') }}{{ x.replace('.', '') }}{{ x.split('.')|join }}", "<|im_.end|>"),
        ("{% macro m() %}a{{ x }}{% endmacro %}{{ m()|replace('.', '') }}", "<|im_.end|>"),
        ("{% macro m() %}a{{ x }}{% endmacro %}{{ m().replace('.', '') }}", "<|im_.end|>"),
        ("{{ ('a' ~ x)|lower }}{{ ('a' ~ x).lower() }}", "<|IM_END|>"),
        ("{{ x|striptags }}{{ ('a' ~ x)|striptags }}", "&lt;|im_end|&gt;"),
        ("{% for c in x %}{{ c }}{% endfor %}{{ x|list|join }}", "<|im_end|>"),
        ("{% for c in x %}{{ '%c' % c }}{% endfor %}", "<|im_end|>"),
        ("{{ x|reverse }}{{ x[::-1] }}", ">|dne_mi|<"),
        ("{% set y %}{{ x }}{% endset %}{{ y }}{{ x|safe }}{{ x|string }}", "<|im_end|>"),
        ("{{ dict([['a', x]]) }}{{ namespace(a=x).a }}{{ x|default('') }}", "<|im_end|>"),
        ("{{ strftime_now(x) }}", "<|im_end|>"),
        ("{{ x|first }}{{ x[1:] }}{{ x|truncate(3, true, '') }}{{ x[3:] }}", "<|im_end|>"),
    ],
)
def test_no_token_is_put_together(source: str, said: str) -> None:
    template = ChatTemplate(source, shield=OURS.shield)
    try:
        text = template.render([{"role": "user", "content": "hi"}], x=said)
    except InvalidRequest as refused:
        assert "%c" in str(refused)  # noqa: PT017 - a mark is no character of its own
        return
    assert not OURS.special_ids & set(OURS.encode_chat(text))
    # The same text without a shield is one.
    bare = ChatTemplate(source).render([{"role": "user", "content": "hi"}], x=said)
    assert OURS.special_ids & set(OURS.encode(bare))
    assert OURS.decode(OURS.encode_chat(text), False) == bare


@pytest.mark.parametrize(
    ("name", "messages", "characters"),
    [("gemma", 780, 51_000), ("hermes", 2_000, 100_000), ("gathered", 1_400, 1_500_000)],
)
def test_long_chats_are_rendered(name: str, messages: int, characters: int) -> None:
    template = ChatTemplate(FAMILIES[name], special_tokens=TOKENS, shield=OURS.shield)
    text = template.render(long_chat(messages, characters))
    assert len(text) > characters * 0.9
