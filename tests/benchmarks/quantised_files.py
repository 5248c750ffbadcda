"""A GGUF file in other types, made by llama.cpp, for `asyncinfer bench accuracy`:

python -m benchmarks.quantised_files model.gguf FOLDER

Every file is made of the numbers of the first one. A matrix whose rows have no whole blocks of a
type has another one, as in published files. llama-cpp-python must be installed.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from asyncinfer.bench import BenchError
from benchmarks.llama_agreement import write_floats

__all__ = ["KINDS", "write_kinds"]

#: Names of files -> llama.cpp's names of mixtures of types.
KINDS: Final = {
    "F16": "MOSTLY_F16",
    "Q8_0": "MOSTLY_Q8_0",
    "Q6_K": "MOSTLY_Q6_K",
    "Q5_K_M": "MOSTLY_Q5_K_M",
    "Q4_K_M": "MOSTLY_Q4_K_M",
    "Q4_1": "MOSTLY_Q4_1",
    "Q4_0": "MOSTLY_Q4_0",
    "IQ4_NL": "MOSTLY_IQ4_NL",
    "Q3_K_M": "MOSTLY_Q3_K_M",
    "Q2_K": "MOSTLY_Q2_K",
}


def write_kinds(path: Path, folder: Path) -> list[Path]:
    """Write `F32.gguf`, and a file for each of `KINDS`."""
    api: Any = import_module("llama_cpp")
    floats = folder / "F32.gguf"
    write_floats(path, floats)
    written = [floats]
    for name, kind in KINDS.items():
        params = api.llama_model_quantize_default_params()
        params.ftype = getattr(api, f"LLAMA_FTYPE_{kind}")
        target = folder / f"{name}.gguf"
        if api.llama_model_quantize(str(floats).encode(), str(target).encode(), params):
            raise BenchError(f"{target.name}: llama.cpp did not make it")
        written.append(target)
    return written


if __name__ == "__main__":
    for made in write_kinds(Path(sys.argv[1]), Path(sys.argv[2])):
        print(made)
