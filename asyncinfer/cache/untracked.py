"""Objects that the garbage collector does not look at.

A cache of a million tokens has a hundred thousand records, and a full collection of the host's heap
would walk through them all, with the GIL held. None of them can be part of a cycle, so reference
counts alone free them; the interpreter does the same for tuples of numbers by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["untrack"]


def _find() -> Callable[[object], object]:
    if sys.implementation.name == "cpython":
        try:
            from ctypes import PYFUNCTYPE, py_object, pythonapi
        except ImportError:  # built without libffi
            pass
        else:
            return PYFUNCTYPE(None, py_object)(("PyObject_GC_UnTrack", pythonapi))
    return id


#: Hide an object, which must never be part of a cycle, from the collector. Where the interpreter
#: offers no way it does nothing, and full collections take longer.
untrack = _find()
