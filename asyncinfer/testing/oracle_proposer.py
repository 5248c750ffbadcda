"""`OracleProposer`: drafts with a known share of right tokens."""

from __future__ import annotations

from collections.abc import Sequence

from asyncinfer.protocols import DraftRequest
from asyncinfer.testing.oracle import mix, oracle

__all__ = ["OracleProposer"]


class OracleProposer:
    """Proposes what the fake model will draw, except about one token in `wrong_every`. Everything
    follows from the tokens it is shown.

    Args:
        vocab_size, eos_every, windows: of the fake model.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        eos_every: int | None = None,
        windows: Sequence[int] = (),
        wrong_every: int = 4,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos_every = eos_every
        self._windows = windows
        self._wrong_every = wrong_every

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        return [self._propose(request) for request in requests]

    def end(self, request: DraftRequest) -> None:
        return None

    def _propose(self, request: DraftRequest) -> list[int]:
        known = request.tokens()
        chance = mix(request.seed ^ mix(len(known)))
        right = oracle(
            known,
            request.params,
            request.seed,
            1 + chance % request.most,
            vocab_size=self._vocab_size,
            eos_every=self._eos_every,
            windows=self._windows,
        )
        wrong = (chance >> 20) % self._wrong_every
        if wrong < len(right):
            right[wrong] = 1 + (chance >> 40) % (self._vocab_size - 1)
        return right
