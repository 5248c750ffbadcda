"""The cache policy of README.md keeps the rules of its protocol, as the kit has them."""

from __future__ import annotations

import ast
from typing import Any

from docs.test_docs import ROOT, blocks

from asyncinfer.testing import check_cache_policy


def test_the_policy_of_the_readme() -> None:
    (block,) = (
        block
        for block in blocks((ROOT / "README.md").read_text("utf-8"), "README.md")
        if "cache_policy=" in block.code
    )
    module: dict[str, Any] = {"__name__": "page"}
    code = ast.parse(block.code)
    code.body.pop()  # `asyncio.run(main())`: the page's own test runs it
    exec(compile(code, "page", "exec", dont_inherit=True), module)
    check_cache_policy(module["LeastUsed"])
