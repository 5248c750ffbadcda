"""Every code block of the README and the docs runs as it stands.

Python blocks run one by one, in a namespace of their own; top-level `await` works as in a notebook.
Of shell blocks, the lines that call `asyncinfer` run (`.ci/run` does the `pip` lines). A comment on
the line above a block says otherwise:

    <!-- continues -->         it runs after the blocks before it, back to the last without this
    <!-- not run: reason -->   it does not run
"""

from __future__ import annotations

import ast
import asyncio
import gc
import io
import logging
import re
import shlex
import threading
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import CO_COROUTINE
from pathlib import Path

import pytest

from asyncinfer.cli import main
from asyncinfer.models import NAMED_MODELS, pulled

#: Frameworks, whose blocks are left out where one is not installed.
FRAMEWORKS = ("langchain_core", "pydantic_ai")
SMOLLM2 = NAMED_MODELS["smollm2"]
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)$")
_NOTE = re.compile(r"<!-- (?P<kind>continues|not run: .+) -->")


@dataclass(frozen=True)
class Block:
    """The code between two fences. `line` is that of its first line."""

    page: str
    line: int
    language: str
    code: str
    note: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(text: str, page: str) -> list[Block]:
    found = []
    lines = text.splitlines()
    start = None
    language = note = ""
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if not fence:
            continue
        if start is None:
            start, language = number + 1, fence["language"]
            above = _NOTE.fullmatch(lines[number - 1].strip()) if number else None
            note = above["kind"] if above else ""
        else:
            code = "\n".join(line.removeprefix(fence["indent"]) for line in lines[start:number])
            found.append(Block(page, start + 1, language, code, note))
            start = None
    assert start is None, f"{page}: the block at line {start} has no end"
    return found


def scripts(found: list[Block]) -> list[list[Block]]:
    """Python blocks, each with those it continues."""
    runs: list[list[Block]] = []
    for block in found:
        if block.language == "python" and not block.note.startswith("not run"):
            if block.note == "continues":
                assert runs, f"{block}: continues nothing"
                runs[-1].append(block)
            else:
                runs.append([block])
    return runs


def commands(found: list[Block]) -> list[tuple[Block, list[str]]]:
    """Calls of `asyncinfer` in shell blocks."""
    return [
        (block, shlex.split(part, comments=True))
        for block in found
        if block.language in ("sh", "console") and not block.note.startswith("not run")
        for line in block.code.replace("\\\n", " ").splitlines()
        for part in line.removeprefix("$ ").split("&&")
        if part.split()[:1] == ["asyncinfer"]
    ]


def different(found: list[tuple[Block, list[str]]]) -> list[tuple[Block, list[str]]]:
    """Calls that say the same on several pages do the same: each runs once."""
    return list({tuple(words): (block, words) for block, words in reversed(found)}.values())[::-1]


def run(script: list[Block]) -> None:
    """Run blocks in one fresh module; errors point at the page and line.

    Blocks that await share one event loop, as cells of a notebook do: an engine opened in one block
    ends when its loop is closed. Blocks that do not await run outside of the loop.
    """
    module = types.ModuleType("__main__")
    with asyncio.Runner() as runner:
        for block in script:
            tree = ast.parse(block.code, str(block))
            ast.increment_lineno(tree, block.line - 1)
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            code = compile(tree, block.page, "exec", flags, dont_inherit=True)
            if code.co_flags & CO_COROUTINE:
                runner.run(eval(code, vars(module)))
            else:
                exec(code, vars(module))


FOUND = [
    block
    for page in PAGES
    for block in blocks(page.read_text("utf-8"), str(page.relative_to(ROOT)))
]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """A block may turn logging on; the next one starts without."""
    logger = logging.getLogger("asyncinfer")
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.usefixtures("logger")
@pytest.mark.parametrize("script", scripts(FOUND), ids=lambda script: str(script[0]))
def test_python_block(script: list[Block], monkeypatch: pytest.MonkeyPatch) -> None:
    if any('"smollm2"' in block.code for block in script) and pulled(SMOLLM2) is None:
        pytest.skip("needs the model: asyncinfer pull smollm2")
    for package in FRAMEWORKS:
        if any(f"from {package}" in block.code for block in script):
            pytest.importorskip(package)
    monkeypatch.chdir(ROOT)
    # A busy machine may keep observers waiting.
    monkeypatch.setattr("asyncinfer.telemetry.observers.CLOSE_SECONDS", 60.0)
    before = set(threading.enumerate())
    run(script)
    with warnings.catch_warnings():
        # A stream or an engine that a block forgot warns when it is collected.
        warnings.simplefilter("error")
        gc.collect()
    left = []
    for thread in set(threading.enumerate()) - before:
        if thread.name in ("asyncinfer-intake", "asyncinfer-observer"):
            # A close does not wait for these to the very end.
            thread.join(120)
        if thread.is_alive() and thread.name.startswith("asyncinfer"):
            left.append(thread.name)
    assert not left, "an engine was left open"


@pytest.mark.usefixtures("logger")
@pytest.mark.parametrize(
    ("block", "words"), different(commands(FOUND)), ids=lambda value: str(value) if value else None
)
def test_shell_command(
    block: Block,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: importing torch would take longer than most commands. `tests/cli` and
    `.ci/run` start the program itself."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    # Matrices that no cache holds take long.
    monkeypatch.setattr("asyncinfer.doctor.products._LARGEST", 1 << 20)
    monkeypatch.setattr("asyncinfer.doctor.products._TIMED_BYTES", 4 << 20)
    with pytest.raises(SystemExit) as exited:
        main(words[1:])
    shown = capsys.readouterr()
    assert exited.value.code == 0, shown.err
    assert shown.out.strip()


# The reader of blocks itself, on a page that has everything.

PAGE = """
```python
x = 1
```
<!-- continues -->
```python
import asyncio
await asyncio.sleep(0)
assert x == 2, "planted"
```
  ```python
  y = 1
  ```
<!-- not run: needs a GPU -->
```python
raise SystemExit
```
```sh
pip install . && asyncinfer generate "a b" \\
    --max-tokens 3   # short
ls
```
<!-- not run: asks questions -->
```sh
asyncinfer chat
```
"""


def test_blocks_of_a_page() -> None:
    found = blocks(PAGE, "page.md")
    first, second = scripts(found)
    assert [(block.line, block.note) for block in first] == [(3, ""), (7, "continues")]
    assert second[0].code == "y = 1"
    assert [words for _, words in commands(found)] == [
        ["asyncinfer", "generate", "a b", "--max-tokens", "3"]
    ]
    again = commands(blocks(PAGE, "other.md"))
    assert different([*commands(found), *again]) == commands(found)
    with pytest.raises(AssertionError, match="planted") as failure:
        run(first)
    assert failure.traceback[-1].lineno == 8  # counted from 0: line 9 of the page
    run(second)


def test_there_is_something_to_run() -> None:
    assert len(scripts(FOUND)) >= 10
    assert len(commands(FOUND)) >= 3


def test_files_named_in_the_architecture_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = set(re.findall(r"\b((?:\w+/)+(?:\w+\.py)?|\w+\.py)(?=[`<])", page))
    assert len(named) > 30
    missing = [
        name
        for name in named
        if not any(
            (ROOT / base / name).exists() for base in (".", "asyncinfer", "asyncinfer/kernels")
        )
    ]
    assert not missing


def test_the_files_to_read_first_are_as_long_as_it_says() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = re.findall(r"^\| \d+ \| `(.+?)`", page, re.MULTILINE)
    said = re.search(r"about ([\d,]+) lines", page)
    assert len(named) == 15
    assert said is not None
    lines = sum(len((ROOT / "asyncinfer" / name).read_text().splitlines()) for name in named)
    assert abs(lines - int(said[1].replace(",", ""))) < 0.1 * lines, lines


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        text = path.read_text("utf-8")
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            page, _, anchor = target.partition("#")
            there = path.parent / page if page else path
            assert there.exists(), f"{path.name}: {target}"
            if anchor:
                assert anchor in _anchors(there.read_text("utf-8")), f"{path.name}: {target}"


def _anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
