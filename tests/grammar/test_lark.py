"""What a grammar's masks allow is what Lark parses, in both directions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from asyncinfer.grammar import GrammarCompiler, Matcher, allowed_ids, fill_masks
from asyncinfer.structured_output import AnswerFormat
from asyncinfer.text import Tokenizer

lark = pytest.importorskip("lark")
from_lark = pytest.importorskip("hypothesis.extra.lark").from_lark

VOCAB, END = 258, 257
#: Documents of each grammar in each direction, and bytes of one at most.
DOCUMENTS, LONGEST = 12, 240
GRAMMARS = {
    "arithmetic": r"""
        start: sum
        sum: product (("+" | "-") product)*
        product: atom (("*" | "/") atom)*
        atom: NUMBER | "-" atom | "(" sum ")"
        NUMBER: /[0-9]+(\.[0-9]+)?/
    """,
    "json": r"""
        start: value
        value: object | array | STRING | NUMBER | "true" | "false" | "null"
        object: "{" [pair ("," pair)*] "}"
        pair: STRING ":" value
        array: "[" [value ("," value)*] "]"
        STRING: /"[a-z\\ ]{0,6}"/
        NUMBER: /-?(0|[1-9][0-9]{0,3})/
    """,
    "brackets": r"""
        start: pair*
        pair: "(" pair* ")" | "[" pair* "]" | "<>"
    """,
    "palindromes": 'start: "a" start "a" | "b" start "b" | "c"',
    "left recursion": 'start: list\nlist: list "," WORD | WORD\nWORD: /[a-z]{1,4}/',
    "alternatives with one beginning": 'start: "ab" "c" | "abd" | "a" "e"',
    "empty rules": 'start: a "x" a\na: "y" a |',
    "repetition": r"""
        start: field ("." field)~1..3
        field: /[0-9]/~1..3
    """,
    "ignored blanks": r"""
        start: "let" NAME "=" NUMBER ";"
        NAME: /[a-z]{2}/
        NUMBER: /[0-9]{1,3}/
        %ignore " "
    """,
    "terminals of terminals": r"""
        start: ID ("," ID)*
        ID: LETTER (LETTER | DIGIT)~0..4
        LETTER: "a".."f"
        DIGIT: "0".."9"
    """,
    "characters of several bytes": 'start: ("é" | "😀" | WORD)+\nWORD: /[äöü]{1,2}/ "."',
    "markup": r"""
        start: element
        element: "<b>" inner* "</b>" | "<i>" inner* "</i>"
        inner: element | TEXT
        TEXT: /[a-z ]{1,5}\|/
    """,
    "ambiguous": 'start: start "+" start | "n"',
}
COMPILER = GrammarCompiler(Tokenizer.byte_level(add_bos=False), VOCAB)
PARSERS = {
    name: lark.Lark(grammar, parser="earley", lexer="dynamic_complete")
    for name, grammar in GRAMMARS.items()
}


def matcher(name: str) -> Matcher:
    (made,) = COMPILER.matchers(AnswerFormat("grammar", GRAMMARS[name], ""), 1, most_forced=0)
    return made


def allowed(made: Matcher) -> list[int]:
    return [END] if made.complete else allowed_ids(fill_masks([made])[0], VOCAB).tolist()


def parses(name: str, text: str) -> bool:
    try:
        PARSERS[name].parse(text)
    except lark.exceptions.LarkError:
        return False
    return True


def sampled(name: str, rng: random.Random) -> str | None:
    """A text drawn from the masks alone; None where it did not come to an end."""
    made, text = matcher(name), bytearray()
    while len(text) < LONGEST:
        ids = allowed(made)
        if END in ids and (len(ids) == 1 or rng.random() < 0.3):
            return text.decode()
        token = rng.choice([each for each in ids if each != END])
        made.accept(token, 0)
        text.append(token)
    return None


def fits(name: str, text: str) -> bool:
    made = matcher(name)
    for token in text.encode():
        if made.complete or token not in allowed(made):
            return False
        made.accept(token, 0)
    return END in allowed(made)


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_masks_allow_is_parsed(name: str) -> None:
    rng = random.Random(7)
    drawn = [sampled(name, rng) for _ in range(DOCUMENTS)]
    whole = [text for text in drawn if text is not None]
    assert len(whole) >= DOCUMENTS // 4
    for text in whole:
        assert parses(name, text), text


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_a_grammar_makes_is_allowed_and_what_it_does_not_is_barred(name: str) -> None:
    rng = random.Random(11)

    @settings(max_examples=DOCUMENTS, database=None, derandomize=True, deadline=None)
    @given(from_lark(PARSERS[name]))
    def check(text: str) -> None:
        # An answer ends with its last part, before anything that is ignored.
        text = text.rstrip() if "%ignore" in GRAMMARS[name] else text
        if len(text) > LONGEST:
            return
        assert fits(name, text), text
        if text:
            # The same text with one character less, twice, or otherwise.
            at = rng.randrange(len(text))
            other = text[:at] + rng.choice(["", text[at] * 2, "z", "("]) + text[at + 1 :]
            trailing = other != other.rstrip() and "%ignore" in GRAMMARS[name]
            assert fits(name, other) == (parses(name, other) and not trailing), other

    check()
