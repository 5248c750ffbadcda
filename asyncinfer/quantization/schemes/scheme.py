"""`Scheme`: how a checkpoint is quantised, as its `config.json` says."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from asyncinfer.quantization.schemes.matrix import MatrixFormat
from asyncinfer.quantization.schemes.modules import Modules

__all__ = ["Scheme"]

#: Scales of keys, values and queries for another engine's KV cache.
_KV_SCALES: Final = re.compile(r".*[._](?:[kvq]_|kv_|prob_|prob_output_)(?:scale|zero_point)")


@dataclass(frozen=True, slots=True)
class Scheme:
    """The formats of a checkpoint's matrices.

    The tensors say which matrices are quantised: `config.json` often leaves out some that are not.
    `skipped` serves where there is only a config."""

    #: The name under `quant_method`.
    method: str
    #: Modules, None for all, and the format of their matrices; the first entry that has a module
    #: decides.
    formats: tuple[tuple[Modules | None, MatrixFormat], ...]
    #: Modules that are not quantised.
    skipped: Modules = field(default_factory=Modules)

    def format(self, module: str) -> MatrixFormat | None:
        """How the matrix of `module` is held if it is quantised; None where no format can be."""
        for modules, found in self.formats:
            if modules is None or module in modules:
                return found
        return None

    def planned(self, module: str) -> MatrixFormat | None:
        """The format of `module`'s matrix as far as `config.json` says; None: it is plain."""
        return None if module in self.skipped else self.format(module)

    def ignores(self, tensor: str) -> bool:
        """Whether a tensor may be left over."""
        return _KV_SCALES.fullmatch(tensor) is not None
