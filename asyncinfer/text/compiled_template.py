"""`CompiledTemplate`: one chat template, ready to render, or the reason why it cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import jinja2
from jinja2 import Template, meta, nodes

from asyncinfer.errors import InvalidRequest
from asyncinfer.text.caller_text import clean
from asyncinfer.text.render_budget import MAX_SIZE, RenderBudget
from asyncinfer.text.sandbox import TemplateEnvironment

__all__ = ["CompiledTemplate"]

#: Characters of a template's source; the longest published ones have 30,000.
MAX_SOURCE: Final = 500_000


class CompiledTemplate:
    """A template, compiled in the constructor, which never raises: `fault` says what is wrong."""

    def __init__(self, source: str | None) -> None:
        self.source = source
        #: Why the template cannot be used; None if it can.
        self.fault: str | None = None
        #: The variables that the template reads.
        self.names: frozenset[str] = frozenset()
        #: The string literals of the template.
        self.words: frozenset[str] = frozenset()
        if source is None:
            self.fault = "this model has no chat template"
        elif not source.strip():
            self.fault = "this model's chat template is empty"
        elif len(source) > MAX_SOURCE:
            self.fault = f"this model's chat template has {len(source)} characters > {MAX_SOURCE}"
        else:
            try:
                self._compile(source)
            except Exception as error:
                # The template may be hostile, and Python's compiler may raise anything on it.
                self.fault = f"this model's chat template does not compile: {_reason(error)}"

    def _compile(self, source: str) -> None:
        environment = TemplateEnvironment()
        tree = environment.parse(source)
        names = meta.find_undeclared_variables(tree)
        constants = (node.value for node in tree.find_all(nodes.Const))
        self.words = frozenset(value for value in constants if isinstance(value, str))
        self.names = frozenset(names - environment.globals.keys())
        code = environment.compile(tree)
        self._template = Template.from_code(environment, code, environment.globals)

    def render(self, variables: Mapping[str, Any], roles: list[str], budget: RenderBudget) -> str:
        """The prompt. Raises `InvalidRequest` if the template raises, or needs more than the
        budget."""
        try:
            text = _joined(self._template.generate({**variables, RenderBudget.NAME: budget}))
        except InvalidRequest:
            raise
        except Exception as error:
            reason = clean(_reason(error))
            raise InvalidRequest(
                "messages", roles, f"the chat template refuses them: {reason}"
            ) from error
        if not text.strip():
            raise InvalidRequest("messages", roles, "the chat template writes nothing for them")
        return text


def _joined(parts: Iterable[str]) -> str:
    texts, length = [], 0
    for part in parts:
        length += len(part)
        if length > MAX_SIZE:
            raise InvalidRequest(
                "messages", f"{length} characters", f"the chat may write at most {MAX_SIZE}"
            )
        texts.append(part)
    return "".join(texts)


def _reason(error: Exception) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"
    return str(error) if isinstance(error, jinja2.TemplateError) else repr(error)
