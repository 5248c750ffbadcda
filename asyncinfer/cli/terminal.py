"""Writing a model's text where a person, or a program, reads it."""

from __future__ import annotations

import codecs
import json
import sys
from typing import Final, TextIO

import click

__all__ = ["json_text", "show"]

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


def json_text(value: object, stream: TextIO, indent: int | None = None) -> str:
    """`value` as JSON for `stream`. Unless that is UTF-8, characters beyond ASCII are escaped: a
    stream writes something else for those that it does not have."""
    utf8 = stream.encoding is None or codecs.lookup(stream.encoding).name == "utf-8"
    return json.dumps(value, ensure_ascii=not utf8, indent=indent)
