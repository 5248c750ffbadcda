"""The codes of quantised weights: the values that the bits of a number stand for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

__all__ = ["TABLES", "copy_e4m3", "decoded"]

#: The bits of an e4m3 number where bfloat16 has them: the sign, four of exponent and three of
#: fraction.
_KEPT: Final = 0x87F0 - (1 << 16)
#: bitsandbytes' floats of 4 bits without a sign, in its order.
_FP4: Final = tuple(value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

#: The sixteen values of each code of 4 bits.
TABLES: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {
        "int4": tuple(map(float, range(16))),
        # The floats of MXFP4 and NVFP4: a sign, two bits of exponent and one of fraction (OCP MX
        # specification 1.0, 5.3.3).
        "e2m1": (*_E2M1, *(-value for value in _E2M1)),
        # Quantiles of the normal distribution (Dettmers et al., QLoRA, 2023, appendix E).
        "nf4": (
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
            *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
            *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
            *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
        ),
        "fp4": (*_FP4, *(-value for value in _FP4)),
        # IQ4_NL and IQ4_XS of GGUF.
        "iq4": (
            *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
            *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
        ),
    }
)


def decoded(numbers: torch.Tensor, code: str) -> torch.Tensor:
    """The float32 values of numbers in bytes `[..., bytes]`.

    By a code of `TABLES` a byte has two numbers, the low one first, and the result is `[..., 2 *
    bytes]`. "int8" is bytes with a sign, and "e4m3" floats of 8 bits (Micikevicius et al., FP8
    formats for deep learning, 2022) without NaN. Their results are `[..., bytes]`.
    """
    if code == "int8":
        return numbers.view(torch.int8).float()
    if code == "e4m3":
        floats = torch.empty(numbers.shape, dtype=torch.float32, device=numbers.device)
        return copy_e4m3(floats, numbers.view(torch.float8_e4m3fn))
    pairs = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)
    return pairs.float() if code == "int4" else _table(code, numbers.device)[pairs.int()]


@functools.cache
def _table(code: str, device: torch.device) -> torch.Tensor:
    """float32 `[16]`. Kept, since a recorded step cannot copy anything from the host."""
    with torch.inference_mode(False):
        return torch.tensor(TABLES[code], device=device, dtype=torch.float32)


def copy_e4m3(floats: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Write `numbers`, float8_e4m3fn without NaN, to `floats`, which are float32 or bfloat16.

    On a CPU torch converts one number at a time. Here whole vectors are moved: an e4m3 number's
    bits, where bfloat16 has them, are the number times 2^-120.
    """
    if floats.device.type != "cpu":
        return floats.copy_(numbers)
    # The conversion to int16 extends the sign, so that the shift leaves it in the highest bit.
    halves = numbers.view(torch.int8).to(torch.int16).mul_(16).bitwise_and_(_KEPT)
    return torch.mul(halves.view(torch.bfloat16), 2.0**120, out=floats)
