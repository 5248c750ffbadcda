"""The processor at hand, and machine code for it."""

from __future__ import annotations

import ctypes
import functools
import platform
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

from asyncinfer.kernels.native.kept_code import kept_code, source_hash
from asyncinfer.kernels.native.threads import parallel_region
from asyncinfer.machine import cache_bytes, version

__all__ = ["NEEDED", "Host", "available", "compiled", "compiled_once", "host", "host_of"]

_Given = TypeVarTuple("_Given")
_Kernels = TypeVar("_Kernels")

#: Features that kernels need of an x86-64 processor. Without f16c a conversion from float16 would
#: call a function that the process does not have.
NEEDED = ("avx2", "fma", "f16c")

#: Held during LLVM's passes, which two threads must not run at once.
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Host:
    """What generated code may use of a processor."""

    #: Features as LLVM's target machine takes them: "+avx2,-avx512f".
    features: str
    #: float32 numbers of a vector.
    lanes: int
    #: Rows of x that one pass over a weight's rows multiplies: as many as registers hold.
    batch: int
    #: Whether one instruction looks 16 numbers up in a table of 16 (`vpermps`).
    tables: bool
    #: Whether one instruction looks 8 numbers up in a table of 8.
    permutes: bool
    #: Whether one instruction spreads the 4-bit numbers of 8 bytes (`vpmultishiftqb`).
    spreads: bool
    #: Whether one instruction rounds numbers to bfloat16 (`vcvtneps2bf16`).
    rounds: bool = False
    #: Whether it has units that multiply matrices of bfloat16 numbers (AMX).
    tiles: bool = False
    #: Bytes of a core's second-level cache; 0 if the system does not say.
    cache_bytes: int = 0


@functools.cache
def host() -> Host | None:
    """The processor that runs this code; None without `llvmlite`, and without a kernel for it."""
    try:
        binding = _llvm()
        features = dict(binding.get_host_cpu_features())
    except (ImportError, OSError, RuntimeError):
        return None
    found = host_of(platform.machine(), features)
    return found and replace(found, cache_bytes=cache_bytes(level=2) or 0)


def available() -> bool:
    """Whether this machine has kernels at all."""
    return host() is not None and parallel_region() is not None


def host_of(machine: str, features: Mapping[str, bool]) -> Host | None:
    """The `Host` of a processor with these features; None: there are no kernels for it."""
    flags = ",".join(f"{'+' if on else '-'}{name}" for name, on in sorted(features.items()))
    if machine.lower() in ("aarch64", "arm64"):
        return Host(flags, lanes=8, batch=2, tables=False, permutes=False, spreads=False)
    if machine.lower() not in ("x86_64", "amd64"):
        return None
    if not all(features.get(name) for name in NEEDED):
        return None
    if features.get("avx512f") and features.get("avx512bw"):
        spreads = bool(features.get("avx512vbmi"))
        more = {"rounds": bool(features.get("avx512bf16")), "tiles": bool(features.get("amx-bf16"))}
        return Host(flags, 16, 4, tables=True, permutes=True, spreads=spreads, **more)
    return Host(flags, lanes=8, batch=3, tables=False, permutes=True, spreads=False)


def compiled(
    what: str,
    text: Callable[[], str],
    target: Host,
    names: Sequence[str],
    symbols: Mapping[str, int],
    folder: Path | None = None,
) -> tuple[int, ...]:
    """The addresses of the functions `names` in LLVM's assembly `text()`, which calls functions at
    the addresses `symbols`. The code stays for the life of the process. `what` is all that the text
    depends on besides `target`: code kept for it in `folder` is used again, see `kept_code`. Raises
    `RuntimeError`."""
    binding = _llvm()
    with _lock:
        for symbol, place in symbols.items():
            binding.add_symbol(symbol, place)
        machine = target_machine(target)
        key = {
            "code": what,
            "processor": binding.get_host_cpu_name(),
            "target": repr(target),
            "llvm": ".".join(map(str, (*binding.llvm_version_info, version("llvmlite")))),
            "source": source_hash(),
        }

        def made() -> bytes:
            return bytes(machine.emit_object(optimised(text(), machine)))

        code = binding.ObjectFileRef.from_data(kept_code(key, made, folder))
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        engine.add_object_file(code)
        engine.finalize_object()
        # Kept for good: a thread may run the code while the interpreter shuts down and drops every
        # module.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
        return tuple(int(engine.get_function_address(name)) for name in names)


def compiled_once(
    make: Callable[[*_Given], _Kernels | None],
) -> Callable[[*_Given], _Kernels | None]:
    """`make`, which compiles kernels and tries them, for callers of many threads: the first one
    with some arguments calls it, and all others wait for what it returns. None where it raises
    `RuntimeError`, since the code cannot be made."""
    lock = threading.Lock()

    @functools.cache
    def made(*given: *_Given) -> _Kernels | None:
        try:
            return make(*given)
        except RuntimeError:
            return None

    @functools.wraps(make)
    def once(*given: *_Given) -> _Kernels | None:
        with lock:
            return made(*given)

    return once


def target_machine(target: Host) -> Any:
    """LLVM's target machine for the processor that runs this, with these features."""
    binding = _llvm()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=target.features, opt=2, jit=True
    )


def optimised(text: str, machine: Any) -> Any:
    """The module of this assembly after LLVM's passes."""
    binding = _llvm()
    module = binding.parse_assembly(text)
    module.verify()
    # The code is unrolled and vectorised already.
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module


@functools.cache
def _llvm() -> Any:
    binding: Any = import_module("llvmlite.binding")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding
