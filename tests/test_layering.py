"""Imports rise in one order, without cycles; what embeds the engine uses public names only."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = "asyncinfer"
TOP = Path(__file__).resolve().parent.parent
ROOT = TOP / PACKAGE
#: The tests' own way into an engine, so that no other test goes there.
INSIDE = "support"
#: It looks whether a slot that was left still holds lists.
SLOTS = "sampling.test_state"
#: The one module that names what is above it, as strings: plugins that are imported when asked for.
NAMES_PLUGINS = "asyncinfer.plugins.groups"


def levels(page: str) -> list[tuple[str, ...]]:
    """The rooms of each level, bottom to top, from the table of the architecture page."""
    section = page.partition("\n## Rooms\n")[2].partition("\n## ")[0]
    found = []
    for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        paths = re.findall(r"`([\w/]+?)(?:/|\.py)`", row)
        found.append(tuple(path.removeprefix(f"{PACKAGE}/") for path in paths))
    return [tuple("" if one == "__init__" else one for one in row) for row in found]


#: A room imports from its own level and from those below.
LEVELS = levels((TOP / "docs" / "architecture.md").read_text("utf-8"))
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
#: These show that the engine can be embedded: they take from others what any program could.
EMBEDDERS = ("bench", "cli")
NOUNS = ("chunk", "config", "errors", "machine", "params")
PUBLIC = (
    *("", "builtin", "doctor", "integrations", "models", "planner", "plugins", "protocols"),
    *("remote", "server", "testing"),
    *NOUNS,
)

Sources = Mapping[str, str]


@dataclass(frozen=True)
class Import:
    """`module` imports `name` (None: the module as such) from `target`, at `line`."""

    module: str
    target: str
    name: str | None
    line: int

    def __str__(self) -> str:
        what = f"{self.target}:{self.name}" if self.name else self.target
        return f"{self.module}:{self.line} imports {what}"


@cache
def package() -> Sources:
    """Dotted module name -> source. A package goes by its own name, without `__init__`."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(TOP).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text("utf-8")
    return found


def suite() -> Sources:
    """The same of the tests, by their names below `tests/`."""
    top = TOP / "tests"
    return {
        ".".join(path.relative_to(top).with_suffix("").parts): path.read_text("utf-8")
        for path in sorted(top.rglob("*.py"))
    }


@cache
def package_imports() -> list[Import]:
    return imports(package())


@cache
def parsed(source: str) -> ast.Module:
    """Several tests read the whole package: each module is parsed once. Its tree stays: the
    collector, which would go through all trees again and again, waits."""
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def room(module: str) -> str:
    """`asyncinfer.text.stop` -> "text"; the package itself is ""."""
    return module.split(".")[1] if "." in module else ""


def imports(modules: Sources) -> list[Import]:
    """Every import of the package's own modules, wherever in a module it stands."""
    found = []
    exported = exports(modules)
    for module, source in modules.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for target, name in _targets(node, module, modules, exported):
                    found.append(Import(module, target, name, node.lineno))
    return found


def _targets(
    node: ast.Import | ast.ImportFrom,
    module: str,
    modules: Sources,
    exported: Mapping[str, frozenset[str]],
) -> Iterator[tuple[str, str | None]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == PACKAGE:
                yield alias.name, None
        return
    assert node.level == 0, f"{module}:{node.lineno}: relative import"
    base = node.module or ""
    if base.split(".")[0] == PACKAGE:
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            # A package may hand on a function that is named like its module.
            handed_on = base != module and alias.name in exported.get(base, ())
            is_module = inner in modules and not handed_on
            yield (inner, None) if is_module else (base, alias.name)


def unknown_rooms(modules: Sources) -> list[str]:
    return [f"{module}: no level for this room" for module in modules if room(module) not in LEVEL]


def missing_rooms(modules: Sources, level: Iterable[str] = LEVEL) -> list[str]:
    there = {room(module) for module in modules}
    return [f"{name}: has a level and is not there" for name in level if name not in there]


def rises(found: Iterable[Import]) -> list[str]:
    """Imports of a higher level. Those for types only count too: they know what is above."""
    return [
        f"{one}: {room(one.module) or PACKAGE} is below {room(one.target) or PACKAGE}"
        for one in found
        if LEVEL[room(one.module)] < LEVEL[room(one.target)]
    ]


def cycles(edges: Iterable[tuple[str, str]]) -> list[str]:
    """The first cycle, as one line; empty if there is none."""
    graph: dict[str, set[str]] = {}
    for source, target in edges:
        graph.setdefault(source, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def module_cycles(found: Iterable[Import]) -> list[str]:
    """Imports for types only count too: who reads one of the two has to read the other."""
    return cycles((one.module, one.target) for one in found)


def room_cycles(found: Iterable[Import]) -> list[str]:
    """Rooms of one level may use one another, in one direction."""
    pairs = ((room(one.module), room(one.target)) for one in found)
    return cycles((source, target) for source, target in pairs if source != target)


def private_uses(found: Iterable[Import], exported: Mapping[str, frozenset[str]]) -> list[str]:
    """Imports of embedders from modules or names that are not public."""
    problems = []
    for one in found:
        inside = room(one.target) in EMBEDDERS
        if room(one.module) not in EMBEDDERS or inside:
            continue
        names = exported.get(one.target, frozenset())
        if room(one.target) not in PUBLIC or one.target.count(".") > 1:
            problems.append(f"{one}: not a public module")
        elif one.name is not None and one.name not in names | {"__version__"}:
            problems.append(f"{one}: not a public name")
    return problems


#: In every module with a private member of something else than `self` and `cls`.
_OF_OTHERS = re.compile(r"(?<!\bself)(?<!\bcls)\._(?!_)")


def private_members(modules: Sources, allowed: Iterable[str] = ()) -> list[str]:
    """Members with a leading underscore that are touched from outside their class. Modules that are
    `allowed` may; each has to."""
    classes = [
        node
        for source in modules.values()
        if "class " in source
        for node in ast.walk(parsed(source))
        if _is_class(node)
    ]
    ours = {name for one in classes for name in _private_names(one)}
    problems = []
    used = set()
    for module, source in modules.items():
        if not _OF_OTHERS.search(source):
            continue
        tree = parsed(source)
        within: dict[int, set[str]] = {}
        for one in filter(_is_class, ast.walk(tree)):
            names = _private_names(one)
            for node in filter(_is_attribute, ast.walk(one)):
                within.setdefault(id(node), set()).update(names)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr not in ours:
                continue
            if node.attr in within.get(id(node), ()):
                continue
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                used.add(module)
                if module not in allowed:
                    problems.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    return problems + [f"{module}: may and does not" for module in set(allowed) - used]


def _is_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute)


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def _private_names(cls: ast.AST) -> set[str]:
    """What a class calls its own: `self._x`, `def _x`, and `_x = ...` or `_x: T` in its body."""
    names = set()
    for node in ast.walk(cls):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def string_imports(modules: Sources) -> list[Import]:
    """Imports that are written as strings, `asyncinfer.module:name`."""
    found = []
    for module, source in modules.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                target, _, name = node.value.partition(":")
                if name.isidentifier() and target.split(".")[0] == PACKAGE:
                    found.append(Import(module, target, name, node.lineno))
    return found


def exports(modules: Sources) -> dict[str, frozenset[str]]:
    """`__all__` of every module that has one."""
    found = {}
    for module, source in modules.items():
        for node in parsed(source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[module] = frozenset(ast.literal_eval(node.value))
    return found


def test_every_room_has_a_level() -> None:
    assert not unknown_rooms(package())


def test_every_level_has_its_rooms() -> None:
    assert not missing_rooms(package())
    assert missing_rooms(package(), ["attic"]) == ["attic: has a level and is not there"]


def test_imports_never_rise() -> None:
    assert not rises(package_imports())


def test_modules_form_no_cycle() -> None:
    assert not module_cycles(package_imports())


def test_rooms_form_no_cycle() -> None:
    assert not room_cycles(package_imports())


def test_embedders_use_public_names() -> None:
    assert not private_uses(package_imports(), exports(package()))


def test_no_private_name_crosses_modules() -> None:
    private = [
        one
        for one in package_imports()
        if one.name and one.name.startswith("_") and not one.name.startswith("__")
    ]
    assert not private


def test_no_private_member_is_touched_from_outside() -> None:
    assert not private_members({**package(), **suite()}, allowed=(INSIDE, SLOTS))


def test_one_module_names_others_by_strings() -> None:
    found = string_imports(package())
    assert not rises(one for one in found if one.module != NAMES_PLUGINS)
    assert rises(found), "plugins are named elsewhere now: so this exception can go"
    public = exports(package())
    assert [one for one in found if one.name not in public[one.target]] == []


# The checks above can fail: each is shown a package that breaks its rule, and one that does not.

CLEAN = {
    "asyncinfer": "from asyncinfer.engine import Engine\n__all__ = ['Engine']",
    "asyncinfer.errors": "",
    "asyncinfer.text": "from asyncinfer.text.stop import Stop\n__all__ = ['Stop']",
    "asyncinfer.text.stop": (
        "from asyncinfer import errors\nfrom asyncinfer.errors import Bad\n"
        "class Stop:\n    def same(self, other): self._held = other._held"
    ),
    "asyncinfer.cache": "import asyncinfer.text",
    "asyncinfer.engine": "def late():\n    from asyncinfer.text import Stop",
    "asyncinfer.cli": "from asyncinfer import Engine, __version__\nimport asyncinfer.bench",
    "asyncinfer.bench": "import asyncinfer",
}


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("asyncinfer.errors", "from asyncinfer.text import Stop", "rise"),
        ("asyncinfer.errors", "def f():\n    import asyncinfer.engine", "rise"),
        ("asyncinfer.text.stop", "import asyncinfer", "rise"),
        (
            "asyncinfer.text.stop",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncinfer.engine",
            "rise",
        ),
        ("asyncinfer.text.stop", "from asyncinfer.text import Stop", "module cycle"),
        ("asyncinfer.text", "from asyncinfer.cache import LRU", "module cycle"),
        (
            "asyncinfer.text.stop",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncinfer.text",
            "module cycle",
        ),
        ("asyncinfer.text.stop", "import asyncinfer.cache", "room cycle"),
        ("asyncinfer.cli", "from asyncinfer.engine import Engine", "private"),
        ("asyncinfer.bench", "from asyncinfer.errors import hidden", "private"),
        ("asyncinfer.bench", "from asyncinfer import Core", "private"),
        ("asyncinfer.cache", "print(asyncinfer.text.Stop()._held)", "private member"),
        ("asyncinfer.cache", "class Other:\n    def f(self, x): x._held = 1", "private member"),
        ("asyncinfer.text", "load('asyncinfer.engine:Engine')", "rise by a string"),
    ],
)
def test_a_planted_violation_is_found(module: str, line: str, broken: str) -> None:
    assert broken not in _problems(CLEAN)
    planted = {**CLEAN, module: f"{CLEAN[module]}\n{line}"}
    assert broken in _problems(planted)


def test_the_clean_package_passes() -> None:
    assert not _problems(CLEAN)
    assert len(imports(CLEAN)) == 10


def test_a_new_room_needs_a_level() -> None:
    assert unknown_rooms({**CLEAN, "asyncinfer.attic": ""}) == [
        "asyncinfer.attic: no level for this room"
    ]


def _problems(modules: Sources) -> set[str]:
    found = imports(modules)
    checks = {
        "rise": rises(found),
        "module cycle": module_cycles(found),
        "room cycle": room_cycles(found),
        "private": private_uses(found, exports(modules)),
        "private member": private_members(modules),
        "rise by a string": rises(string_imports(modules)),
    }
    return {name for name, problems in checks.items() if problems}


def lost_references(page: str) -> list[str]:
    """Files that a page names and that are not there; and members, written "`Name` in `file.py`"
    or "`Name` (`file.py`)", that the file does not have."""
    lost = []
    named = re.findall(r"(?:`([\w.]+)(?:\(\))?` (?:in |\())?`((?:\w+/)+\w+\.py)`", page)
    for member, path in named:
        found = [each for each in (ROOT / path, TOP / path) if each.is_file()]
        name = member.rpartition(".")[2]
        if not found:
            lost.append(path)
        elif name and not re.search(rf"\b{name}\b", found[0].read_text("utf-8")):
            lost.append(f"{member} in {path}")
    return lost


@pytest.mark.parametrize("page", sorted((TOP / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_pages_name_files_and_members_that_are_there(page: Path) -> None:
    assert not lost_references(page.read_text("utf-8"))


def test_what_a_page_names_wrongly_is_found() -> None:
    right = "`Step` in `scheduler/step.py`, `Core.step` (`engine/core.py`), `tests/support.py`"
    assert not lost_references(right)
    assert lost_references("`Steps` in `scheduler/step.py`") == ["Steps in scheduler/step.py"]
    assert lost_references("see `engine/steps.py`") == ["engine/steps.py"]
