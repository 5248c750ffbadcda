"""Writing a model's text where a person reads it."""

from __future__ import annotations

import sys
from typing import Final

import click

__all__ = ["show"]

#: A model's text must not move the cursor, set colours or ring the bell.
_CONTROLS: Final = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in "\n\t"
}


def show(text: str) -> None:
    """Write `text` to stdout now; on a terminal without control characters."""
    if text:
        click.echo(text.translate(_CONTROLS) if sys.stdout.isatty() else text, nl=False)
