"""Options of `asyncinfer bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncinfer.bench.peers import installed_peers
from asyncinfer.bench.workloads import QUICK, RANDOM, SHIPPED, WORKLOADS, Workload

__all__ = ["BESIDE_BUSY", "ServeOptions"]

#: The workloads that are also measured beside busy programs.
BESIDE_BUSY: Final = ("one", "sixteen")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of the benchmark."""

    #: `SHIPPED`, `RANDOM` or folders of Llama-architecture checkpoints.
    models: Sequence[str] = (SHIPPED, RANDOM)
    columns: Sequence[str] = tuple(WORKLOADS)
    #: The dtype of weights, activations and KV, in every engine.
    dtype: str = "float32"
    #: Names of other engines, see `PEERS`.
    peers: Sequence[str] = field(default_factory=installed_peers)
    #: Whether `BESIDE_BUSY` are also measured beside programs that keep half of the cores busy.
    interference: bool = True
    #: Medians over so many repetitions, after a warm-up.
    repeat: int = 3
    #: The most repetitions in which peers take a turn.
    peer_repeat: int = 3
    #: Seconds that a peer may take to open, and for each turn. A peer that takes longer or fails
    #: takes no further turns.
    peer_seconds: float = 120.0
    #: A smoke run: small work on a small model; its figures mean nothing.
    quick: bool = False
    loop: str = "asyncio"

    @property
    def workloads(self) -> list[Workload]:
        table = QUICK if self.quick else WORKLOADS
        return [table[name] for name in self.columns]
