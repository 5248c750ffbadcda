"""`SampledRows`: sampler plugins of a `StrictRunner`, called as a runner of tensors calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from asyncinfer.sampling import PluginSamplers, TokenHistory
from asyncinfer.sampling.options import Uses, options_table
from asyncinfer.sampling.plugin_call import merge_calls
from asyncinfer.sampling.plugin_step import Chain
from asyncinfer.scheduler import Join, RunnerSpec

__all__ = ["SampledRows"]


class SampledRows:
    """Each row's logits have one likeliest token, which is what the fake model draws, so that what
    a plugin makes of it can be worked out.

    Args:
        timeout: seconds that a call of a plugin may take, by `clock`.
    """

    def __init__(self, spec: RunnerSpec, timeout: float, clock: Callable[[], float]) -> None:
        self._vocab_size = spec.vocab_size
        self._table = options_table(spec.max_slots)
        history = TokenHistory(spec.max_slots, torch.device("cpu"), capacity=1)
        self._plugins = PluginSamplers(
            spec.max_slots, spec.vocab_size, history, timeout=timeout, clock=clock
        )
        # The chain after the plugins adds nothing: the likeliest token is drawn.
        self._chain = Chain(
            lambda logits, table: (logits == logits.amax(-1, keepdim=True)).float(),
            lambda weights, positions, table: weights.argmax(-1),
        )

    def join(self, join: Join) -> None:
        """A request enters its slot."""
        row = self._table[join.slot]
        row["uses"], row["prompt_len"] = Uses.PLUGIN, join.prompt_len
        with torch.inference_mode():
            row["plugin"] = self._plugins.join(join.slot, join.samplers)

    def leave(self, slot: int) -> None:
        """The sequence in the slot leaves it, whether it has samplers or not."""
        self._table[slot] = np.zeros((), self._table.dtype)
        with torch.inference_mode():
            self._plugins.leave(slot)

    def draw(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        *,
        stands: bool = True,
    ) -> tuple[list[int], dict[int, Exception]]:
        """What the plugins make of the fake model's draws of a step, each at a position of a slot
        with samplers; and which of them failed, by index. `stands`: False for a step that there
        is no room for, whose changes of the plugins' state are undone."""
        with torch.inference_mode():
            logits = torch.full((len(slots), self._vocab_size), -1.0, dtype=torch.float32)
            logits[torch.arange(len(slots)), torch.tensor(tokens)] = 0.0
            rows = np.array(slots, np.int64)
            calls = self._plugins.call(
                self._chain, logits, rows, np.array(positions, np.int64), self._table[rows]
            )
            peak, likeliest = logits.max(dim=-1)
            drawn, _ = merge_calls(calls, likeliest, peak)
            failed: dict[int, Exception] = {}
            for call in calls:
                failed.update(call.failures(call.verdict))
            if stands:
                self._plugins.before.clear()
            else:
                self._plugins.roll_back()
            return drawn.tolist(), failed
