"""`NewFile`: a file that a command writes when its work is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

__all__ = ["NewFile"]


class NewFile(click.Path):
    """The path of a file to write. A folder that does not exist is told before the work, which may
    take an hour, and not after it."""

    def __init__(self, dash: bool = False) -> None:
        """`dash`: "-" is standard output."""
        super().__init__(dir_okay=False, writable=True, allow_dash=dash, path_type=Path)

    def convert(
        self, value: Any, param: click.Parameter | None, context: click.Context | None
    ) -> Any:
        path = super().convert(value, param, context)
        assert isinstance(path, Path)
        if value == "-" and not self.allow_dash:
            self.fail("'-' is no file: the result is printed anyway", param, context)
        if not path.parent.is_dir():
            self.fail(f"{value}: the folder does not exist", param, context)
        return path
