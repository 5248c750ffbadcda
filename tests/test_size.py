"""No room of the package grows unseen: a bound rises with the capability that needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.count_lines import PACKAGE, Lines, count, rooms, table, total

#: Lines of each room, prose and blank ones included. Whoever mends or tidies makes room for it; a
#: new capability raises the bound of its rooms by what it needs.
MOST = {
    "adapters": 987,
    "attention": 3_058,
    "bench": 8_496,
    "builtin": 900,
    "cache": 2_376,
    "cli": 3_398,
    "clients": 572,
    "doctor": 708,
    "engine": 9_218,
    "files": 210,
    "grammar": 1_310,
    "integrations": 1_815,
    "kernels": 15_776,
    "layers": 2_369,
    "models": 11_140,
    "planner": 1_299,
    "plugins": 1_456,
    "protocols": 700,
    "quantization": 3_022,
    "remote": 1_773,
    "runner": 5_678,
    "samplers": 420,
    "sampling": 2_288,
    "scheduler": 3_204,
    "server": 3_631,
    "speculation": 1_052,
    "telemetry": 603,
    "testing": 10_024,
    "text": 3_617,
    "tools": 2_976,
    "weights": 3_961,
}
#: Lines of all modules that lie beside the rooms.
MOST_BESIDE = 2_484
#: Lines of a file, prose and blank ones included: what is read in one sitting.
MOST_OF_A_FILE = 300
MODULE = '''"""Of two lines.

Blank ones count as prose here."""

# A comment.
x = 1  # behind code


def f() -> str:
    """Says why."""
    ...
    return """no docstring,

# and no comment"""
'''


def test_no_room_grows_unseen(report: Callable[[str], None]) -> None:
    for line in table():
        report(line)
    lines = {name: each.all for name, each in rooms().items() if not name.endswith(".py")}
    assert lines.keys() == MOST.keys()
    over = {name: now - MOST[name] for name, now in lines.items() if now > MOST[name]}
    assert not over, f"lines too many by room: {over}; delete as many, or name the capability"


def test_the_modules_beside_the_rooms_stay_few() -> None:
    lines = sum(each.all for name, each in rooms().items() if name.endswith(".py"))
    assert lines <= MOST_BESIDE


def test_no_file_is_too_long_to_be_read_in_one_sitting() -> None:
    lines = {
        str(path.relative_to(PACKAGE)): len(path.read_text("utf-8").splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    over = {name: n for name, n in lines.items() if n > MOST_OF_A_FILE}
    assert not over, f"files of more than {MOST_OF_A_FILE} lines: {over}; find the second idea"


def test_lines_are_told_apart() -> None:
    assert count(MODULE) == Lines(code=6, prose=5, blank=3)
    assert count("") == Lines()


def test_every_line_is_counted_once() -> None:
    paths: list[Path] = [*PACKAGE.rglob("*.py")]
    assert len(paths) > 100
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in paths)
    assert total(rooms().values()).all == lines
