"""Which tensor of a refused shard is at fault: what the safetensors library says is not always
that."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any, Final

from asyncinfer.weights.json_file import KeyTwice, unique_keys

__all__ = ["MOST_HEADER_BYTES", "tensor_at_fault"]

#: Of a shard of some hundred thousand tensors; the library takes more.
MOST_HEADER_BYTES: Final = 16 << 20
_BITS: Final = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


#: No tensor has more dimensions; the product of a hundred million numbers takes for ever.
_MOST_DIMENSIONS: Final = 64


def tensor_at_fault(path: Path) -> str | None:
    """The first tensor of the shard that its header cannot mean: named twice, of no known dtype, of
    a shape that is none or is not as large as its bytes, beginning elsewhere than where the one
    before ends, or behind the end of the file. None: it is not one tensor's fault."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            size = path.stat().st_size - 8 - length
            if size < 0 or length > MOST_HEADER_BYTES:
                return None
            header = json.loads(file.read(length), object_pairs_hook=unique_keys)
    except KeyTwice as twice:
        return twice.key
    except (OSError, ValueError, RecursionError, struct.error):
        return None
    if not isinstance(header, dict):
        return None
    header.pop("__metadata__", None)
    spans = {}
    for name, entry in header.items():
        span = _span(entry)
        if span is None:
            return str(name)
        spans[name] = span
    expected = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda its: its[1]):
        if begin != expected or end > size:
            return str(name)
        expected = end
    return None


def _span(entry: Any) -> tuple[int, int] | None:
    """Where a tensor begins and ends, if that is what its dtype and shape make of it."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]}:
            pass
        case _:
            return None
    if dtype not in _BITS or len(shape) > _MOST_DIMENSIONS:
        return None
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        return None
    return (begin, end) if math.prod(shape) * _BITS[dtype] == 8 * (end - begin) else None
