"""`PluginInfo`: a plugin as lists of plugins show it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

__all__ = ["PluginInfo", "summary_of"]


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What is known of one plugin."""

    name: str
    #: "built in", "registered by the application", or distribution and version.
    origin: str
    #: First sentence of its docstring.
    summary: str
    #: Why it cannot be used; None if it can.
    problem: str | None
    #: The group of its entry point.
    group: str


def summary_of(factory: object) -> str:
    """The first sentence of a factory's docstring, on one line; "" without a docstring."""
    doc = getattr(factory, "__doc__", None)
    paragraph = inspect.cleandoc(doc).partition("\n\n")[0] if isinstance(doc, str) else ""
    return " ".join(paragraph.split()).partition(". ")[0].removesuffix(".")
