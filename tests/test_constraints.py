"""constraints.txt pins everything that an installation brings in, and nothing else."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def _pins(file: str) -> list[Requirement]:
    lines = (ROOT / file).read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


PINS = _pins("constraints.txt")
#: With versions that those of `constraints.txt` exclude.
FRAMEWORKS = _pins("constraints-frameworks.txt")


def _needed(package: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> None:
    """Collect a package and what it requires here, with the extras asked for."""
    if (package, extras) in seen:
        return
    seen.add((package, extras))
    try:
        lines = requires(package) or []
    except PackageNotFoundError:
        return  # left out by hand in this environment: its pin is still checked by name
    for line in lines:
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in extras | {""}):
            _needed(canonicalize_name(one.name), frozenset(one.extras), seen)


def test_every_requirement_is_pinned() -> None:
    seen: set[tuple[str, frozenset[str]]] = set()
    _needed("asyncinfer", frozenset({"test"}), seen)
    names = {name for name, _ in seen} - {"asyncinfer"}
    pinned = {canonicalize_name(pin.name) for pin in PINS}
    # A build of torch with CUDA pins its own.
    unpinned = {n for n in names - pinned if not n.startswith(("nvidia-", "cuda-"))}
    assert not unpinned


@pytest.mark.parametrize("pins", [PINS, FRAMEWORKS], ids=["all", "frameworks"])
def test_pins_are_exact_versions_of_public_packages(pins: list[Requirement]) -> None:
    assert len(pins) == len({canonicalize_name(pin.name) for pin in pins})
    for pin in pins:
        assert pin.url is None, pin
        assert re.fullmatch(r"==\d[\w.]*", str(pin.specifier)), pin
