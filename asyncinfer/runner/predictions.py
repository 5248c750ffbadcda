"""Predictions of the token after the one that a row draws, by the model's own predictor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncinfer.attention import DeviceBatch, KVCache, StatePass
from asyncinfer.layers import ForwardPass, LoraRows
from asyncinfer.models import Decoder
from asyncinfer.runner.input_batch import InputBatch, StepArrays
from asyncinfer.sampling import SamplingState, TokenHistory, upload
from asyncinfer.scheduler import Step

__all__ = ["Predictions"]


class Predictions:
    """Has the predictor compute every query token of a step, so that its KV is as complete as that
    of the other layers. What it predicts is drawn as the token of its position will be: by the
    row's temperature, filters and random numbers.

    Of some tokens the KV was computed with another token after them: the last one of a reused
    prefix, one that a forced token follows, the last one of a prompt without an answer. So little
    is wrong in what later tokens attend to, and a wrong prediction changes no answer.
    """

    def __init__(
        self,
        decoder: Decoder,
        inputs: InputBatch,
        history: TokenHistory,
        sampling: SamplingState,
    ) -> None:
        self._decoder = decoder
        self._inputs = inputs
        self._history = history
        self._sampling = sampling
        #: Of the step that is being computed.
        self._pass: ForwardPass | None = None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[KVCache],
        batches: Sequence[DeviceBatch],
        adapters: LoraRows | None = None,
        states: StatePass | None = None,
    ) -> torch.Tensor:
        """`Decoder.forward`, of a pass that `of` goes on with."""
        self._pass = self._decoder.begin(positions, kv, batches, adapters, states)
        return self._decoder.run(token_ids, positions, self._pass)

    def of(
        self, step: Step, arrays: StepArrays, hidden: torch.Tensor, drawn: torch.Tensor
    ) -> tuple[dict[int, int], list[torch.Tensor]]:
        """For each row of `step.predicts` the position after the last one of the tokens that it has
        drawn and that stand; and int64 `[rows]`, the tokens that may come there. No tensor where no
        row asks.

        Args:
            hidden: what `forward` gave.
            drawn: int64 `[draws]`, which the history has already.
        """
        one, self._pass = self._pass, None
        assert one is not None
        history, rows = self._history, step.predicts
        following = arrays.positions + 1
        # What stands after a prompt without an answer is of the slot's sequence before.
        unknown = following == self._inputs.prompt_lens[arrays.token_slots]
        unknown[arrays.draw_tokens] = False
        following[unknown] -= 1
        history.reserve(int(following.max()) + 1)
        places, positions = upload(
            hidden.device, history.places(arrays.token_slots, following), arrays.positions
        )
        states = self._decoder.predict(history.at(places), positions, hidden, one)
        if not rows:
            return {}, []
        last = np.searchsorted(arrays.draw_rows, rows)
        if step.drafts:
            draws = drawn.tolist()
            for index, row in enumerate(rows):
                last[index] += _right(step.drafts.get(row, ()), draws[last[index] :])
        states = states.index_select(0, *upload(states.device, arrays.draw_tokens[last]))
        logits = self._decoder.predicted_logits(states)
        logits = logits[:, : self._sampling.vocab_size]
        slots, at = arrays.draw_slots[last], arrays.draw_positions[last] + 1
        return dict(zip(rows, at.tolist(), strict=True)), [self._sampling.guess(logits, slots, at)]


def _right(draft: Sequence[int], draws: Sequence[int]) -> int:
    """How many tokens of the draft were drawn."""
    right = 0
    while right < len(draft) and draft[right] == draws[right]:
        right += 1
    return right
