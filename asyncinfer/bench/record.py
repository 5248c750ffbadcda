"""`Record`: one run of a benchmark as data: figures, environment, raw result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from asyncinfer.bench.environment import Environment
from asyncinfer.errors import AsyncInferError

__all__ = ["BenchError", "Figure", "Record"]

SCHEMA: Final = 1


class BenchError(AsyncInferError):
    """A measurement did not measure what it says, or a record cannot be read."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run."""

    name: str
    value: float
    unit: str
    better: Literal["lower", "higher"]
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better == "lower" else self.value >= self.target


@dataclass(frozen=True, slots=True)
class Record:
    """One run. `save` writes it as JSON; such files are never edited by hand."""

    benchmark: str
    #: Options of the run.
    options: Mapping[str, Any]
    figures: tuple[Figure, ...]
    #: The benchmark's own result, as JSON data.
    detail: Mapping[str, Any]
    environment: Environment = field(default_factory=Environment.now)
    #: When it was made, UTC.
    recorded: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def save(self, path: Path) -> None:
        data = {"schema": SCHEMA, **asdict(self)}
        try:
            path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", "utf-8")
        except OSError as error:
            raise BenchError(f"{path}: cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: Path) -> Record:
        """Raises `BenchError` for a file that is no record."""
        try:
            data = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise BenchError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise BenchError(f"{path}: is not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise BenchError(f"{path}: is not a record of `asyncinfer bench` (schema {SCHEMA})")
        try:
            return cls(
                benchmark=data["benchmark"],
                options=data["options"],
                figures=tuple(Figure(**figure) for figure in data["figures"]),
                detail=data["detail"],
                environment=Environment(**data["environment"]),
                recorded=data["recorded"],
            )
        except (KeyError, TypeError) as error:
            raise BenchError(f"{path}: a part is missing or unknown: {error}") from error
