"""The tiles of the small linear kernels: a table by shape, and a rule for all other shapes.

The counts are those of an H100 or H200 with 132 multiprocessors. They are the same on every device,
so that a product is summed in the same order everywhere. Table and rule were derived from counts of
programs and bytes. For one product of one token 18 other tiles were measured on an H200: none was
faster by more than half a microsecond (docs/benchmarks/h200.md). A measurement on a device also
tries `tile_candidates`, and an engine uses the fastest (`kernels/choices.py`).

**GEMV, up to 4 tokens.** A program has one warp, whose lanes hold the inputs in the layout of the
weight's tile, so that nothing is exchanged inside the loop. A program takes 8 rows of the weight
where that leaves three programs a multiprocessor, else 4. With more than one token it takes 4,
since their sums take registers. It takes 256 inputs at a time, 16 bytes a lane. About 32 KiB a
multiprocessor must be in flight to keep the memory busy, so few programs have more stages.

An int8 weight takes 4 rows and 512 inputs, for up to 2 tokens. With more tokens, sums would leave
registers for so few rows that most of the bytes read would be inputs. A weight of 4 bits takes 2
rows for 2 tokens, since the tables of its codes take registers, too.

**Skinny GEMM, up to 64 tokens.** Each program reads its inputs from the L2 cache. Their bytes are
`tokens / rows` times those of its part of the weight. So a program takes 64 rows up to 16 tokens,
else 128. The inputs are split until there are 92 programs (70 % of the multiprocessors), with at
least 256 inputs each. Stages fill 96 KiB of shared memory, so that two programs fit on one
multiprocessor.

**Grouped GEMM, any number of tokens.** The tiles are those of the skinny GEMM, with up to 128
tokens of one expert. Inputs are not split, since experts make programs enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from asyncinfer.kernels.choices import Key, chosen

__all__ = [
    "SMALL_TOKENS",
    "Tiles",
    "gemv_tokens",
    "grouped_tiles",
    "tile_candidates",
    "tile_key",
    "tiles_for",
]

#: The most tokens that these kernels compute. The device's own library computes more.
SMALL_TOKENS = 64

_MULTIPROCESSORS = 132
_ENOUGH_PROGRAMS = 92
_BYTES_ON_THEIR_WAY = 32 << 10
_STAGED_BYTES = 96 << 10
_MOST_SPLITS = 8
_LEAST_STRETCH = 256
#: The most sums of a GEMV's program of one warp: 128 a lane.
_MOST_SUMS = 4096


@dataclass(frozen=True, slots=True)
class Tiles:
    """The part of a product that one program computes."""

    #: Rows of the weight; of a gated product half of them gate and half up.
    rows: int
    #: Inputs at a time.
    depth: int
    warps: int
    stages: int
    #: Programs that share the inputs of the same rows.
    splits: int = 1


#: (outputs, inputs, token bucket) -> tiles better than the rule's.
_TABLE: dict[tuple[int, int, int], Tiles] = {
    # Qwen3-0.6B's output projections: so few rows that 2 a program still leave it four of 8 KiB.
    (1024, 2048, 1): Tiles(rows=2, depth=256, warps=1, stages=8),
    (1024, 3072, 1): Tiles(rows=2, depth=256, warps=1, stages=8),
    # Qwen3-4B's gate and up: 152 blocks of 128 rows would leave most multiprocessors with one and
    # some with two; 304 of 64 are dealt out more evenly.
    (19456, 2560, 32): Tiles(rows=64, depth=128, warps=4, stages=4),
    (19456, 2560, 64): Tiles(rows=64, depth=128, warps=4, stages=3),
}


def gemv_tokens(itemsize: float) -> int:
    """The most tokens of a GEMV. A product of more tokens is a skinny GEMM."""
    return 4 if itemsize >= 2 else 2


def tiles_for(outputs: int, inputs: int, tokens: int, itemsize: float) -> Tiles:
    """Tiles for a weight `[outputs, inputs]` of `itemsize` bytes an element (a half for 4 bits), at
    1 to 64 tokens: those of this thread's choices, else the derived ones.

    Tiles are equal for all token counts of a bucket. Buckets end at 1, 2, 4, 16, 32 and 64 tokens.
    """
    bucket = _bucket(tokens)
    derived = _derived(outputs, inputs, bucket, itemsize)
    return chosen(tile_key(outputs, inputs, bucket, itemsize), derived)


def tile_key(outputs: int, inputs: int, bucket: int, itemsize: float) -> Key:
    """The key of a choice of tiles."""
    return ("linear_small", outputs, inputs, bucket, itemsize)


def tile_candidates(outputs: int, inputs: int, bucket: int, itemsize: float) -> tuple[Tiles, ...]:
    """Tiles that a measurement tries, the derived ones first. All fit the shared memory and the
    registers of every GPU that the kernels are compiled for."""
    own = _derived(outputs, inputs, bucket, itemsize)
    if bucket <= gemv_tokens(itemsize):
        tried = [replace(own, rows=own.rows // 2, stages=min(2 * own.stages, 8))]
        # Sums take a register for each row, token and input of a lane.
        if 2 * own.rows * own.depth * bucket <= _MOST_SUMS:
            tried.append(replace(own, rows=2 * own.rows, stages=max(own.stages // 2, 3)))
        tried.append(replace(own, depth=2 * own.depth, warps=2, stages=max(own.stages // 2, 2)))
    else:
        wide = 64 if own.rows == 128 else 128
        tried = [_skinny_rule(outputs, inputs, max(bucket, 16), itemsize, wide)]
        tried += [replace(own, splits=splits) for splits in (own.splits // 2, 2 * own.splits)]
        tried.append(replace(own, warps=8))
        tried = [each for each in tried if each.splits == 1 or _splits(inputs, each.splits)]
    tried = [each for each in tried if each.rows >= 2 and each.splits >= 1]
    return tuple(dict.fromkeys((own, *tried)))


def _bucket(tokens: int) -> int:
    return next(bucket for bucket in (1, 2, 4, 16, 32, 64) if tokens <= bucket)


def _derived(outputs: int, inputs: int, bucket: int, itemsize: float) -> Tiles:
    entry = _TABLE.get((outputs, inputs, bucket)) if itemsize == 2 else None
    if entry is not None:
        return entry
    if bucket <= gemv_tokens(itemsize):
        return _gemv_rule(outputs, bucket, itemsize)
    return _skinny_rule(outputs, inputs, max(bucket, 16), itemsize)


def _splits(inputs: int, splits: int) -> bool:
    """Whether each of `splits` programs has enough inputs."""
    return splits <= _MOST_SPLITS and inputs >= splits * _LEAST_STRETCH


def _gemv_rule(outputs: int, bucket: int, itemsize: float) -> Tiles:
    rows = 8 if bucket == 1 and outputs >= 8 * 3 * _MULTIPROCESSORS else 4
    depth = 256
    if itemsize <= 1:
        rows, depth = 4 if itemsize == 1 or bucket == 1 else 2, 512
    programs = max(outputs / rows / _MULTIPROCESSORS, 1)
    stages = _BYTES_ON_THEIR_WAY / programs / (rows * depth * itemsize)
    return Tiles(rows=rows, depth=depth, warps=1, stages=min(max(int(stages) + 1, 3), 8))


def _skinny_rule(
    outputs: int, inputs: int, bucket: int, itemsize: float, rows: int | None = None
) -> Tiles:
    if rows is None:
        rows = 128 if bucket > 16 and outputs >= 2048 else 64
    depth = 8192 // rows
    splits = 1
    while -(-outputs // rows) * splits < _ENOUGH_PROGRAMS and _splits(inputs, 2 * splits):
        splits *= 2
    # The inputs of a weight of 8 or 4 bits have at least 2 bytes.
    stages = int(_STAGED_BYTES // (depth * (rows * itemsize + bucket * max(itemsize, 2))))
    return Tiles(rows=rows, depth=depth, warps=4, stages=min(max(stages, 2), 6), splits=splits)


def grouped_tiles(rows: int, experts: int, itemsize: float) -> tuple[int, Tiles]:
    """How many of an expert's tokens a program takes, and its tiles, for `rows` rows over `experts`
    experts: about as many tokens as an expert has on average, 16 to 128."""
    tokens = 16
    while tokens < 128 and tokens * experts < rows:
        tokens *= 2
    if itemsize == 4:  # no tensor cores: sums and inputs in registers
        return min(tokens, 32), Tiles(rows=64, depth=32, warps=4, stages=3)
    weight_rows = 64 if tokens <= 32 else 128
    depth = 8192 // weight_rows
    stages = int(_STAGED_BYTES // (depth * (weight_rows * itemsize + tokens * 2)))
    warps = 8 if tokens == 128 else 4
    return tokens, Tiles(rows=weight_rows, depth=depth, warps=warps, stages=min(stages, 6))
