"""`__all__` is sorted and true, `__init__.py` only hands names on, public names are documented."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import asyncinfer
from asyncinfer import EngineConfig, SamplingParams, errors, plugins
from asyncinfer.telemetry import EVENTS

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "asyncinfer").rglob("*.py"))
REFERENCE = (ROOT / "docs" / "reference.md").read_text("utf-8")
#: What a program may use beside `asyncinfer` itself; each has its part of the reference.
PUBLIC_MODULES = (
    "asyncinfer.builtin",
    "asyncinfer.doctor",
    "asyncinfer.models",
    "asyncinfer.planner",
    "asyncinfer.plugins",
    "asyncinfer.protocols",
    "asyncinfer.remote",
    "asyncinfer.samplers",
    "asyncinfer.server",
    "asyncinfer.testing",
)


def _exported(source: str) -> list[str] | None:
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.List() as value):
                return list(ast.literal_eval(value))
    return None


def _isort(name: str) -> tuple[int, str]:
    """The order ruff gives: CONSTANTS, Classes, functions."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def _bound(source: str) -> set[str]:
    """Names a module binds at its top level."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.If):
            names |= _bound("\n".join(map(ast.unparse, node.body)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return names


def _doing(source: str) -> list[str]:
    """Statements of an `__init__.py` beyond handing names on: docstring, imports, `__all__` and
    `__version__`."""
    found = []
    for node in ast.parse(source).body:
        match node:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Import() | ast.ImportFrom():
                continue
            case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
                continue
            case ast.AnnAssign(target=ast.Name(id="__all__" | "__version__")):
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=[rest]) if ast.unparse(
                rest
            ).startswith("__getattr__, __dir__ = hand_on(__name__, "):
                # Handed on when they are asked for.
                found += _doing("\n".join(map(ast.unparse, body)))
                continue
        found.append(f"line {node.lineno}: {ast.unparse(node)[:80]}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_all_is_sorted_and_true(path: Path) -> None:
    source = path.read_text("utf-8")
    names = _exported(source)
    if names is None:
        return
    assert names == sorted(set(names), key=_isort)
    assert not [name for name in names if name.startswith("_")]
    assert set(names) <= _bound(source)


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.name == "__init__.py"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_an_init_only_hands_names_on(path: Path) -> None:
    assert not _doing(path.read_text("utf-8"))


def test_the_checks_can_fail() -> None:
    assert _doing("x = 1\nprint(x)") == ["line 1: x = 1", "line 2: print(x)"]
    assert _doing('"""Doc."""\nfrom a import b\n__all__ = ["b"]') == []
    assert _exported('__all__ = ["b", "a"]') == ["b", "a"]
    assert _bound("import a.b\nfrom c import d as e\nf: int = 1\nclass G: ...") == {
        "a",
        "e",
        "f",
        "G",
    }


def test_what_is_handed_on_late_is_what_types_know() -> None:
    source = (ROOT / "asyncinfer" / "__init__.py").read_text("utf-8")
    (choice,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    known = {
        f"{node.module}:{alias.name}"
        for node in choice.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (assigned,) = choice.orelse
    assert isinstance(assigned, ast.Assign)
    assert isinstance(assigned.value, ast.Call)
    handed = {
        f"asyncinfer.{keyword.arg}:{name}"
        for keyword in assigned.value.keywords
        for name in ast.literal_eval(keyword.value)
    }
    assert handed == known
    assert {name.partition(":")[2] for name in handed} == set(asyncinfer.__all__)
    assert set(asyncinfer.__all__) < {*dir(asyncinfer), "__version__"} <= {*dir(asyncinfer)}


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="'asyncinfer' has no attribute 'Engin'"):
        getattr(asyncinfer, "Engin")  # noqa: B009 - mypy knows that it is not there
    assert not hasattr(asyncinfer, "_engine")
    with pytest.raises(ImportError, match="cannot import name 'Engin'"):
        exec("from asyncinfer import Engin")


#: What runs -> modules that it does without: each takes a good part of the time that it has.
LATE = {
    "import asyncinfer": ("anyio", "asyncio", "asyncinfer.errors", "importlib.metadata", "json"),
    "import asyncinfer; asyncinfer.__version__": ("anyio", "asyncio", "asyncinfer.errors"),
    "from asyncinfer import EngineConfig, SamplingParams": ("jinja2", "tokenizers", "numpy"),
    "from asyncinfer.cli import main; main(['--help'])": (
        *("anyio", "asyncio", "rich", "asyncinfer.engine", "asyncinfer.config"),
        *("jinja2", "tokenizers", "numpy"),
    ),
    "from asyncinfer import Engine": ("torch", "numpy", "trio", "gguf", "huggingface_hub"),
}


@pytest.mark.parametrize("program", LATE)
def test_imports_stay_late(program: str) -> None:
    """Which modules are there tells what a start costs, on any machine and under any load."""
    checked = f"""
import sys
try:
    {program}
except SystemExit as ended:
    assert ended.code == 0
early = sorted({{*{LATE[program]!r}}} & sys.modules.keys())
assert not early, early
"""
    command = [sys.executable, "-W", "error", "-c", checked]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_every_public_name_is_there() -> None:
    for module in ("asyncinfer", *PUBLIC_MODULES):
        loaded = import_module(module)
        assert all(getattr(loaded, name) is not None for name in loaded.__all__), module
    assert set(errors.__all__) <= set(asyncinfer.__all__)


@pytest.mark.parametrize(
    "module", ["asyncinfer", "asyncinfer.testing", "asyncinfer.bench", "asyncinfer.cli.bench"]
)
def test_importing_brings_no_torch_and_changes_nothing(module: str) -> None:
    """torch is imported by the first engine, on its own thread."""
    program = f"""
import logging, os, signal, sys
def state():
    handlers = [signal.getsignal(n) for n in signal.valid_signals()]
    return dict(os.environ), handlers, logging.root.level, logging.root.handlers[:]
before = state()
import {module}
assert "torch" not in sys.modules, "importing takes a second longer"
assert state() == before, "importing changed the host"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", sorted(asyncinfer.__all__))
def test_every_public_name_is_documented(name: str) -> None:
    assert _heading(name) or re.search(rf"^\| `{name}`", REFERENCE, re.MULTILINE)


def test_every_log_event_is_documented() -> None:
    table = REFERENCE.partition("\n## Log events\n")[2]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(EVENTS)


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_every_public_module_is_documented(module: str) -> None:
    assert _heading(module)
    missing = [name for name in import_module(module).__all__ if f"`{name}" not in REFERENCE]
    assert not missing


@pytest.mark.parametrize("options", [EngineConfig, SamplingParams])
def test_every_option_is_documented(options: type) -> None:
    """One row per option, with the default it really has."""
    chapter = REFERENCE.split(f"### `{options.__name__}`")[1].split("\n## ")[0]
    for field in dataclasses.fields(options):
        row = re.search(rf"^\| `{field.name}` \| ([^|]*) \|", chapter, re.MULTILINE)
        assert row, field.name
        default = field.default_factory() if callable(field.default_factory) else field.default
        assert ast.literal_eval(row[1].strip(" `")) == default, field.name


#: Group -> how the table begins that lists its names.
TABLES = {
    "asyncinfer.cache_policies": "| `cache_policy` | arguments |",
    "asyncinfer.models": "| architecture | |",
    "asyncinfer.observers": "| `observers` | arguments |",
    "asyncinfer.proposers": "| `proposers` | arguments |",
    "asyncinfer.samplers": "| `sampler` | arguments |",
    "asyncinfer.schedulers": "| `scheduler` | arguments |",
}


@pytest.mark.parametrize("registry", plugins.registries(), ids=lambda registry: registry.group)
def test_every_shipped_plugin_is_documented(registry: plugins.Registry[Any]) -> None:
    """One row per name, in their order, with the arguments it takes and their defaults."""
    header, _, *rows = _table(TABLES[registry.group])
    names = [ast.literal_eval(row[0].strip("`")) for row in rows]
    assert names == [name for name in registry.names() if registry.is_built_in(name)]
    if header[1] != "arguments":
        return
    for name, (_, written, *_) in zip(names, rows, strict=True):
        parameters = inspect.signature(registry.factory(name)[0]).parameters
        found = dict(re.findall(r"`(\w+)=([^`]*)`", written))
        assert list(found) == list(parameters), name
        for argument, default in found.items():
            assert ast.literal_eval(default) == parameters[argument].default, f"{name}.{argument}"


def _table(header: str) -> list[list[str]]:
    """The cells of the reference's one table that begins so."""
    _, _, table = REFERENCE.partition(f"\n{header}")
    assert header not in table, header
    lines = (header + table).partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.removeprefix("|").split("|")] for line in lines]


def test_no_two_classes_share_a_name() -> None:
    """Private ones may, since nobody meets them outside of their file."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_every_method_is_documented() -> None:
    for owner in (asyncinfer.Engine, asyncinfer.Stream):
        for name in dir(owner):
            if not name.startswith("_"):
                assert re.search(rf"\b{name}\b", REFERENCE), f"{owner.__name__}.{name}"


def _heading(name: str) -> bool:
    return bool(re.search(rf"^#+ .*`{re.escape(name)}`", REFERENCE, re.MULTILINE))
