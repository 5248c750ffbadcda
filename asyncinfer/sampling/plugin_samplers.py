"""`PluginSamplers`: runs sampler plugins, and lets each of them harm its own rows only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.errors import RequestFailed
from asyncinfer.plugins.supervision import PluginFault
from asyncinfer.sampling.guarded_sampler import GuardedSampler, failure
from asyncinfer.sampling.history import TokenHistory
from asyncinfer.sampling.plugin_step import Chain, Drawn, PluginStep
from asyncinfer.sampling.table import Uses
from asyncinfer.sampling.transfer import upload
from asyncinfer.scheduler import ChosenSampler

__all__ = ["PluginCall", "PluginSamplers"]

I64 = npt.NDArray[np.int64]

_DREW: Final = "sample() drew tokens, and other samplers follow it: it does not declare `draws`"


@dataclass(slots=True)
class PluginCall:
    """What a plugin made of its rows in one step. Rows with several samplers have one for each,
    in their order, as far as they came."""

    plugin: GuardedSampler
    #: Its rows of the step's logits; the same on the device, or None for all of them.
    rows: I64
    at: torch.Tensor | None
    #: float32 `[k]`: the largest logit of each row before any plugin saw it.
    peak: torch.Tensor
    #: int64 `[k]`: what it drew, all in `[0, vocab)`; None leaves the draw to the chain.
    tokens: torch.Tensor | None = None
    #: float32 `[k]`, not finite where the answer cannot be used; None if it is known already
    #: (`fault`), or until the chain has drawn (`settle`).
    verdict: torch.Tensor | None = None
    #: What it drew from, if it called `draw`.
    drawn: Drawn | None = None
    fault: PluginFault | None = None


@dataclass(slots=True)
class _Tenant:
    number: int
    #: What it has joined, in order.
    joined: list[tuple[ChosenSampler, GuardedSampler]] = field(default_factory=list)
    #: The plugin that it could not join, and why.
    failed: tuple[GuardedSampler, PluginFault] | None = None


class PluginSamplers:
    """The samplers of an engine, one for each plugin that was ever asked for, and who is where.

    Rows that ask for the same plugins in the same order are one group: each of its plugins gets
    all of its rows at once.
    """

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
        #: The groups that have tenants: their numbers, and by number their plugins and how many
        #: tenants they have.
        self._groups: dict[tuple[GuardedSampler, ...], int] = {}
        self._plugins_of: dict[int, tuple[GuardedSampler, ...]] = {}
        self._sizes: Counter[int] = Counter()
        self._unused = count()
        self._tenants: dict[int, _Tenant] = {}
        #: Slots whose tenant has a fault.
        self._faulty: set[int] = set()
        #: Each plugin called in the step that is being sampled: for which slots, and their state
        #: before.
        self._before: list[tuple[GuardedSampler, torch.Tensor, list[torch.Tensor]]] = []

    @property
    def groups(self) -> int:
        """How many there are now."""
        return len(self._groups)

    def join(self, slot: int, samplers: Sequence[ChosenSampler]) -> int:
        """The slot is sampled by these plugins, in this order, from now on; gives their group's
        number. Whatever goes wrong is kept for the slot's next step."""
        plugins = tuple(self._plugin(chosen) for chosen in samplers)
        tenant = self._tenants[slot] = _Tenant(self._group(plugins))
        for chosen, plugin in zip(samplers, plugins, strict=True):
            try:
                if isinstance(chosen.saved, PluginFault):
                    raise chosen.saved
                plugin.join(slot, chosen.params, chosen.saved)
            except PluginFault as fault:
                tenant.failed = plugin, fault
                self._faulty.add(slot)
                break
            tenant.joined.append((chosen, plugin))
        return tenant.number

    def leave(self, slot: int) -> None:
        """Save what the slot's samplers know, for a tenant who may come back."""
        tenant = self._tenants.pop(slot, None)
        self._faulty.discard(slot)
        if tenant is None:
            return
        self._ungroup(tenant.number)
        for chosen, plugin in tenant.joined:
            try:
                chosen.saved = plugin.leave(slot)
            except PluginFault as fault:
                chosen.saved = fault

    def keep(self) -> None:
        """The step last called for is not taken back."""
        self._before.clear()

    def take_back(self) -> None:
        """Give every plugin called in this step the state that it had before."""
        for plugin, slots, state in self._before:
            try:
                plugin.restore(slots, state)
            except PluginFault as fault:
                for slot in slots.tolist():
                    self._tenants[slot].failed = plugin, fault
                    self._faulty.add(slot)
        self._before.clear()

    def call(
        self,
        chain: Chain,
        logits: torch.Tensor,
        slots: I64,
        positions: I64,
        table: npt.NDArray[Any],
    ) -> list[PluginCall]:
        """Hand the plugins of each group its rows; arguments as for `LogitChanges.apply`."""
        rows = np.flatnonzero(table["uses"] & Uses.PLUGIN)
        numbers = table["plugin"][rows]
        calls = []
        for number in np.unique(numbers).tolist() if len(self._sizes) > 1 else self._sizes:
            its = rows[numbers == number]
            if self._faulty:
                faulty = np.isin(slots[its], list(self._faulty))
                calls += [self._failed(logits, slots, row) for row in its[faulty].tolist()]
                its = its[~faulty]
            if its.size:
                plugins = self._plugins_of[number]
                calls += self._call(plugins, chain, logits, slots, positions, table, its)
        return calls

    def _failed(self, logits: torch.Tensor, slots: I64, row: int) -> PluginCall:
        """One row, for what it failed of may differ from one to the next."""
        failed = self._tenants[int(slots[row])].failed
        assert failed is not None
        plugin, fault = failed
        rows = np.array([row])
        return PluginCall(plugin, rows, *_peaks(logits, rows), fault=fault)

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
            # An alias has a shape of its own: what a plugin does to it does not reach ours.
            its, options = logits.view_as(logits), table
        else:
            its = logits.index_select(0, at)
            slots, positions, options = slots[rows], positions[rows], table[rows]
        # A row that the model has spoilt fails anyway; it must not take others with it.
        _blank(its, peak)
        barred = its.isneginf() if (options["uses"] & Uses.BARS).any() else None
        calls = []
        for following, plugin in zip(range(len(plugins) - 1, -1, -1), plugins, strict=True):
            call = PluginCall(plugin, rows, at, peak)
            calls.append(call)
            step = PluginStep(chain, self._history, its, slots, positions, options, following)
            try:
                if state := plugin.remember(step.slots):
                    self._before.append((plugin, step.slots, state))
                call.tokens, call.verdict = plugin.sample(step, barred)
                if following and call.tokens is not None:
                    raise plugin.fault(_DREW)
            except PluginFault as fault:
                call.tokens = call.verdict = None
                call.fault = fault
                return calls
            finally:
                call.drawn = step.close()
            if call.tokens is not None:
                return calls
            if barred is not None:
                its.masked_fill_(barred, -torch.inf)
            if following:
                call.verdict = its.amax(dim=-1)
                # The next plugin must not answer for what this one has spoilt.
                _blank(its, call.verdict, barred)
        if at is not None:
            logits.index_copy_(0, at, its)
        return calls

    def _group(self, plugins: tuple[GuardedSampler, ...]) -> int:
        """The number of these plugins in this order, for one tenant more."""
        number = self._groups.get(plugins)
        if number is None:
            number = self._groups[plugins] = next(self._unused)
            self._plugins_of[number] = plugins
        self._sizes[number] += 1
        return number

    def _ungroup(self, number: int) -> None:
        self._sizes[number] -= 1
        if not self._sizes[number]:
            # There are as many orders as clients can think of.
            del self._sizes[number], self._groups[self._plugins_of.pop(number)]

    def _plugin(self, chosen: ChosenSampler) -> GuardedSampler:
        kind = type(chosen.params)
        for plugin in self._plugins:
            if plugin.kind is kind:
                return plugin
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
        return plugin

    @staticmethod
    def settle(
        calls: Iterable[PluginCall], tokens: torch.Tensor, peak: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """After the chain has drawn: tokens with those of the plugins, peaks with the model's own.
        What the chain found of the plugins' logits is the verdict on them."""
        for call in calls:
            gone_on = call.tokens is None and call.verdict is not None
            if call.verdict is None and call.fault is None:
                call.verdict = peak if call.at is None else peak.index_select(0, call.at)
            if call.verdict is not None and call.drawn is not None:
                call.verdict = call.drawn.spoil(call.verdict)
            if gone_on:
                # Another plugin went on with its logits.
                continue
            if call.at is None:
                # It has all rows, so nobody else has any.
                return tokens if call.tokens is None else call.tokens, call.peak
            if call.tokens is not None:
                tokens.index_copy_(0, call.at, call.tokens)
            peak.index_copy_(0, call.at, call.peak)
        return tokens, peak

    @staticmethod
    def failures(call: PluginCall, verdict: torch.Tensor | None) -> dict[int, RequestFailed]:
        """Row -> why it failed. `verdict` is the call's, on the host."""
        if call.fault is not None:
            return {row: failure(call.fault) for row in call.rows.tolist()}
        assert verdict is not None
        failed = {}
        for i in (~verdict.isfinite()).nonzero()[:, 0].tolist():
            what = None if call.drawn is None else call.drawn.fault(i)
            if what is None and call.tokens is not None:
                what = "sample() answered a token that is out of range or barred"
            elif what is None:
                what = f"sample() left logits of which the largest is {verdict[i].item()}"
            fault = call.plugin.fault(f"{what}: row {i} of {len(call.rows)}")
            failed[int(call.rows[i])] = failure(fault)
        return failed


def _peaks(logits: torch.Tensor, rows: I64) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The rows on the device, None for all of them; and the largest logit of each."""
    if rows.size == len(logits):
        return None, logits.amax(dim=-1)
    (at,) = upload(logits.device, rows)
    return at, logits.index_select(0, at).amax(dim=-1)


def _blank(logits: torch.Tensor, peak: torch.Tensor, barred: torch.Tensor | None = None) -> None:
    """Set rows whose largest logit is not finite to 0, but for what is barred."""
    spoilt = ~peak.isfinite()[:, None]
    # To ask is free on a CPU, and elsewhere would wait for the device.
    if logits.device.type != "cpu" or bool(spoilt.any()):
        logits.masked_fill_(spoilt if barred is None else spoilt & ~barred, 0.0)
