"""`PluginSamplers`: runs sampler plugins, and lets each of them harm its own rows only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.errors import RequestFailed
from asyncinfer.sampling.guarded_sampler import GuardedSampler, PluginFault
from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.plugin_step import Chain, PluginStep
from asyncinfer.sampling.table import Uses
from asyncinfer.sampling.transfer import upload
from asyncinfer.scheduler.plan import ChosenSampler

__all__ = ["PluginCall", "PluginSamplers"]

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class PluginCall:
    """What a plugin made of its rows in one step."""

    plugin: GuardedSampler
    #: Its rows of the step's logits; the same on the device, or None for all of them.
    rows: I64
    at: torch.Tensor | None
    #: float32 `[k]`: the largest logit of each row before the plugin saw it.
    peak: torch.Tensor
    #: int64 `[k]`: what it drew, all in `[0, vocab)`; None leaves the draw to the chain.
    tokens: torch.Tensor | None = None
    #: Not finite where the answer cannot be used; None if it is known already (`fault`).
    verdict: torch.Tensor | None = None
    fault: PluginFault | None = None


@dataclass(slots=True)
class _Tenant:
    chosen: ChosenSampler
    plugin: GuardedSampler
    #: Why it cannot be sampled.
    fault: PluginFault | None = None


class PluginSamplers:
    """The samplers of an engine, one for each plugin that was ever asked for, and who is where."""

    def __init__(
        self,
        slots: int,
        vocab_size: int,
        history: TokenHistory,
        *,
        timeout: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._slots = slots
        self._vocab_size = vocab_size
        self._history = history
        self._timeout = timeout
        self._clock = clock
        self._plugins: list[GuardedSampler] = []
        self._tenants: dict[int, _Tenant] = {}
        #: Slots whose tenant has a fault.
        self._faulty: set[int] = set()

    def join(self, slot: int, chosen: ChosenSampler) -> int:
        """The slot is sampled by this plugin from now on; gives the plugin's number. Whatever
        goes wrong is kept for the slot's next step."""
        number, plugin = self._plugin(chosen)
        tenant = self._tenants[slot] = _Tenant(chosen, plugin)
        try:
            if isinstance(chosen.saved, PluginFault):
                raise chosen.saved
            plugin.join(slot, chosen.params, chosen.saved)
        except PluginFault as fault:
            tenant.fault = fault
            self._faulty.add(slot)
        return number

    def leave(self, slot: int) -> None:
        """Save what the slot's sampler knows, for a tenant who may come back."""
        tenant = self._tenants.pop(slot, None)
        self._faulty.discard(slot)
        if tenant is None or tenant.fault is not None:
            return
        try:
            tenant.chosen.saved = tenant.plugin.leave(slot)
        except PluginFault as fault:
            tenant.chosen.saved = fault

    def call(
        self,
        chain: Chain,
        logits: torch.Tensor,
        slots: I64,
        positions: I64,
        table: npt.NDArray[Any],
    ) -> list[PluginCall]:
        """Hand each plugin its rows; arguments as for `LogitChanges.apply`."""
        rows = np.flatnonzero(table["uses"] & Uses.PLUGIN)
        numbers = table["plugin"][rows]
        calls = []
        for number in np.unique(numbers).tolist() if len(self._plugins) > 1 else [0]:
            its = rows[numbers == number]
            if self._faulty:
                faulty = np.isin(slots[its], list(self._faulty))
                calls += [self._failed(number, logits, slots, row) for row in its[faulty].tolist()]
                its = its[~faulty]
            if its.size:
                calls.append(self._call(number, chain, logits, slots, positions, table, its))
        return calls

    def _failed(self, number: int, logits: torch.Tensor, slots: I64, row: int) -> PluginCall:
        """One row, for what it failed of may differ from one to the next."""
        call = self._rows(self._plugins[number], logits, np.array([row]))
        call.fault = self._tenants[int(slots[row])].fault
        return call

    def _call(
        self,
        number: int,
        chain: Chain,
        logits: torch.Tensor,
        slots: I64,
        positions: I64,
        table: npt.NDArray[Any],
        rows: I64,
    ) -> PluginCall:
        call = self._rows(self._plugins[number], logits, rows)
        if call.at is None:
            # An alias has a shape of its own: what a plugin does to it does not reach ours.
            its, options = logits.view_as(logits), table
        else:
            its = logits.index_select(0, call.at)
            slots, positions, options = slots[rows], positions[rows], table[rows]
        # A row that the model has spoilt fails anyway; it must not take others with it.
        spoilt = ~call.peak.isfinite()[:, None]
        # To ask is free on a CPU, and elsewhere would wait for the device.
        if its.device.type != "cpu" or bool(spoilt.any()):
            its.masked_fill_(spoilt, 0.0)
        barred = its.isneginf() if (options["uses"] & Uses.BARS).any() else None
        step = PluginStep(chain, self._history, its, slots, positions, options)
        try:
            call.tokens, call.verdict = call.plugin.sample(step, barred)
        except PluginFault as fault:
            call.fault = fault
            return call
        if call.tokens is None:
            if barred is not None:
                its.masked_fill_(barred, -torch.inf)
            if call.at is not None:
                logits.index_copy_(0, call.at, its)
        return call

    def _rows(self, plugin: GuardedSampler, logits: torch.Tensor, rows: I64) -> PluginCall:
        if rows.size == len(logits):
            return PluginCall(plugin, rows, None, logits.amax(dim=-1))
        (at,) = upload(logits.device, rows)
        return PluginCall(plugin, rows, at, logits.index_select(0, at).amax(dim=-1))

    def _plugin(self, chosen: ChosenSampler) -> tuple[int, GuardedSampler]:
        kind = type(chosen.params)
        for number, plugin in enumerate(self._plugins):
            if plugin.kind is kind:
                return number, plugin
        plugin = GuardedSampler(
            kind,
            chosen.label,
            slots=self._slots,
            vocab_size=self._vocab_size,
            device=self._history.device,
            timeout=self._timeout,
            clock=self._clock,
        )
        self._plugins.append(plugin)
        return len(self._plugins) - 1, plugin

    @staticmethod
    def settle(
        calls: Iterable[PluginCall], tokens: torch.Tensor, peak: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """After the chain has drawn: tokens with those of the plugins, peaks with the model's own.
        What the chain found of the plugins' logits is the verdict on them."""
        for call in calls:
            if call.tokens is None and call.fault is None:
                call.verdict = peak if call.at is None else peak.index_select(0, call.at)
            if call.at is None:
                # It has all rows, so it is the only one.
                return tokens if call.tokens is None else call.tokens, call.peak
            if call.tokens is not None:
                tokens.index_copy_(0, call.at, call.tokens)
            peak.index_copy_(0, call.at, call.peak)
        return tokens, peak

    @staticmethod
    def failures(call: PluginCall, verdict: torch.Tensor | None) -> dict[int, RequestFailed]:
        """Row -> why it failed. `verdict` is the call's, on the host."""
        if call.fault is not None:
            return {row: call.fault.failure() for row in call.rows.tolist()}
        assert verdict is not None
        bad = (~verdict.isfinite()).nonzero()[:, 0].tolist()
        if not bad:
            return {}
        if call.tokens is not None:
            what = "sample() answered a token that is out of range or barred"
        else:
            what = "sample() left logits of which the largest is {}"
        return {
            int(call.rows[i]): call.plugin.fault(what.format(verdict[i].item())).failure()
            for i in bad
        }
