"""The peers by name, and where each is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Final

from asyncinfer.bench.record import BenchError

__all__ = ["ONE_THREAD", "PEERS", "installed_peers", "parse_peers", "require_transformers"]

#: The module that each peer is imported as.
PEERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "transformers": "transformers",
        "llama.cpp": "llama_cpp",
        "vllm": "vllm",
        "openvino": "openvino_genai",
    }
)
#: This package on a single thread, which is measured like a peer.
ONE_THREAD: Final = "one thread"


def installed_peers() -> tuple[str, ...]:
    """The peers that this interpreter can import."""
    return tuple(name for name, module in PEERS.items() if find_spec(module))


def parse_peers(texts: Iterable[str]) -> dict[str, str]:
    """`NAME` or `NAME=PYTHON` of each peer, whose interpreter has it installed.

    Raises `BenchError` for a name that is not in `PEERS`, and for a peer without `PYTHON` that this
    interpreter cannot import.
    """
    found = {}
    for text in texts:
        name, _, python = text.partition("=")
        if name not in PEERS:
            raise BenchError(f"--peer {text!r}: the peers are {', '.join(PEERS)}")
        if not python and find_spec(PEERS[name]) is None:
            raise BenchError(
                f"--peer {text!r}: {PEERS[name]} is not installed here; where another Python has "
                f"it: --peer {name}=PYTHON"
            )
        found[name] = python or sys.executable
    return found


def require_transformers() -> None:
    """Raise `BenchError` without transformers, before a long run rather than after it."""
    if find_spec("transformers") is None:
        raise BenchError(
            "the peer needs transformers: pip install 'asyncinfer[bench]', or --no-peer"
        )
