"""`PluginStep`: what a sampler plugin is handed in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.noise import row_uniforms
from asyncinfer.sampling.transfer import upload

__all__ = ["Chain", "PluginStep"]

I64 = npt.NDArray[np.int64]
Table = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """The rest of the built-in chain, for some rows of the table of options."""

    #: float32 `[n, vocab]` from logits of that shape: temperature and truncation.
    weigh: Callable[[torch.Tensor, Table], torch.Tensor]
    #: int64 `[n]` from weights: the draw.
    race: Callable[[torch.Tensor, I64, Table], torch.Tensor]


class PluginStep:
    """Rows of a step; see `asyncinfer.protocols.SamplerStep`."""

    def __init__(
        self,
        chain: Chain,
        history: TokenHistory,
        logits: torch.Tensor,
        slots: I64,
        positions: I64,
        table: Table,
    ) -> None:
        self._chain = chain
        self._history = history
        self._logits = logits
        self._its_positions = positions
        self._table = table
        self._slots, self._positions, self._prompt_lens = upload(
            logits.device, slots, positions, np.ascontiguousarray(table["prompt_len"])
        )

    @property
    def logits(self) -> torch.Tensor:
        return self._logits

    @property
    def slots(self) -> torch.Tensor:
        return self._slots

    @property
    def positions(self) -> torch.Tensor:
        return self._positions

    @property
    def prompt_lens(self) -> torch.Tensor:
        return self._prompt_lens

    def recent(self, count: int) -> torch.Tensor:
        width = max(0, min(count, int(self._its_positions.max())))
        return self._history.recent(self._slots, self._positions, width)

    def weights(self) -> torch.Tensor:
        return self._chain.weigh(self._logits, self._table)

    def draw(self, weights: torch.Tensor) -> torch.Tensor:
        return self._chain.race(weights, self._its_positions, self._table)

    def uniform(self, stream: int = 0) -> torch.Tensor:
        numbers = row_uniforms(self._table["seed"], self._its_positions, stream)
        return upload(self._logits.device, numbers)[0]
