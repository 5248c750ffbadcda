"""Predicts the tokens after the one that a row draws, with the model's own predictor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.attention import DeviceBatch, KVCache, StatePass
from asyncinfer.layers import ForwardPass, LoraRows
from asyncinfer.models import Decoder
from asyncinfer.runner.input_batch import InputBatch, StepArrays
from asyncinfer.sampling import SamplingState, TokenHistory, upload
from asyncinfer.scheduler import Step

__all__ = ["Predictions"]

I64 = npt.NDArray[np.int64]


class Predictions:
    """Has the predictor compute every query token of a step, so that its KV is as complete as that
    of other layers.

    The KV of a few tokens was computed with another next token: the last token of a reused prefix
    or of a prompt without an answer, and a token before a forced one. Such errors are rare, and a
    wrong prediction changes no answer.
    """

    def __init__(
        self,
        decoder: Decoder,
        inputs: InputBatch,
        history: TokenHistory,
        sampling: SamplingState,
        paged: Sequence[tuple[int, KVCache]],
    ) -> None:
        """`paged`: the caches of pages, each with the number of its group."""
        self._decoder = decoder
        self._inputs = inputs
        self._history = history
        self._sampling = sampling
        assert decoder.predictor is not None
        layer = decoder.predictor.layer
        #: The cache with the predictor's KV.
        self._paged = [(number, kv) for number, kv in paged if layer in kv.layers]
        #: The pass of the current step.
        self._pass: ForwardPass | None = None
        #: Positions and hidden states of its pass, if the pass was padded.
        self._padded: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[KVCache],
        batches: Sequence[DeviceBatch],
        adapters: LoraRows | None = None,
        states: StatePass | None = None,
    ) -> torch.Tensor:
        """`Decoder.forward`, for a pass that `of` continues."""
        self._pass = self._decoder.begin(positions, kv, batches, adapters, states)
        self._padded = None
        return self._decoder.run(token_ids, positions, self._pass)

    def follow(self, positions: torch.Tensor, hidden: torch.Tensor, one: ForwardPass) -> None:
        """Have `of` continue a pass that was computed elsewhere: `positions` int64 `[tokens]` and
        `hidden` `[tokens, hidden]` are those of the step's query tokens, followed by padding."""
        self._pass, self._padded = one, (positions, hidden)

    def of(
        self, step: Step, arrays: StepArrays, hidden: torch.Tensor, drawn: torch.Tensor
    ) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
        """What may come after the tokens that the rows of `step.predicts` have drawn and that
        stand: rows and positions, those of a row in ascending order; and int64 `[n]`, the token at
        each. No tensor where no row asks.

        Args:
            hidden: what `forward` gave.
            drawn: int64 `[draws]`, which the history has already.
        """
        one, self._pass = self._pass, None
        padded, self._padded = self._padded, None
        assert one is not None
        history, rows = self._history, list(step.predicts)
        following = arrays.positions + 1
        # After a prompt without an answer, this place holds a token of the slot's last sequence.
        unknown = following == self._inputs.prompt_lens[arrays.token_slots]
        unknown[arrays.draw_tokens] = False
        following[unknown] -= 1
        history.reserve(int(following.max()) + 1)
        places, positions = upload(
            hidden.device, history.places(arrays.token_slots, following), arrays.positions
        )
        if padded is not None:
            # Padding writes nothing, whatever follows it.
            positions, hidden = padded
            places = torch.nn.functional.pad(places, (0, len(positions) - len(places)))
        states = self._decoder.predict(history.at(places), positions, hidden, one)
        if not rows:
            return [], []
        last = np.searchsorted(arrays.draw_rows, rows)
        if step.drafts:
            draws = drawn.tolist()
            for index, row in enumerate(rows):
                last[index] += _right(step.drafts.get(row, ()), draws[last[index] :])
        states = states.index_select(0, *upload(states.device, arrays.draw_tokens[last]))
        slots, at = arrays.draw_slots[last], arrays.draw_positions[last] + 1
        return self._chains(step, np.array(rows), slots, at, states)

    def _chains(
        self, step: Step, rows: I64, slots: I64, at: I64, states: torch.Tensor
    ) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
        """`of`, where `states` are the predictor's that tell the tokens at `at`, one a row."""
        wanted = np.array([step.predicts[row] for row in rows.tolist()])
        guesses = self._guess(states, slots, at)
        found, tokens = list(zip(rows.tolist(), at.tolist(), strict=True)), [guesses]
        while True:
            wanted = wanted - 1
            # The predictor's KV of a predicted token is one place before the token's own.
            goes_on = (wanted > 0) & (at - 1 < self._inputs.capacities[slots])
            if not goes_on.any():
                return found, [torch.cat(tokens)]
            if not goes_on.all():
                (kept,) = upload(states.device, np.flatnonzero(goes_on))
                states, guesses = states.index_select(0, kept), guesses.index_select(0, kept)
                rows, slots, at, wanted = (x[goes_on] for x in (rows, slots, at, wanted))
            states = self._further(step.number, slots, at - 1, states, guesses)
            at = at + 1
            guesses = self._guess(states, slots, at)
            found += zip(rows.tolist(), at.tolist(), strict=True)
            tokens.append(guesses)

    def _further(
        self,
        number: int,
        slots: I64,
        starts: I64,
        states: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """The predictor's states of the predicted `tokens` int64 `[rows]`, after `states`."""
        ones, none = [1] * len(slots), [0] * len(slots)
        arrays = self._inputs.build(Step(number, slots.tolist(), starts.tolist(), ones, none))
        positions, batches, _ = arrays.upload(states.device, self._paged)
        one = self._decoder.begin(positions, [kv for _, kv in self._paged], batches)
        return self._decoder.predict_further(tokens, positions, states, one)

    def _guess(self, states: torch.Tensor, slots: I64, at: I64) -> torch.Tensor:
        """int64 `[rows]`: the token at each position, by states of the predictor."""
        logits = self._decoder.predicted_logits(states)[:, : self._sampling.vocab_size]
        return self._sampling.guess(logits, slots, at)


def _right(draft: Sequence[int], draws: Sequence[int]) -> int:
    """How many tokens of the draft were drawn."""
    right = 0
    while right < len(draft) and draft[right] == draws[right]:
        right += 1
    return right
