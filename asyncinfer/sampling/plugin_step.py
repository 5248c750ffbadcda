"""`PluginStep`: what a sampler plugin is handed in a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.kernels.noise import row_uniforms
from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.transfer import upload

__all__ = ["Chain", "DrawCheck", "PluginStep"]

I64 = npt.NDArray[np.int64]
Table = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """What the built-in chain does after the logit processors, for rows of the table of options."""

    #: float32 `[n, vocab]` from logits of that shape: temperature and truncation.
    weigh: Callable[[torch.Tensor, Table], torch.Tensor]
    #: int64 `[n]` from weights: the draw.
    race: Callable[[torch.Tensor, I64, Table], torch.Tensor]


class DrawCheck(NamedTuple):
    """Whether weights can be drawn from, by two numbers a row. The host reads them with the row's
    token, since asking at once would wait for the device."""

    #: float32 `[n]`: the least weight.
    least: torch.Tensor
    #: float32 `[n]`: the weight of the token that was drawn.
    won: torch.Tensor

    def spoil(self, verdict: torch.Tensor) -> torch.Tensor:
        """`verdict` float32 `[n]`, made not finite for a row of which a weight is not finite or
        below 0, or none is above 0."""
        return torch.addcmul(verdict, self.won / self.won, self.least.sqrt())

    def worse(self, other: DrawCheck) -> DrawCheck:
        """For each row this one if its weights cannot be drawn from, else the other."""
        fine = self.spoil(torch.zeros_like(self.won)).isfinite()
        return DrawCheck(
            torch.where(fine, other.least, self.least), torch.where(fine, other.won, self.won)
        )

    def fault(self, row: int) -> str | None:
        """What is wrong with a row's weights; None if nothing is. Waits for the device."""
        least, won = self.least[row].item(), self.won[row].item()
        if math.isnan(least):
            return "draw() was given a weight that is NaN"
        if least < 0.0:
            return "draw() was given a weight below 0"
        if won == math.inf:
            return "draw() was given a weight that is infinite"
        return None if won > 0.0 else "draw() was given weights of which none is above 0"


class PluginStep:
    """The rows of a step for one sampler; see `asyncinfer.protocols.SamplerStep`. Every access
    raises once it is closed. `following`: how many samplers of the same rows come after this
    one."""

    def __init__(
        self,
        chain: Chain,
        history: TokenHistory,
        logits: torch.Tensor,
        slots: I64,
        positions: I64,
        table: Table,
        following: int = 0,
    ) -> None:
        self._following = following
        self._chain = chain
        self._history = history
        self._row_logits = logits
        self._row_positions = positions
        self._table = table
        # Copies: on a CPU the tensors share the arrays' memory, and a plugin may write to them.
        self._slots, self._positions, self._prompt_lens = upload(
            logits.device, slots.copy(), positions.copy(), table["prompt_len"].copy()
        )
        self._over = False
        self._drawn: DrawCheck | None = None

    def close(self) -> DrawCheck | None:
        """End the call; returns the check of the weights that were drawn from, None if none
        were."""
        self._over = True
        return self._drawn

    @property
    def logits(self) -> torch.Tensor:
        self._check()
        return self._row_logits

    @property
    def slots(self) -> torch.Tensor:
        self._check()
        return self._slots

    @property
    def positions(self) -> torch.Tensor:
        self._check()
        return self._positions

    @property
    def prompt_lens(self) -> torch.Tensor:
        self._check()
        return self._prompt_lens

    def recent(self, count: int) -> torch.Tensor:
        self._check()
        width = max(0, min(count, int(self._row_positions.max())))
        return self._history.recent(self._slots, self._positions, width)

    def weights(self) -> torch.Tensor:
        self._check()
        return self._chain.weigh(self._row_logits, self._table)

    def draw(self, weights: torch.Tensor) -> torch.Tensor:
        self._check()
        shape, device = self._row_logits.shape, self._row_logits.device
        if type(weights) is not torch.Tensor:
            raise TypeError(f"weights must be a torch.Tensor: they are a {type(weights).__name__}")
        if (weights.dtype, weights.shape, weights.device) != (torch.float32, shape, device):
            raise ValueError(
                f"weights must be float32 {list(shape)} on {device}: they are "
                f"{str(weights.dtype).removeprefix('torch.')} {list(weights.shape)} on "
                f"{weights.device}"
            )
        tokens = self._chain.race(weights, self._row_positions, self._table)
        # amin gives NaN if there is one, infinity wins the race, and 0 wins where all are 0.
        drawn = DrawCheck(weights.amin(dim=-1), weights.gather(1, tokens[:, None])[:, 0])
        self._drawn = drawn if self._drawn is None else self._drawn.worse(drawn)
        return tokens

    def uniform(self, stream: int = 0) -> torch.Tensor:
        self._check()
        # Each sampler of a row has numbers of its own, counted from the last sampler: the one that
        # may draw gets the same numbers whatever comes before it.
        own = stream + (self._following << 32)
        numbers = row_uniforms(self._table["seed"], self._row_positions, own)
        return upload(self._row_logits.device, numbers)[0]

    def _check(self) -> None:
        if self._over:
            raise RuntimeError("the step is over: it can be used during the call of sample() only")
