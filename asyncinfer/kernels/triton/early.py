"""`wait_for_earlier`: how a kernel begins that may be launched before the one before it has ended
(programmatic dependent launch, from compute capability 9.0 on)."""

from __future__ import annotations

import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before Triton 3.4
    gdc_launch_dependents = gdc_wait = None

__all__ = ["triton_launches_early", "wait_for_earlier"]


def triton_launches_early() -> bool:
    """Whether this Triton can launch a kernel so."""
    return gdc_wait is not None


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr):
    """To be called before a kernel reads or writes any memory. Where it was launched `EARLY`, all
    kernels before it have ended then. From here on the next one may be set up, which waits, too."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
