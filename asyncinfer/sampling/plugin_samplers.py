"""`PluginSamplers`: calls sampler plugins in a step, so that each can harm its own rows only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.errors import drop_frames
from asyncinfer.plugins.supervision import PluginFault
from asyncinfer.sampling.guarded_sampler import GuardedSampler
from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.options import Uses
from asyncinfer.sampling.plugin_call import PluginCall
from asyncinfer.sampling.plugin_step import Chain, PluginStep
from asyncinfer.sampling.sampler_groups import SamplerGroups
from asyncinfer.sampling.transfer import upload
from asyncinfer.scheduler import ChosenSampler

__all__ = ["PluginSamplers"]

I64 = npt.NDArray[np.int64]

_DREW: Final = "sample() drew tokens, and other samplers follow it: it does not declare `draws`"


class PluginSamplers:
    """The sampler plugins of an engine."""

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        history: TokenHistory,
        *,
        timeout: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._history = history

        def open_sampler(chosen: ChosenSampler) -> GuardedSampler:
            return GuardedSampler(
                type(chosen.params),
                chosen.label,
                slots=slots,
                vocab_size=vocab_size,
                device=history.device,
                timeout=timeout,
                clock=clock,
            )

        self._groups = SamplerGroups(open_sampler)
        #: For `roll_back`, cleared once the step stands: for each plugin that the current step has
        #: called, the slots of the call, and their states before it.
        self.before: list[tuple[GuardedSampler, torch.Tensor, list[torch.Tensor]]] = []

    @property
    def groups(self) -> int:
        """How many groups there are now."""
        return len(self._groups)

    def join(self, slot: int, samplers: Sequence[ChosenSampler]) -> int:
        """See `SamplerGroups.join`."""
        return self._groups.join(slot, samplers)

    def leave(self, slot: int) -> None:
        """See `SamplerGroups.leave`."""
        self._groups.leave(slot)

    def roll_back(self) -> None:
        """Restore each plugin that the last step called to its state before that step."""
        for plugin, slots, state in self.before:
            try:
                plugin.restore(slots, state)
            except PluginFault as fault:
                self._groups.failed.update((slot, (plugin, fault)) for slot in slots.tolist())
        self.before.clear()

    def call(
        self,
        chain: Chain,
        logits: torch.Tensor,
        slots: I64,
        positions: I64,
        table: npt.NDArray[Any],
    ) -> list[PluginCall]:
        """Hand the plugins of each group its rows; arguments as for `LogitProcessors.apply`."""
        rows = np.flatnonzero(table["uses"] & Uses.PLUGIN)
        numbers = table["plugin"][rows]
        failed, calls = self._groups.failed, []
        one = self._groups.numbers if len(self._groups) == 1 else np.unique(numbers).tolist()
        for number in one:
            group_rows = rows[numbers == number]
            if failed:
                unusable = np.isin(slots[group_rows], list(failed))
                # A call for each row, since each may have failed for another reason.
                for row in group_rows[unusable].tolist():
                    plugin, fault = failed[int(slots[row])]
                    own = np.array([row])
                    calls.append(PluginCall(plugin, own, *_peaks(logits, own), fault=fault))
                group_rows = group_rows[~unusable]
            if group_rows.size:
                plugins = self._groups.plugins_of(number)
                calls += self._call(plugins, chain, logits, slots, positions, table, group_rows)
        return calls

    def _call(
        self,
        plugins: tuple[GuardedSampler, ...],
        chain: Chain,
        logits: torch.Tensor,
        slots: I64,
        positions: I64,
        table: npt.NDArray[Any],
        rows: I64,
    ) -> list[PluginCall]:
        at, peak = _peaks(logits, rows)
        if at is None:
            # A plugin may change the shape of the tensor it is handed, but not of the alias'
            # source.
            group_logits, options = logits.view_as(logits), table
        else:
            group_logits = logits.index_select(0, at)
            slots, positions, options = slots[rows], positions[rows], table[rows]
        # A row that the model has spoilt fails anyway, and must not take other rows with it.
        _blank(group_logits, peak)
        barred = group_logits.isneginf() if (options["uses"] & Uses.BARS).any() else None
        calls = []
        for following, plugin in zip(range(len(plugins) - 1, -1, -1), plugins, strict=True):
            call = PluginCall(plugin, rows, at, peak)
            calls.append(call)
            step = PluginStep(
                chain, self._history, group_logits, slots, positions, options, following
            )
            try:
                if state := plugin.remember(step.slots):
                    self.before.append((plugin, step.slots, state))
                call.tokens, call.verdict = plugin.sample(step, barred)
                if following and call.tokens is not None:
                    raise plugin.fault(_DREW)
            except PluginFault as fault:
                call.tokens = call.verdict = None
                # Frames refer to their callers, and so to this one, which has the call.
                drop_frames(fault)
                call.fault = fault
                return calls
            finally:
                call.drawn = step.close()
            if call.tokens is not None:
                return calls
            if barred is not None:
                group_logits.masked_fill_(barred, -torch.inf)
            if following:
                call.verdict = group_logits.amax(dim=-1)
                # The next plugin must not answer for what this one has spoilt.
                _blank(group_logits, call.verdict, barred)
        if at is not None:
            logits.index_copy_(0, at, group_logits)
        return calls


def _peaks(logits: torch.Tensor, rows: I64) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The rows on the device, None for all of them; and the largest logit of each."""
    if rows.size == len(logits):
        return None, logits.amax(dim=-1)
    (at,) = upload(logits.device, rows)
    return at, logits.index_select(0, at).amax(dim=-1)


def _blank(logits: torch.Tensor, peak: torch.Tensor, barred: torch.Tensor | None = None) -> None:
    """Set rows whose largest logit is not finite to 0, except for barred tokens."""
    spoilt = ~peak.isfinite()[:, None]
    # Asking is free on a CPU, and would wait for any other device.
    if logits.device.type != "cpu" or bool(spoilt.any()):
        logits.masked_fill_(spoilt if barred is None else spoilt & ~barred, 0.0)
