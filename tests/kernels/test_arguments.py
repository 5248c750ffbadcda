"""What kernels call their arguments, and how they are given them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.jit import JITFunction, create_function_from_signature

from asyncinfer.kernels import triton

FOLDER = Path(triton.__file__).parent
TREES = {path.name: ast.parse(path.read_text("utf-8")) for path in FOLDER.glob("*.py")}
#: Names that Triton uses beside those of a kernel when it launches one.
RESERVED = {"backend", "grid", "specialize_impl", "warmup"}
#: Parameters of a function above which its sizes are given by name.
MANY = 12


def sizes_by_place(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Calls that give a size (a `tl.constexpr`) by its place to a function of many parameters."""
    nodes = [(file, node) for file, tree in trees.items() for node in ast.walk(tree)]
    functions = {
        node.name: node.args.args for _, node in nodes if isinstance(node, ast.FunctionDef)
    }
    for file, node in nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        parameters = functions.get(node.func.id, [])
        given = parameters[: len(node.args)]
        if len(parameters) > MANY and any(_is_size(parameter) for parameter in given):
            yield f"{file}:{node.lineno}: {node.func.id}"


def _is_size(parameter: ast.arg) -> bool:
    return parameter.annotation is not None and ast.unparse(parameter.annotation) == "tl.constexpr"


# finding G11
def test_sizes_are_given_by_name() -> None:
    assert [*sizes_by_place(TREES)] == []


def test_a_size_by_its_place_is_found() -> None:
    names = [f"a{number}" for number in range(MANY)]
    source = f"def f({', '.join(names)}, N: tl.constexpr): ...\nf({', '.join(names)}, {{}})"
    found = {
        told: [*sizes_by_place({"a.py": ast.parse(source.format(told))})] for told in ("N", "N=N")
    }
    assert found == {"N": ["a.py:2: f"], "N=N": []}


def launched_kernels() -> list[JITFunction[Any]]:
    modules = [import_module(f"{triton.__name__}.{name.removesuffix('.py')}") for name in TREES]
    found = [each for module in modules for each in vars(module).values()]
    return [kernel for kernel in found if isinstance(kernel, JITFunction)]


def bind(kernel: JITFunction[Any]) -> None:
    """Make the function with a kernel's parameters by which Triton launches it."""
    create_function_from_signature(kernel.signature, kernel.params, None)


def test_triton_can_launch_every_kernel() -> None:
    kernels = launched_kernels()
    assert len(kernels) > 20
    for kernel in kernels:
        bind(kernel)
        assert not RESERVED & set(kernel.arg_names), kernel.fn.__name__


def test_a_name_that_triton_takes_is_refused() -> None:
    def kernel(options):  # type: ignore[no-untyped-def]
        return options

    with pytest.raises(SyntaxError, match="options"):
        bind(JITFunction(kernel))
