"""The orders in which a checkpoint's tensor may hold the numbers of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

__all__ = ["NumberOrder", "as_bytes", "ordered"]

#: The places of a word of AWQ at which its eight outputs of 4 bits are, in the order of outputs.
AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
#: Outputs whose numbers are put in order at a time.
_ROWS: Final = 512


@dataclass(frozen=True, slots=True)
class NumberOrder:
    """The order of a tensor's numbers, which `ordered` turns into a row of inputs for each output.
    Numbers of 4 bits are two in a byte there, the first in the low half.

    - "rows": the tensor has this order.
    - "words": int32 `[words, out]`; a word holds neighbouring inputs (GPTQ).
    - "awq": int32 `[in, out / 8]`; a word holds eight outputs of 4 bits, at `AWQ_PLACES`.
    """

    kind: Literal["rows", "words", "awq"] = "rows"
    #: Bits of each byte that the checkpoint stores inverted.
    flip: int = 0
    #: Whether a byte's two numbers are swapped.
    swapped: bool = False


def ordered(stored: torch.Tensor, order: NumberOrder, outputs: int) -> torch.Tensor:
    """The numbers of a tensor in this order: uint8 `[outputs, bytes]`."""
    if order.kind == "awq":
        numbers = _from_awq(stored, outputs)
    else:
        # A word holds its inputs in the order of bytes, low bits first.
        numbers = as_bytes(stored.t() if order.kind == "words" else stored).view(outputs, -1)
    if order.swapped:
        numbers = numbers << 4 | numbers >> 4
    return numbers ^ order.flip if order.flip else numbers


def as_bytes(packed: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor `[..., n]`: uint8 `[..., bytes]`."""
    # A transposed row is contiguous, too, with strides that no view of bytes may have.
    data = packed.contiguous().flatten().view(torch.uint8)
    return data.view(*packed.shape[:-1], packed.shape[-1] * packed.element_size())


def _from_awq(packed: torch.Tensor, outputs: int) -> torch.Tensor:
    size = packed.shape[0] // 2
    numbers = torch.empty(outputs, size, dtype=torch.uint8, device=packed.device)
    for first in range(0, outputs, _ROWS):
        end = min(first + _ROWS, outputs)
        _pair_inputs(packed[:, first // 8 : end // 8], numbers[first:end].view(-1, 8, size))
    return numbers


def _pair_inputs(packed: torch.Tensor, target: torch.Tensor) -> None:
    """Fill uint8 `target` `[words, 8, in / 2]`, the outputs of each word, from int32 `packed`
    `[in, words]`. Bytes of two inputs are joined for two outputs at a time. Extracting all numbers
    would take four times as long."""
    words = packed.t().contiguous()
    both = words.view(torch.uint8).view(len(words), -1, 2, 4).permute(2, 0, 3, 1).contiguous()
    first, second = both
    low, high = (first & 15) | (second << 4), (first >> 4) | (second & 0xF0)
    for output, place in enumerate(AWQ_PLACES):
        target[:, output] = (high if place % 2 else low)[:, place // 2]
