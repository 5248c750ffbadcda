"""What a wrapper would launch, as machine code for GPUs that need not be there.

    with recorded() as launches:
        rms_norm(torch.empty(4, 4096, dtype=torch.bfloat16, device="meta"), ...)
    code = launches[0].compile(90)
    assert code.spills == 0 and code.fits

Compile after the block: within it the functions that a kernel calls are replaced as well.
The arguments, options and grid are those that the wrapper chose, so a test sees what will run. Meta
tensors do: nothing is read, and a weight of any size costs nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from kernels.kernel_globals import replaced
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

__all__ = ["FEW_SPILLS", "SHARED", "Code", "Launch", "compiled_for", "recorded"]

#: Bytes of shared memory that one block may have; also on the GPUs of consumers, and on the B200.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
#: Bytes of spills that cost nothing: ptxas gives up a few registers where one more program then
#: fits on a multiprocessor.
FEW_SPILLS = 16
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Code:
    """A kernel's machine code and what it asks of a multiprocessor."""

    capability: int
    ptx: str
    cubin: bytes
    registers: int
    #: Bytes of local memory a thread: registers that did not fit, and arrays with varying indices.
    spills: int
    #: Bytes of shared memory a block.
    shared: int
    #: What Triton made of the function's text.
    ttir: str = ""

    @property
    def fits(self) -> bool:
        return self.shared <= SHARED[self.capability]

    @cached_property
    def sass(self) -> tuple[str, ...]:
        """Opcodes of the machine code with their modifiers, such as `LDG.E.128`, one per
        instruction. Listed when a test asks: that takes as long as a small kernel's compilation."""
        listing = _inspect("nvdisasm", self.cubin, "-c", "-ndf")
        found = re.findall(
            r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing, re.M
        )
        return tuple(found)

    def count(self, opcode: str) -> int:
        """Instructions whose opcode begins so: "HGMMA", "LDGSTS", "LDG.E.128"."""
        return sum(name.startswith(opcode) for name in self.sass)


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, as a wrapper asked for it."""

    kernel: JITFunction[Any]
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    #: `num_warps`, `num_stages` and the like.
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    def compile(self, capability: int) -> Code:
        """Compile for a `capability` of `SHARED`, specialised as a launch is."""
        signature, constants, hints = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            specialised = not parameter.is_constexpr and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (specialised and _is_one(value)):
                signature[parameter.name] = "constexpr"
                constants[(index,)] = value
                continue
            signature[parameter.name] = mangle_type(value)
            aligned = specialised and not parameter.do_not_specialize_on_alignment
            if aligned and _by_sixteen(value):
                hints[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, hints)
        target = GPUTarget("cuda", capability, 32)
        built = triton.compile(source, target=target, options=dict(self.options))
        return _code(capability, built.asm, built.metadata.shared)


def compiled_for(launch: Launch) -> dict[str, Any]:
    """What a launch is compiled for: a change of any of this costs a second."""
    key: dict[str, Any] = dict(launch.options)
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            key[parameter.name] = value
        elif isinstance(value, int):
            key[parameter.name] = "any" if parameter.do_not_specialize else value
        elif isinstance(value, torch.Tensor):
            aligned = not parameter.do_not_specialize_on_alignment
            key[parameter.name] = (value.dtype, aligned)
    return key


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within, kernels of `asyncinfer.kernels.triton` are not run but listed as launched."""
    launches: list[Launch] = []
    with replaced(lambda kernel: _Recorder(kernel, launches)):
        yield launches


class _Recorder:
    def __init__(self, kernel: JITFunction[Any], launches: list[Launch]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            own = {name: kwargs.pop(name) for name in self.kernel.arg_names if name in kwargs}
            bound = self.kernel.signature.bind(*args, **own)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            size = grid(arguments) if callable(grid) else grid
            self.launches.append(Launch(self.kernel, tuple(size), arguments, kwargs))

        return launch


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 1


def _by_sixteen(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0


def _code(capability: int, asm: Mapping[str, Any], shared: int) -> Code:
    cubin = asm["cubin"]
    usage = Counter[str]()
    for name, value in re.findall(r"(\w+):(\d+)", _inspect("cuobjdump", cubin, "-res-usage")):
        usage[name] = int(value)
    spills = max(usage["LOCAL"], usage["STACK"])
    return Code(capability, asm["ptx"], cubin, usage["REG"], spills, shared, asm["ttir"])


def _inspect(tool: str, cubin: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / tool), *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
