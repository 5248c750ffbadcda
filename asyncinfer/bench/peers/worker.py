"""A peer's process: `python worker.py MODULE`, a line of JSON in and one out for each call.

It imports the peer's module by its path and nothing from this package, since the other engine's
interpreter has other dependencies. The first line is a `Setup`, each further one a workload:
`{"requests": [[prompt, tokens], ...], "shared": n}`. The answer to the `Setup` has the engine's
`version`. The answer to a workload has its `seconds` and, if `answers` were asked for, the token
ids. A failure is an answer with an `error`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict

__all__ = ["Peer", "Setup"]


class Setup(TypedDict):
    """The arguments of a peer."""

    #: The folder of a checkpoint, and a GGUF file of the same weights.
    folder: str
    gguf: str
    #: "float32" or "bfloat16", for weights, activations and KV.
    dtype: str
    threads: int
    #: The most requests that are computed together.
    running: int
    #: Tokens of the longest request, prompt and answer.
    context: int


class Peer(Protocol):
    """An engine with a model."""

    #: The engine's version.
    version: str

    def run(self, requests: Sequence[tuple[list[int], int]], shared: int) -> list[list[int]]:
        """Greedy answers, past the end of text, to prompts of token ids, each of a given number of
        tokens. All prompts begin with the same `shared` tokens."""

    def warm(self, prefix: list[int]) -> None:
        """Have a prefix cached, if the engine can do so."""


def open_peer(module: str, setup: Setup) -> Peer:
    """The peer that a module's `open_peer` creates."""
    spec = importlib.util.spec_from_file_location("peer", module)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    peer: Peer = loaded.open_peer(setup)
    return peer


def answer(peer: Peer, work: dict[str, Any]) -> dict[str, Any]:
    """Run a workload. Raises `RuntimeError` for an answer of another length than was asked for."""
    requests = [(prompt, tokens) for prompt, tokens in work["requests"]]
    if work["shared"]:
        peer.warm(requests[0][0][: work["shared"]])
    began = time.perf_counter()
    answers = peer.run(requests, work["shared"])
    seconds = time.perf_counter() - began
    for index, ((_, tokens), given) in enumerate(zip(requests, answers, strict=True)):
        if len(given) != tokens:
            raise RuntimeError(f"request {index} gave {len(given)} of {tokens} tokens")
    return {"seconds": seconds, "answers": answers if work.get("answers") else None}


def main(module: str) -> None:
    """Answer until the input ends."""
    # Libraries may print, and must not print into the answers.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer: Peer | None = None
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if peer is None:
                peer = open_peer(module, asked)
                told: dict[str, Any] = {"version": peer.version}
            else:
                told = answer(peer, asked)
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), file=out, flush=True)


if __name__ == "__main__":
    # Modules beside this one have the names of packages that they import.
    sys.path[:] = [
        path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent
    ]
    main(sys.argv[1])
