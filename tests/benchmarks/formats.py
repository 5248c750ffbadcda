"""How fast each storage format is beside bfloat16, on a CPU: one random Llama in all of them.

python -m benchmarks.formats --json ../docs/benchmarks/formats.json
python -m benchmarks.formats --table ../docs/benchmarks/formats.json

Every format is opened in a bfloat16 model beside the plain one, and both answer in turns; the ratio
is the median over the turns. Numbers are random, of which speed does not depend.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from asyncinfer import Engine
from asyncinfer.bench import Figure, Record
from asyncinfer.bench.answers import answer_together
from asyncinfer.bench.checkpoint import write_checkpoint
from asyncinfer.bench.loops import run_on
from asyncinfer.bench.quantised_model import LAYOUTS, SCALES, write_gguf, write_quantised

__all__ = ["FORMATS", "WORK", "FormatRow", "formats_table", "measure_formats"]

SHAPE: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
LAYERS: Final = 6
MADE: Final = ("int8", "fp8", "int4", "int4-128")
#: Published layouts of safetensors, by the names in the table.
PUBLISHED: Final = {"fp8-blocks": "fp8", **{name: name for name in LAYOUTS[2:]}}
FORMATS: Final = (*MADE, *PUBLISHED, *SCALES)
#: Work -> requests at once, tokens of a prompt and of an answer.
WORK: Final = {
    "1 request": (1, 16, 32),
    "16 requests": (16, 16, 16),
    "64 requests": (64, 16, 12),
    "prefill of 512": (1, 512, 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRow:
    """One format at one kind of work."""

    format: str
    work: str
    #: Tokens a second, the median of the turns, and of the plain model in bfloat16 between them.
    tokens_per_second: float
    plain: float
    #: The median of the turns' ratios of the two.
    ratio: float


def measure_formats(
    formats: Sequence[str], *, layers: int = LAYERS, repeat: int = 2, shape: dict[str, Any] = SHAPE
) -> list[FormatRow]:
    """Each of `formats` beside bfloat16 at each kind of work."""
    with tempfile.TemporaryDirectory(prefix="asyncinfer-bench-") as scratch:
        rows: list[FormatRow] = run_on(
            "asyncio", _measured, formats, layers, repeat, shape, Path(scratch)
        )
    return rows


async def _measured(
    formats: Sequence[str], layers: int, repeat: int, shape: dict[str, Any], folder: Path
) -> list[FormatRow]:
    plain = folder / "plain"
    write_checkpoint({**shape, "num_hidden_layers": layers, "dtype": "bfloat16"}, plain)
    found = []
    async with _engine(plain) as beside:
        for name in formats:
            async with AsyncExitStack() as stack:
                if name in MADE:
                    engine = await stack.enter_async_context(_engine(plain, name))
                else:
                    kept = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
                    path = _written(name, shape, layers, Path(kept))
                    engine = await stack.enter_async_context(_engine(path))
                for work in WORK:
                    speeds = [await _both(work, engine, beside) for _ in range(repeat + 1)]
                    found.append(_row(name, work, speeds[1:]))
                    print(found[-1], flush=True)
    return found


def _written(name: str, shape: dict[str, Any], layers: int, folder: Path) -> Path:
    if name in SCALES:
        return write_gguf(shape, layers, folder / "model.gguf", lambda matrix: name)
    return write_quantised(shape, layers, folder, PUBLISHED[name])


def _engine(path: Path, weights: str = "plain") -> Engine:
    return Engine(
        path, device="cpu", dtype="bfloat16", weights=weights, max_context=640, prefix_cache=False
    )


async def _both(work: str, engine: Engine, beside: Engine) -> tuple[float, float]:
    """Tokens a second of the two, one after the other."""
    count, prompt, tokens = WORK[work]
    draw = random.Random(work)
    asked = [
        {"prompt": [draw.randrange(3, 128) for _ in range(prompt)], "temperature": 0.0}
        for _ in range(count)
    ]
    done = prompt if tokens == 1 else count * tokens
    first, second = [(await answer_together(one, tokens, asked))[0] for one in (engine, beside)]
    return done / first, done / second


def _row(name: str, work: str, speeds: Sequence[tuple[float, float]]) -> FormatRow:
    return FormatRow(
        format=name,
        work=work,
        tokens_per_second=median(ours for ours, _ in speeds),
        plain=median(plain for _, plain in speeds),
        ratio=median(ours / plain for ours, plain in speeds),
    )


def formats_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: by how much each format is faster than bfloat16."""
    yield f"| format | {' | '.join(WORK)} |"
    yield f"|---|{'---|' * len(WORK)}"
    ratios = {(row["format"], row["work"]): row["ratio"] for row in rows}
    for name in dict.fromkeys(row["format"] for row in rows):
        yield f"| `{name}` | {' | '.join(f'{ratios[name, work]:.2f}' for work in WORK)} |"
    plain = " | ".join(
        f"{median(row['plain'] for row in rows if row['work'] == work):.0f}" for work in WORK
    )
    yield f"| bfloat16, tokens a second | {plain} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--format", action="append", choices=FORMATS)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json", type=Path, help="a record that is there keeps its other formats")
    parser.add_argument("--table", type=Path, help="print a record's table; measure nothing")
    options = parser.parse_args()
    if options.table is None:
        chosen = options.format or FORMATS
        rows = [asdict(row) for row in measure_formats(chosen, repeat=options.repeat)]
        if options.json is not None:
            if options.json.exists():
                before = Record.load(options.json).detail["rows"]
                rows = [row for row in before if row["format"] not in chosen] + rows
            _record(rows, options.repeat).save(options.json)
    else:
        rows = Record.load(options.table).detail["rows"]
    print("\n".join(formats_table(rows)))


def _record(rows: list[dict[str, Any]], repeat: int) -> Record:
    figures = tuple(
        Figure(f"{row['format']}, {row['work']}: over bfloat16", row["ratio"], "x", "higher", 1.0)
        for row in rows
    )
    return Record("formats", {"repeat": repeat}, figures, {"rows": rows})


if __name__ == "__main__":
    main()
