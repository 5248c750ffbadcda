"""Formats are compiled once, within bounds, and wrong ones are named."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers

from asyncinfer import EngineConfig, InvalidRequest, RequestFailed, SamplingParams
from asyncinfer.grammar import (
    GrammarCompiler,
    Matcher,
    allowed_ids,
    check_ends,
    fill_masks,
    mask_words,
    texts,
)
from asyncinfer.grammar.tokens import spelled_chars
from asyncinfer.structured_output import AnswerFormat
from asyncinfer.testing import FakeModel
from asyncinfer.text import Tokenizer

VOCAB = 258


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.byte_level(add_bos=False)


@pytest.fixture
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB)


def test_a_tokenizer_that_the_library_cannot_read_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was a bare `ValueError`, and took as long for each request."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1, "?": 2}, "?"))
    compiler = GrammarCompiler(Tokenizer(backend, eos_ids=[1]), 3)
    made: list[object] = []
    to_json = Tokenizer.to_json
    monkeypatch.setattr(Tokenizer, "to_json", lambda one: made.append(one) or to_json(one))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no grammar can be made") as refused:
            matcher(compiler, "regex", "a+")
        assert refused.value.field == "constraint"
    assert len(made) == 1


def matcher(compiler: GrammarCompiler, kind: str, text: str, after: str = "") -> Matcher:
    (made,) = compiler.matchers(AnswerFormat(kind, text, after), 1, most_forced=0)
    return made


def fits(compiler: GrammarCompiler, kind: str, text: str, answer: bytes, after: str = "") -> bool:
    """Whether the masks allow a whole answer, and its end."""
    made = matcher(compiler, kind, text, after)
    for token in answer:
        if made.complete or token not in allowed_ids(fill_masks([made])[0], VOCAB):
            return False
        made.accept(token, 0)
    return made.complete or 257 in allowed_ids(fill_masks([made])[0], VOCAB)


@pytest.mark.parametrize(
    "expression",
    [r"a+b{2,3}", r"(ab|cd)*e?", r"[^x]{1,3}", r"\d{2}-\d{2}", r"(a|aa)+", r"é+", r".?"],
)
def test_a_regex_allows_what_re_matches(compiler: GrammarCompiler, expression: str) -> None:
    rng = np.random.default_rng(5)
    texts = [
        "",
        *("".join(rng.choice(list("abcdex12-é"), k)) for k in range(1, 7) for _ in "x" * 25),
    ]
    for text in texts:
        fit = re.fullmatch(expression, text) is not None
        assert fits(compiler, "regex", expression, text.encode()) == fit, text


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "(" start ")" | "x"', ["x", "(x)", "((x))"], ["(x", "x)", "()", ""]),
        ('root ::= "(" root ")" | "x"', ["x", "(x)", "((x))"], ["(x", "x)", "()", ""]),
        ('?start: "a" | "::="\n', ["a", "::="], ["b"]),
        ('root ::= start-of\nstart-of ::= "a"', ["a"], ["b"]),
        ('root ::= term ("+" term)*\nterm ::= [0-9]+', ["1", "1+22"], ["+", "1+", "a"]),
        (r'root ::= "\u00e9ab"', ["éab"], ["\ue9ab", "é"]),
        (r'root ::= "\\u0041" [\u0022\u0041-\u0043]', [r"\u0041B", r'\u0041"'], ["AB"]),
        (r'root ::= "\U0001F600" [\U0001F600-\U0010FFFFa]', ["😀😎", "😀a"], ["😀b", "1F600a"]),
    ],
)
def test_lark_and_gbnf_are_told_apart(
    compiler: GrammarCompiler, grammar: str, good: list[str], bad: list[str]
) -> None:
    assert all(fits(compiler, "grammar", grammar, text.encode()) for text in good)
    assert not any(fits(compiler, "grammar", grammar, text.encode()) for text in bad)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        # Names that the library takes for others.
        ('root ::= start "b"\nstart ::= "a"', ["ab"], ["a", "b"]),
        ('root ::= a-b a_b aB\na-b ::= "1"\na_b ::= "2"\naB ::= "3"', ["123"], ["111", "321"]),
        ('root ::= 1a | -b\n1a ::= "x"\n-b ::= "y"', ["x", "y"], ["a", "b"]),
        # Operators of the library's expressions are characters.
        ("root ::= [a&&b]+", ["a&b", "&&"], ["c", ""]),
        ("root ::= [a~~b] [+--]", ["a+", "~,", "b-"], ["c+", "a."]),
        ("root ::= [[^] [^^\\\\]", ["[a", "^["], ["a^", "[^", "[\\"]),
        (r'root ::= "\[#\]\"." [#\]"/]  # "c', ['[#]".#', '[#]".]', '[#]"./'], ['[#]".c']),
        ("root ::= .{2}", ["a\n", "é😀"], ["a", "\n\n\n"]),
    ],
)
def test_gbnf_says_what_it_does_in_llama_cpp(
    compiler: GrammarCompiler, grammar: str, good: list[str], bad: list[str]
) -> None:
    assert all(fits(compiler, "grammar", grammar, text.encode()) for text in good)
    assert not any(fits(compiler, "grammar", grammar, text.encode()) for text in bad)


def test_choices_are_whole_strings(compiler: GrammarCompiler) -> None:
    choices = ["yes", 'n"o', "ye", "größer 😀", "a\\b"]
    for choice in choices:
        assert fits(compiler, "choice", json.dumps(choices), choice.encode())
    for other in ("y", "yess", "no", ""):
        assert not fits(compiler, "choice", json.dumps(choices), other.encode())


@pytest.mark.parametrize(
    ("kind", "text", "shown"),
    [
        ("choice", '["yes", "a\\u0000b"]', "'a\\x00b'"),
        ("regex", "a\x00b", "'a\\x00b'"),
        ("regex", r"\x00a", r"'\\x00a'"),
        ("regex", "(a|b)\x00", "'(a|b)\\x00'"),
        ("regex", r"[ab]{3}(\x00|c\x00)", r"'[ab]{3}(\\x00|c\\x00)'"),
        ("grammar", r'start: "a\x00"', r"""'"a\\x00"'"""),
        ("grammar", r'root ::= "a" ("b" | "c\u0000")', r"""'"c\\u0000"'"""),
    ],
)
def test_text_that_no_tokens_spell_is_refused(kind: str, text: str, shown: str) -> None:
    """This tokenizer's first token is an end of text, and no byte: answers ended with a failure."""
    loaded = FakeModel().load(EngineConfig())
    compiler = GrammarCompiler(loaded.tokenizer, VOCAB)
    refusal = f"{kind}={shown}: no tokens of this model spell text that has to come"
    with pytest.raises(InvalidRequest, match=f"^{re.escape(refusal)}$"):
        matcher(compiler, kind, text)


def test_no_answer_comes_to_text_that_no_tokens_spell() -> None:
    """It came to the branch that has a NUL, and failed there."""
    loaded = FakeModel().load(EngineConfig())
    compiler = GrammarCompiler(loaded.tokenizer, VOCAB)
    nul = {ord("d"), loaded.tokenizer.encode_inner("\0")[0]}
    for text in (r"a/(b|d\x00)", "a/(?:b|(?i)d\0)", r"a/([b-d]\x00)?b"):
        made = matcher(compiler, "regex", text)
        made.accept(ord("a"), 0)
        made.accept(ord("/"), 0)
        assert nul.isdisjoint(allowed_ids(fill_masks([made])[0], VOCAB).tolist())
    # Not at the end of a literal, and no escape.
    assert not matcher(compiler, "grammar", r'start: "\\x00" "\"" /x/').complete


def test_a_failure_names_its_field() -> None:
    """What a regular expression within a grammar asks for is found where an answer comes there."""
    loaded = FakeModel().load(EngineConfig())
    made = matcher(GrammarCompiler(loaded.tokenizer, VOCAB), "grammar", r'start: "a" /d\x00|e/')
    with pytest.raises(RequestFailed, match=r"^grammar: the answer cannot go on"):
        for token in (*b"ad", 0):
            made.accept(token, 0)


@pytest.mark.parametrize("first", [0x00, 0x7F, 0xC3, 0xDF, 0xE0, 0xED, 0xEF, 0xF0, 0xF4])
def test_characters_are_spelled_by_their_first_byte(first: int) -> None:
    hex_numbers = re.compile(r"\\x\{(\w+)\}")
    spelled = hex_numbers.sub(
        lambda at: re.escape(chr(int(at[1], 16))), spelled_chars(frozenset([first]))
    )
    for code in (*range(0x3000), *range(0xC000, 0xD800), *range(0xE000, 0x110000, 0xFFF), 0x10FFFF):
        char = chr(code)
        assert (re.fullmatch(spelled, char) is None) == (char.encode()[0] == first), char
    assert spelled_chars(frozenset([0xC0, 0xC1, 0xFF])) == ""


def test_text_that_has_to_come_need_not_end(compiler: GrammarCompiler) -> None:
    """`WS` takes every space, so that what comes next is a space for ever. The library looked for
    the end of that without end."""
    (made,) = compiler.matchers(AnswerFormat("grammar", 'start: "abc"', ""), 1, most_forced=9)
    # Where text is forced, what follows would not end.
    assert not made.accept(ord("a"), 9)
    for grammar in (
        'start: "a" WS " b"\nWS: / +/',
        '%llguidance {"no_forcing": false}\nstart: "a" WS " b"\nWS: / +/',
        'root ::= "a" ws " b"\nws ::= " "+',
        'start: ("a" | "c") rest\nrest: A B // the end\nA: / +/\nB: / b/',
    ):
        made = matcher(compiler, "grammar", grammar)
        for token in b"a  ":
            assert token in allowed_ids(fill_masks([made])[0], VOCAB)
            made.accept(token, 0)
        assert allowed_ids(fill_masks([made])[0], VOCAB).tolist() == [ord(" ")]


def test_thousands_of_choices(compiler: GrammarCompiler) -> None:
    choices = json.dumps([f"choice {i}" for i in range(4096)])
    assert fits(compiler, "choice", choices, b"choice 4095")


def test_the_constraint_begins_after_the_closing_text(compiler: GrammarCompiler) -> None:
    answer = b'so {"a": 1} x </thin </think>{"a":1}'
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert fits(compiler, "json_schema", schema, answer, "</think>")
    assert not fits(compiler, "json_schema", schema, answer[:-1], "</think>")
    assert not fits(compiler, "json_schema", schema, b"no end", "</think>")
    assert fits(compiler, "grammar", 'root ::= "x"', b"hm [end].x", "[end].")


def test_tags_in_free_text(compiler: GrammarCompiler) -> None:
    one = {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}
    tag = json.dumps({"structures": [one], "triggers": ["<f="]})
    assert fits(compiler, "structural_tag", tag, b"text <f=a>12</f> more")
    assert fits(compiler, "structural_tag", tag, b"text alone")
    assert not fits(compiler, "structural_tag", tag, b"text <f=a>x</f>")
    assert not fits(compiler, "structural_tag", tag, b"text <f=b>1</f>")


def test_a_tag_may_begin_and_end_with_a_special_token(compiler: GrammarCompiler) -> None:
    """No text spells it, so that such a tag was refused, or never begun."""
    one = {"begin": "<s>f(", "schema": {"type": "integer"}, "end": ")"}
    two = {"begin": "<s>", "schema": {"type": "boolean"}, "end": "<s>"}
    three = {"begin": "#😀", "schema": {"type": "null"}}
    tag = {"structures": [one, two, three], "triggers": ["#", "<s>"], "type": "structural_tag"}
    made = matcher(compiler, "structural_tag", json.dumps(tag))
    for token in (*b"a", 256, *b"f(12)b", 256, *b"true", 256, *"c#😀null".encode()):
        assert token in allowed_ids(fill_masks([made])[0], VOCAB)
        made.accept(token, 0)
    assert 257 in allowed_ids(fill_masks([made])[0], VOCAB)
    made = matcher(compiler, "structural_tag", json.dumps(tag))
    made.accept(256, 0)
    assert allowed_ids(fill_masks([made])[0], VOCAB).tolist() == sorted(b"ft")


def test_white_space_is_bounded(compiler: GrammarCompiler) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<f>"]}
    for spaces, fit in ((8, True), (9, False)):
        answer = b'<f>{"a":' + b" " * spaces + b"1}"
        assert fits(compiler, "structural_tag", json.dumps(tag), answer) == fit
    assert fits(compiler, "json_schema", "{}", b'{"a":' + b" " * 8 + b"1}")
    assert not fits(compiler, "json_schema", "{}", b'{"a":' + b" " * 9 + b"1}")


def test_forced_tokens_follow_at_once(compiler: GrammarCompiler) -> None:
    form = AnswerFormat("regex", "ab(cdefgh|cdefxy)z")
    (made,) = compiler.matchers(form, 1, most_forced=3)
    assert bytes([ord("a"), *made.accept(ord("a"), 100)]) == b"abcd"
    # The rest of what has to follow comes with the next token.
    assert bytes(made.accept(ord("e"), 100)) == b"f"
    assert not made.complete
    assert bytes(made.accept(ord("x"), 100)) == b"yz"
    assert made.complete
    assert compiler.counters.forced_tokens == 6


def test_copies_go_their_own_ways(compiler: GrammarCompiler) -> None:
    one, other = compiler.matchers(AnswerFormat("choice", '["aa", "bb"]'), 2, most_forced=9)
    one.accept(ord("a"), 0)
    masks = fill_masks([one, other])
    assert masks.shape == (2, mask_words(VOCAB))
    assert allowed_ids(masks[0], VOCAB).tolist() == [ord("a")]
    assert allowed_ids(masks[1], VOCAB).tolist() == [ord("a"), ord("b")]


def test_a_copy_is_measured_from_where_it_was_copied(compiler: GrammarCompiler) -> None:
    made = matcher(compiler, "regex", "a+")
    for _ in range(200):
        made.accept(ord("a"), 0)
    assert made.grown() > 0
    copy = made.copy()
    assert (copy.tokens, copy.size) == (200, made.size)
    # The next measurement comes when the tokens are a quarter more.
    copy.accept(ord("a"), 0)
    assert copy.grown() == 0


def test_a_token_that_does_not_fit_fails_once_and_for_all(compiler: GrammarCompiler) -> None:
    made = matcher(compiler, "regex", "a+")
    for token in (ord("b"), 257, ord("a")):
        with pytest.raises(RequestFailed, match="as its format demands"):
            made.accept(token, 9)
    assert not made.complete


def test_a_format_is_compiled_once_and_the_oldest_go(compiler: GrammarCompiler) -> None:
    first = AnswerFormat("regex", "a0")
    for _ in range(3):
        compiler.matchers(first, 1, 0)
    assert (compiler.counters.compiled, compiler.counters.hits) == (1, 2)
    for i in range(1, 256):
        compiler.matchers(AnswerFormat("regex", f"a{i}"), 1, 0)
    assert compiler.at_hand(first)
    compiler.matchers(AnswerFormat("regex", "b"), 1, 0)
    assert not compiler.at_hand(first)


SHARE = {"type": "number", "minimum": 0, "maximum": 1.7976931348623157e308}
NAMES = {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 1}
KEYS = {
    "type": "object",
    "propertyNames": {"$ref": "#/$defs/E"},
    "additionalProperties": {"type": "integer"},
    "$defs": {"E": {"enum": ["x", "y", 2], "title": "E"}},
}
DATE = {"type": "string", "format": "date"}
#: Of pydantic 2.12: a Decimal, and one with max_digits=4 and decimal_places=2.
DECIMAL = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}
PRICE = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,2}|(?=[\d.]{1,5}0*$)\d{0,2}\.\d{0,2}0*$)"
BOTH = {"properties": {"minimum": NAMES, "uniqueItems": {"const": False}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # What databases and published types of 64 bits allow.
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [-(10**18), 0], [10**19]),
        (SHARE, [0.5, 10**18], [-1]),
        ({"type": "number", "exclusiveMinimum": -1e30, "exclusiveMaximum": 2}, [-0.5], [2]),
        # Bounds that are no floats.
        ({"type": "integer", "minimum": 2**53 + 1}, [2**53 + 2], [2**53]),
        ({"type": "integer", "exclusiveMinimum": 2**53}, [2**53 + 2], [2**53]),
        ({"type": "integer", "exclusiveMaximum": 2**54, "maximum": 5}, [5, -6], [6, 2**54]),
        ({"type": "integer", "minimum": -(2**53) - 3}, [-(2**53) - 2], [-(2**53) - 4]),
        ({"enum": [2**53, 2**54, 10**22]}, [2**54, 10**22], [2**53 + 1]),
        # Keywords that say nothing.
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[1, 1]], [1]),
        (NAMES, [{"a": 1}], [{"a": 1, "b": 2}]),
        ({"type": "string", "format": "password", "maxLength": 2}, ["ab"], ["abc"]),
        # Dicts whose keys are a Literal or an Enum.
        (KEYS, [{}, {"x": 1}, {"x": 1, "y": 2}], [{"z": 1}, {"x": "a"}, {"2": 1}]),
        ({"type": "object", "propertyNames": {"const": "q"}}, [{"q": "a"}, {}], [{"z": 1}]),
        (
            {"type": "object", **BOTH},
            [{"minimum": {"a": 1}, "uniqueItems": False}],
            [{"minimum": 1}],
        ),
        # Dates and times that programs can read.
        (DATE, ["2024-02-29", "2000-02-29", "0001-11-29"], ["2023-02-29", "1900-02-29"]),
        (DATE, ["1010-10-20", "2023-02-28"], ["0000-02-29", "0000-01-01", "2023-00-01"]),
        ({**DATE, "pattern": "^2", "allOf": [{"pattern": "9$"}]}, ["2024-02-29"], ["1024-02-29"]),
        ({"format": "time"}, ["23:59:59Z", 7], ["23:59:60Z"]),
        ({"format": "date-time"}, ["2024-02-29T00:00:06Z"], ["2024-01-01T00:00:60Z"]),
        ({"format": "date-time", "type": "string"}, [], ["2023-02-29T00:00:00Z"]),
        # Characters of a class.
        ({"type": "string", "pattern": r"^[a[&&~~\]]+$"}, ["a[&~]"], ["b", ""]),
        ({"type": "string", "pattern": r"^\[[^[:a\]]$"}, ["[b"], ["[[", "[a"]),
        ({"patternProperties": {"^[a&&b]$": {"const": 1}}}, [{"&": 1}], [{"&": 2}]),
        # A whole float is an integer.
        ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, [[1], [1, 2]], [[], [1, 2, 3]]),
        ({"type": "string", "minLength": 2.0, "maxLength": 2.0}, ["ab"], ["a", "abc"]),
        ({"type": "object", "minProperties": 1.0, "maxProperties": 1.0}, [{"a": 1}], [{}]),
        (DECIMAL, ["1", "-1.50", ".5", "+007."], ["", "-", ".", "+.", "1,5", "1e5"]),
        ({**DECIMAL, "pattern": PRICE}, ["12.34", "0012", "-.5", "1.20"], ["123", "1.234", "1x"]),
    ],
)
def test_large_bounds_and_keywords_that_say_nothing_are_held_to(
    compiler: GrammarCompiler, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    def fit(value: Any) -> bool:
        return fits(compiler, "json_schema", json.dumps(schema), json.dumps(value).encode())

    assert all(map(fit, good))
    assert not any(map(fit, bad))


LIST = {"type": "array", "items": {"$ref": "#/properties/a"}, "minItems": 1}
NODE = {"type": "object", "required": ["a"]}
CIRCLE = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"$ref": "#/$defs/x"}}}
WRONG: list[tuple[str, Any, str]] = [
    ("regex", "[", "regex"),
    ("regex", "(?=a)b", "regex"),
    ("regex", "a{1000000}", "regex"),
    ("grammar", 'start: "a" b', "grammar"),
    ("grammar", 'root ::= "a" | (', "grammar"),
    ("grammar", 'term: "a"', "grammar"),
    ("json_schema", {"type": "text"}, "json_schema"),
    ("json_schema", {"enum": []}, "json_schema"),
    ("json_schema", {"type": "array", "uniqueItems": True}, "json_schema"),
    (
        "json_schema",
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}},
        "json_schema/$defs/x",
    ),
    (
        "json_schema",
        {"properties": {"a/b": {"items": {"type": "x"}}}},
        "json_schema/properties/a~1b/items",
    ),
    (
        "json_schema",
        {"properties": {"b": {}, "c": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"pattern": "(["}}},
        "json_schema/$defs/x",
    ),
    ("json_schema", {"anyOf": [{"type": "string"}, {"format": "shape"}]}, "json_schema/anyOf/1"),
    ("json_schema", {"properties": {"a": LIST}}, "json_schema/properties/a/items"),
    (
        "json_schema",
        {"properties": {"a": {**LIST, "minItems": 1.0}}},
        "json_schema/properties/a/items",
    ),
    ("json_schema", {"type": "array", "maxItems": 1.5}, "json_schema"),
    ("json_schema", {**NODE, "properties": {"a": {"$ref": "#"}}}, "json_schema/properties/a"),
    (
        "structural_tag",
        {"structures": [{"begin": "<f>", "schema": CIRCLE}], "triggers": ["<f"]},
        "structural_tag/structures/0/schema/$defs/x",
    ),
    ("json_schema", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "json_schema"),
    ("json_schema", {"properties": {"a": {"const": 2**53 + 1}}}, "json_schema/properties/a/const"),
    ("json_schema", {"items": {"enum": ["a", {"b": [2**64 - 1]}]}}, "json_schema/items/enum"),
    ("json_schema", {"properties": {"a": {"minimum": 10**30}}}, "json_schema/properties/a"),
    ("json_schema", {"propertyNames": {"enum": "a"}, "$defs": 3}, "json_schema"),
    (
        "json_schema",
        {"propertyNames": {"enum": ["a"], "type": "string", "minLength": 2}},
        "json_schema",
    ),
    (
        "structural_tag",
        {"structures": [{"begin": "<f>", "schema": {"const": -(2**60) - 1}}], "triggers": ["<f"]},
        "structural_tag/structures/0/schema/const",
    ),
]


@pytest.mark.parametrize(("kind", "what", "place"), WRONG)
def test_what_is_wrong_is_named(
    compiler: GrammarCompiler, kind: str, what: Any, place: str
) -> None:
    text = what if isinstance(what, str) else json.dumps(what)
    with pytest.raises(InvalidRequest) as caught:
        matcher(compiler, kind, text)
    assert caught.value.field == place
    assert len(str(caught.value)) < 600
    assert not compiler.at_hand(AnswerFormat(kind, text))


def test_many_dates_make_no_large_schema(compiler: GrammarCompiler) -> None:
    dates = {str(at): {"format": "date-time"} for at in range(700)}
    schema = {"type": "object", "properties": dates, "required": [*dates]}
    made = matcher(compiler, "json_schema", json.dumps(schema))
    assert allowed_ids(fill_masks([made])[0], VOCAB).tolist() == [ord("{")]


def test_no_option_is_advised_that_a_request_has_not(compiler: GrammarCompiler) -> None:
    schema = json.dumps({"oneOf": [{"type": "number"}, {"type": "integer"}]})
    with pytest.raises(InvalidRequest, match=r"Several parts may fit, as with anyOf$"):
        matcher(compiler, "json_schema", schema)


def chain(length: int, turn: bool) -> dict[str, Any]:
    """Definitions of which each needs the next one; one of them may name the first."""
    named: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(length)}
    named[f"d{length}"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/d0"}]} if turn else {}
    return {"$defs": named, "properties": {"a": {"$ref": "#/$defs/d0"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {**NODE, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
        {**NODE, "properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
        {**NODE, "properties": {"a": {"$ref": "#/properties/b"}, "b": {"const": 1}}},
        {**NODE, "type": ["object", "null"], "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"not": {"$ref": "#"}, "required": {"$ref": "#"}}},
        {"$defs": {"x": {"$ref": "#/$defs/x"}}, "properties": {"a": {"type": "null"}}},
        chain(300, turn=False),
        chain(300, turn=True),
    ],
    ids=str,
)
def test_a_schema_may_hold_itself_where_it_need_not(
    compiler: GrammarCompiler, schema: dict[str, Any]
) -> None:
    assert not matcher(compiler, "json_schema", json.dumps(schema)).complete


def test_a_schema_that_needs_many_others_is_looked_at_within_bounds() -> None:
    """Each pass finds one more that ends, as each refers to one before it: the rest is let by."""
    names = [f"d{at}" for at in range(3_000)]
    named: dict[str, Any] = {at: {"$ref": f"#/$defs/{to}"} for at, to in pairwise(names[::-1])}
    parts = [{"$ref": f"#/$defs/{at}"} for at in names]
    check_ends("json_schema", {"$defs": {**named, names[0]: {}}, "anyOf": parts})
    circle = {**named, names[0]: {"$ref": f"#/$defs/{names[-1]}"}}
    with pytest.raises(InvalidRequest, match="needs itself"):
        check_ends("json_schema", {"$defs": circle, "anyOf": parts})


def deep(levels: int) -> Any:
    schema: Any = {}
    for _ in range(levels):
        schema = {"properties": {"a": schema}}
    return schema


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"const": "x" * 10_000_000}}, "json_schema"),
    ({"json_schema": '{"const": "' + "x" * 10_000_000 + '"}'}, "json_schema"),
    ({"json_schema": {"enum": list(range(1_000_000))}}, "json_schema/enum"),
    ({"json_schema": "[" * 60_000}, "json_schema"),
    ({"json_schema": "[]"}, "json_schema"),
    ({"json_schema": True}, "json_schema"),
    ({"json_schema": list[int]}, "json_schema"),
    ({"json_schema": {"const": object()}}, "json_schema/const"),
    ({"json_schema": {"const": float("nan")}}, "json_schema/const"),
    ({"json_schema": '{"minimum": 1e999}'}, "json_schema/minimum"),
    ({"json_schema": {"minimum": -(10**5000)}}, "json_schema/minimum"),
    ({"json_schema": {"properties": {1: {}}}}, "json_schema/properties"),
    ({"json_schema": {"x-guidance": {}}}, "json_schema/x-guidance"),
    ({"json_object": 1}, "json_object"),
    ({"regex": ""}, "regex"),
    ({"regex": "\ud800"}, "regex"),
    ({"regex": b"a"}, "regex"),
    ({"choice": []}, "choice"),
    ({"choice": [""]}, "choice[0]"),
    ({"choice": "text"}, "choice"),
    ({"structural_tag": {}}, "structural_tag/structures"),
    ({"structural_tag": {"structures": [], "at_least_one": True}}, "structural_tag/at_least_one"),
    (
        {"structural_tag": {"structures": [{"begin": "<", "ends": ">"}], "triggers": ["<"]}},
        "structural_tag/structures/0/ends",
    ),
    (
        {
            "structural_tag": {
                "structures": [{"begin": "<", "schema": {"x-guidance": {}}}],
                "triggers": ["<"],
            }
        },
        "structural_tag/structures/0/schema/x-guidance",
    ),
    (
        {"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<"]}},
        "structural_tag/structures/0/schema",
    ),
    (
        {"structural_tag": {"structures": [{"begin": "a", "schema": {}}], "triggers": ["<"]}},
        "structural_tag/structures/0/begin",
    ),
    ({"constrain_after": "x"}, "constrain_after"),
    ({"regex": "a", "json_object": True}, "regex"),
]


@pytest.mark.parametrize(("options", "field"), REFUSED)
def test_what_is_out_of_bounds_is_refused_before_it_is_compiled(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**options)
    assert caught.value.field == field


def test_a_schema_is_refused_by_its_depth() -> None:
    SamplingParams(json_schema=deep(49))
    with pytest.raises(InvalidRequest, match="at most 100 levels of nesting"):
        SamplingParams(json_schema=deep(60))
    circle: dict[str, Any] = {}
    circle["properties"] = circle
    with pytest.raises(InvalidRequest, match="at most 100 levels of nesting"):
        SamplingParams(json_schema=circle)


def test_several_at_once_are_named() -> None:
    with pytest.raises(InvalidRequest, match="choice=<beside regex>: one at most of json_schema"):
        SamplingParams(regex="a", choice=["a"])


def test_options_are_frozen_and_equal_by_what_they_say() -> None:
    schema = {"type": "object"}
    params = SamplingParams(json_schema=schema)
    schema["type"] = "string"
    assert params == SamplingParams(json_schema={"type": "object"})
    assert hash(params) == hash(SamplingParams(json_schema={"type": "object"}))
    assert params.constraint == "json_schema"


# fault 41
def test_a_format_at_hand_waits_for_no_other(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, slow = AnswerFormat("regex", "a+"), AnswerFormat("regex", "b+")
    compiler.matchers(known, 1, most_forced=0)
    compiling, go_on = threading.Event(), threading.Event()
    compile_text = texts.grammar_text

    def held_up(form: AnswerFormat, special: Callable[[str], int | None], spelled: str = "") -> str:
        if form == slow:
            compiling.set()
            assert go_on.wait(120)
        return compile_text(form, special, spelled)

    monkeypatch.setattr("asyncinfer.grammar.compiler.grammar_text", held_up)
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(compiler.matchers, slow, 1, 0) for _ in range(2)]
        assert compiling.wait(120)
        assert compiler.at_hand(known)
        try:
            assert threads.submit(compiler.matchers, known, 2, 0).result(120)
        finally:
            go_on.set()
        assert all(len(each.result(120)) == 1 for each in waiting)
    assert compiler.counters.hits == 1
    assert compiler.counters.compiled in (2, 3)
