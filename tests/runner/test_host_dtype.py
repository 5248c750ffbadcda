"""A program may give torch another default dtype at any time: an engine computes the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import asyncinfer
from asyncinfer import Engine

pytestmark = pytest.mark.asyncio

PACKAGE = Path(asyncinfer.__file__).parent
#: Programs of their own, and checks that are about the default.
APART = (
    "bench",
    "builtin/training",
    "doctor",
    "testing/family_trial.py",
    "testing/sampler_rules.py",
)
#: What makes floats unless it is told otherwise.
MAKERS = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
PROMPTS = ["import os\n\n\nclass Reader:\n" * 6, "x = 1\n"]


@pytest.fixture
def default() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


async def texts(engine: Engine) -> list[str]:
    found = []
    for prompt in PROMPTS:
        for options in ({}, {"temperature": 0.7, "seed": 1, "sampler": "mirostat"}):
            done = await engine.generate(prompt, max_tokens=8, **options)
            found.append(done.text)
    return found


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
async def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    # With bfloat16 a kernel wrote beyond its memory, which ended the process.
    async with Engine(device="cpu", cpu_threads=1) as engine:
        right = await texts(engine)
        torch.set_default_dtype(dtype)
        assert await texts(engine) == right
    async with Engine(device="cpu", cpu_threads=1) as engine:
        assert await texts(engine) == right


async def test_floats_are_made_with_their_dtype() -> None:
    bare = []
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if name.startswith(APART):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=made)):
                    told = {keyword.arg for keyword in node.keywords}
                    if made in MAKERS and not told & {"dtype", None}:
                        bare.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not bare
