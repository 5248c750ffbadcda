"""`DeterministicExecutor`: what a request gets does not depend on the requests beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.adapters import AdapterPool
from asyncinfer.attention import KVCache, StateCache
from asyncinfer.models import Decoder
from asyncinfer.runner.eager_executor import EagerExecutor
from asyncinfer.runner.input_batch import InputBatch, StepArrays
from asyncinfer.runner.tiles import TiledDecoder
from asyncinfer.sampling import Sampled, SamplingState, TokenHistory, sample_per_row, score_per_row

__all__ = ["DeterministicExecutor"]

I64 = npt.NDArray[np.int64]


class DeterministicExecutor(EagerExecutor):
    """Query tokens go through the decoder in tiles of one size; rows are sampled and scored one by
    one. So no operator sees a shape that depends on the batch, and every result is the same to the
    last bit whatever is computed beside it.

    Args:
        max_context: tokens of the longest row.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: Sequence[KVCache | StateCache],
        inputs: InputBatch,
        history: TokenHistory,
        sampling: SamplingState,
        max_context: int,
        adapters: AdapterPool | None = None,
    ) -> None:
        super().__init__(decoder, kv, inputs, history, sampling, adapters)
        pages = [each for _, each in self._paged]
        assert len(pages) == len(kv), "a deterministic executor computes no states"
        self.tiles = TiledDecoder(decoder, pages, max_context, adapters)

    def forward(self, arrays: StepArrays) -> torch.Tensor:
        tokens = self.history.read(arrays.token_slots, arrays.positions)
        return self.tiles.forward(tokens, arrays)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.tiles.logits(hidden)

    def sample(self, logits: torch.Tensor, slots: I64, positions: I64) -> Sampled:
        return sample_per_row(self.sampling, logits, slots, positions)

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> list[torch.Tensor]:
        return score_per_row(logits, tokens, top)
