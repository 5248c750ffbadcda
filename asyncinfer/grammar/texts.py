"""From an answer's format to the text that the grammar library compiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from asyncinfer.errors import InvalidRequest
from asyncinfer.grammar.gbnf import gbnf_as_lark, is_gbnf
from asyncinfer.structured_output import AnswerFormat
from asyncinfer.tools.schemas import restated

__all__ = ["grammar_text", "json_grammar"]

#: Options of JSON. White space is bounded, since a model may go on with it for ever.
_JSON: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,8}"}
_ANSWER: Final = "answer"
#: Of several such lines the last one counts, and it counts for all parts of a grammar. Without it
#: the library looks for the text that has to come next until it ends, which is never where a
#: terminal takes all that could end it: `"A:" WS " yes"` with `WS: / +/`.
_UNFORCED: Final = '%llguidance {"no_forcing": true}'


def grammar_text(
    form: AnswerFormat, special: Callable[[str], int | None], spelled: str = ""
) -> str:
    """The text that the library compiles for a format.

    Args:
        special: the id of a special token, which is no text to a grammar; None for any other text.
        spelled: the class of the characters that tokens spell; empty where that is all of them.

    Raises `InvalidRequest` for invalid GBNF; the library finds all other errors itself.
    """
    text = _grammar_text(form, special, spelled)
    if form.after:
        return _following(_closing(form.after, special(form.after)), text)
    return _following(f"start: before @{_ANSWER}\n{form.before}", text) if form.before else text


def json_grammar(schema: Any) -> str:
    """The grammar of a JSON Schema."""
    from llguidance import LLMatcher

    # As text, since an object may have no integer of more than 64 bits.
    text = json.dumps(restated(schema), ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(text, overrides=_JSON)  # type: ignore[arg-type]


def _grammar_text(form: AnswerFormat, special: Callable[[str], int | None], spelled: str) -> str:
    from llguidance import LLMatcher

    match form.kind:
        case "json_schema":
            return json_grammar(json.loads(form.text))
        case "regex":
            made = LLMatcher.grammar_from_regex(form.text)
            if not spelled:
                return made
            # What no tokens spell is no way to go on: the answer would fail where it has to come.
            rule = json.loads(made)["grammars"][0]["lark_grammar"].removeprefix("start: ")
            return LLMatcher.grammar_from_lark(f"start: ANSWER\nANSWER: {rule} & /{spelled}*/")
        case "choice":
            choices = (json.dumps(choice) for choice in json.loads(form.text))
            return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(choices))
        case "tools":
            return LLMatcher.grammar_from_lark(form.text)
        case "structural_tag":
            return LLMatcher.grammar_from_lark(_tags(json.loads(form.text), special))
    try:
        lark = gbnf_as_lark(form.text) if is_gbnf(form.text) else form.text
    except Exception as error:
        raise InvalidRequest("grammar", form.text, f"is no GBNF: {error}") from error
    return LLMatcher.grammar_from_lark(f"{lark}\n{_UNFORCED}")


def _tags(tag: Any, special: Callable[[str], int | None]) -> str:
    """Free text with tags, each from the first place where its trigger is complete."""
    rules = ["TAG_TEXT: /(.|\\n)*/"]
    for at, one in enumerate(tag["structures"]):
        begin, end = one["begin"], one.get("end", "")
        head = next(trigger for trigger in tag["triggers"] if begin.startswith(trigger))
        if special(begin) is not None:
            head = begin
        opened = f"tag_{at}_begun"
        if (token := special(head)) is None:
            rules.append(f"{opened}[lazy]: TAG_TEXT {json.dumps(head)}")
        else:
            # No text spells it.
            rules.append(f"{opened}: TAG_TEXT <[{token}]>")
        rest = json.dumps(begin[len(head) :]) if begin != head else ""
        schema = json.dumps({**restated(one["schema"]), "x-guidance": _JSON})
        token = special(end)
        closed = f"<[{token}]>" if token is not None else json.dumps(end) if end else ""
        rules.append(f"tag_{at}: {opened} {rest} %json {schema} {closed}")
    either = " | ".join(f"tag_{at}" for at in range(len(tag["structures"])))
    return "\n".join([f"start: ({either})* rest", "rest: TAG_TEXT", *rules])


def _closing(closing: str, token: int | None) -> str:
    """Rules of free text up to `closing`, and then the answer. `token` is its id if it is
    special."""
    if token is None:
        # Lazy: the text ends where `closing` is complete for the first time.
        end = "".join(f"\\x{{{ord(char):x}}}" for char in closing)
        return f"start: reasoning @{_ANSWER}\nreasoning[lazy]: /(.|\\n)*{end}/\n"
    return f"start: reasoning <[{token}]> @{_ANSWER}\nreasoning: /(.|\\n)*/\n"


def _following(start: str, answer: str) -> str:
    """The rules of `start`, which refer to the answer, and the answer's."""
    grammars = (
        json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    )
    grammars[0]["name"] = _ANSWER
    return json.dumps({"grammars": [{"lark_grammar": start}, *grammars]})
