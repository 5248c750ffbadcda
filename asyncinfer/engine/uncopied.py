"""`Uncopied`: what belongs to an engine in this process, and is neither copied nor pickled."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Uncopied"]


class Uncopied:
    """A copy would share what it refers to, and its finalizer would end the original."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it belongs to an engine in this "
            "process"
        )
