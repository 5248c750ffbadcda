"""A record of `asyncinfer bench accuracy` as a table of Markdown, without speeds, since the machine
may have been busy:

python -m benchmarks.accuracy_table docs/benchmarks/accuracy-smollm2.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from asyncinfer.bench import Record

__all__ = ["accuracy_table"]


def accuracy_table(path: Path) -> list[str]:
    """Lines: what every row costs and takes, beside the first."""
    rows = Record.load(path).detail["rows"]
    lines = [
        "| model | weights | KV | perplexity | | MB of weights |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        more = 100 * (row["perplexity"] / rows[0]["perplexity"] - 1)
        change = f"{more:+.2f} %" if row is not rows[0] else ""
        lines.append(
            f"| `{row['model']}` | `{row['weights']}` | `{row['kv']}` | {row['perplexity']:.3f} "
            f"| {change} | {row['weight_bytes'] / 1e6:.1f} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(accuracy_table(Path(sys.argv[1]))))
