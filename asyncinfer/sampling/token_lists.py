"""`TokenLists`: a list of token ids per slot, laid out flat for the rows of a step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.sampling.transfer import upload

__all__ = ["TokenLists"]

I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


class TokenLists:
    """Token ids, each with a value, by slot; empty for most slots."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lists: dict[int, tuple[I64, F32]] = {}
        #: The arguments and the result of the last `entries`: a steady batch asks for the same
        #: slots in every step.
        self._asked: tuple[bytes, bytes] | None = None
        self._flat: list[torch.Tensor] = []

    def put(self, slot: int, values: Mapping[int, float]) -> None:
        """The slot's tokens, each with its value."""
        ids = np.fromiter(values.keys(), np.int64, len(values))
        self._lists[slot] = (ids, np.fromiter(values.values(), np.float32, len(values)))
        self._asked = None

    def put_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        """The slot's tokens, without values. Cached, since the `n` answers to a prompt share
        theirs."""
        self._lists[slot] = _arrays(ids)
        self._asked = None

    def drop(self, slot: int) -> None:
        if self._lists.pop(slot, None) is not None:
            self._asked = None

    def entries(self, slots: I64, rows: I64) -> list[torch.Tensor]:
        """The lists of `slots`, which lie at `rows` of the logits, one after the other.

        Returns:
            Row int64 `[entries]`, token id int64 `[entries]`, value float32 `[entries]`.
        """
        asked = (slots.tobytes(), rows.tobytes())
        if asked != self._asked:
            lists = [self._lists[slot] for slot in slots.tolist()]
            lengths = [len(ids) for ids, _ in lists]
            self._flat = upload(
                self.device,
                np.repeat(rows, lengths),
                np.concatenate([ids for ids, _ in lists]),
                np.concatenate([values for _, values in lists]),
            )
            self._asked = asked
        return self._flat


@lru_cache(maxsize=8)
def _arrays(ids: tuple[int, ...]) -> tuple[I64, F32]:
    return np.array(ids, np.int64), np.zeros(len(ids), np.float32)
