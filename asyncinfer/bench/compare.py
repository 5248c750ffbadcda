"""`asyncinfer bench compare`: two records side by side."""

from __future__ import annotations

from dataclasses import dataclass, fields

from asyncinfer.bench.environment import Environment
from asyncinfer.bench.record import BenchError, Figure, Record

__all__ = ["Change", "changes", "differences"]


@dataclass(frozen=True, slots=True)
class Change:
    """A figure in both records; one of them is None where only the other has it."""

    name: str
    unit: str
    before: Figure | None
    after: Figure | None

    @property
    def ratio(self) -> float | None:
        """After over before."""
        if self.before is None or self.after is None or not self.before.value:
            return None
        return self.after.value / self.before.value

    @property
    def better(self) -> bool | None:
        """Whether `after` is the better one; None if they are equal or cannot be compared."""
        if self.before is None or self.after is None or self.before.value == self.after.value:
            return None
        return (self.after.value < self.before.value) == (self.after.better == "lower")


def changes(before: Record, after: Record) -> tuple[Change, ...]:
    """Figure by figure, in the order of `before`. Raises `BenchError` for different benchmarks."""
    if before.benchmark != after.benchmark:
        raise BenchError(f"{before.benchmark!r} and {after.benchmark!r} answer different questions")
    old = {figure.name: figure for figure in before.figures}
    new = {figure.name: figure for figure in after.figures}
    return tuple(
        Change(name, (new.get(name) or old[name]).unit, old.get(name), new.get(name))
        for name in {**old, **new}
    )


def differences(before: Record, after: Record) -> tuple[tuple[str, str, str], ...]:
    """What else differs: `(what, before, after)` of environment and options."""
    found = []
    for field in fields(Environment):
        one, other = (getattr(record.environment, field.name) for record in (before, after))
        if one != other:
            found.append((field.name, str(one), str(other)))
    for name in {**before.options, **after.options}:
        one, other = before.options.get(name), after.options.get(name)
        if one != other:
            found.append((f"option {name}", str(one), str(other)))
    return tuple(found)
