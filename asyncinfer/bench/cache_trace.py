"""Traces of requests, as the Mooncake project publishes them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from asyncinfer.bench.record import BenchError
from asyncinfer.protocols import ConversationState

__all__ = ["TraceRow", "read_trace"]


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request."""

    #: Seconds since the trace began.
    time: float
    #: Names of the prompt's blocks, of 512 tokens each (the last may have fewer): equal ids name
    #: equal blocks after equal prefixes.
    ids: tuple[int, ...]
    #: The conversation that it is a request of, and what that does from its answer on.
    conversation: int | None = None
    then: ConversationState = "live"


def read_trace(path: Path) -> list[TraceRow]:
    """Read JSON lines with `timestamp` (milliseconds) and `hash_ids`; where they are there, with
    `conversation` (an integer) and `then` ("live", "waiting" or "over"); other fields are of no
    matter here. Raises `BenchError` that names the line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: cannot be read: {error}") from error
    rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise BenchError(f"{path}: holds no requests")
    return rows


def _row(line: str, where: str) -> TraceRow:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{where}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BenchError(f"{where}: must be an object with timestamp and hash_ids")
    time, ids = data.get("timestamp"), data.get("hash_ids")
    if isinstance(time, bool) or not isinstance(time, int | float) or not time >= 0:
        raise BenchError(f"{where}: timestamp is {time!r}; must be milliseconds, 0 or more")
    if not isinstance(ids, list) or not ids or not all(map(_is_id, ids)):
        raise BenchError(f"{where}: hash_ids must be a list of integers from 0 to 2**31 - 1")
    conversation, then = data.get("conversation"), data.get("then", "live")
    if conversation is not None and not _is_id(conversation):
        raise BenchError(f"{where}: conversation must be an integer from 0 to 2**31 - 1")
    if then not in get_args(ConversationState):
        raise BenchError(f"{where}: then is {then!r}; must be one of {get_args(ConversationState)}")
    return TraceRow(time / 1e3, tuple(ids), conversation, then)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
