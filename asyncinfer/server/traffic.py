"""`Traffic`: counters of requests, and the page `/metrics`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Final

from asyncinfer.stats import EngineStats

__all__ = ["Traffic"]

#: Fields of `EngineStats` that are states; all others count since the engine was opened.
_STATES: Final = frozenset(
    [
        *("running", "waiting", "paused", "held_bytes", "adapters", "adapter_bytes", "fallbacks"),
        *("blocks_total", "blocks_free", "blocks_cached", "blocks_pinned"),
        *("window_pages_total", "window_pages_free", "window_pages_cached"),
        *("state_pages_total", "state_pages_free", "state_pages_cached"),
    ]
)


class Traffic:
    """Requests by path and status. Used on one event loop at a time."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, int]] = Counter()
        self._under_way = 0

    def begin(self) -> None:
        """Count a request as running."""
        self._under_way += 1

    def end(self, path: str, status: int) -> None:
        """Count the end of a request to `path`."""
        self._under_way -= 1
        self._ended[path, status] += 1

    def metrics(self, stats: Mapping[str, EngineStats]) -> str:
        """These counters and those of engines by name, in Prometheus' text format 0.0.4."""
        lines = ["# TYPE asyncinfer_http_requests_under_way gauge"]
        lines.append(f"asyncinfer_http_requests_under_way {self._under_way}")
        lines.append("# TYPE asyncinfer_http_requests_total counter")
        for (path, status), count in sorted(self._ended.items()):
            labels = f'path="{_escaped(path)}",status="{status}"'
            lines.append(f"asyncinfer_http_requests_total{{{labels}}} {count}")
        for field in dataclasses.fields(EngineStats):
            if field.name == "drafts":
                continue  # Two counts for each position in a draft of each method.
            state = field.name in _STATES
            name = f"asyncinfer_{field.name}" if state else f"asyncinfer_{field.name}_total"
            lines.append(f"# TYPE {name} {'gauge' if state else 'counter'}")
            for model, each in stats.items():
                value = getattr(each, field.name)
                value = len(value) if isinstance(value, tuple) else value
                lines.append(f'{name}{{model="{_escaped(model)}"}} {value}')
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    # The name of a folder or a file may have lone surrogates.
    text = text.encode(errors="backslashreplace").decode()
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
