"""`SamplerGroups`: which sampler plugins each slot is sampled by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from asyncinfer.plugins.supervision import PluginFault
from asyncinfer.sampling.guarded_sampler import GuardedSampler
from asyncinfer.scheduler import ChosenSampler

__all__ = ["SamplerGroups"]


@dataclass(slots=True)
class _SamplerGroup:
    number: int
    plugins: tuple[GuardedSampler, ...]
    slots: int = 0


@dataclass(slots=True)
class _Member:
    group: _SamplerGroup
    #: The samplers whose `join` returned, in order.
    joined: list[tuple[ChosenSampler, GuardedSampler]] = field(default_factory=list)


class SamplerGroups:
    """Slots that ask for the same plugins in the same order are one group, whose rows each of its
    plugins gets as one tensor. Slots of one engine that use the same plugin share one sampler."""

    def __init__(self, open_sampler: Callable[[ChosenSampler], GuardedSampler]) -> None:
        """`open_sampler` makes the sampler of a plugin for the first slot that asks for it."""
        self._open_sampler = open_sampler
        self._plugins: list[GuardedSampler] = []
        #: Only groups that have a slot, since clients may ask for any number of orders.
        self._groups: dict[tuple[GuardedSampler, ...], _SamplerGroup] = {}
        self._by_number: dict[int, _SamplerGroup] = {}
        self._unused = count()
        self._members: dict[int, _Member] = {}
        #: By slot: the plugin that cannot sample it, and why.
        self.failed: dict[int, tuple[GuardedSampler, PluginFault]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of all groups."""
        return tuple(self._by_number)

    def plugins_of(self, number: int) -> tuple[GuardedSampler, ...]:
        """The plugins of a group, in order."""
        return self._by_number[number].plugins

    def join(self, slot: int, samplers: Sequence[ChosenSampler]) -> int:
        """Sample the slot by these plugins from now on; returns the number of their group. A fault
        is kept in `failed`, for the slot's next step."""
        plugins = tuple(self._plugin(chosen) for chosen in samplers)
        member = self._members[slot] = _Member(self._group(plugins))
        for chosen, plugin in zip(samplers, plugins, strict=True):
            try:
                if isinstance(chosen.saved, PluginFault):
                    raise chosen.saved
                plugin.join(slot, chosen.params, chosen.saved)
            except PluginFault as fault:
                self.failed[slot] = plugin, fault
                break
            member.joined.append((chosen, plugin))
        return member.group.number

    def leave(self, slot: int) -> None:
        """Save the state of the slot's samplers, for a request that was preempted."""
        member = self._members.pop(slot, None)
        self.failed.pop(slot, None)
        if member is None:
            return
        group = member.group
        group.slots -= 1
        if not group.slots:
            del self._groups[group.plugins], self._by_number[group.number]
        for chosen, plugin in member.joined:
            try:
                chosen.saved = plugin.leave(slot)
            except PluginFault as fault:
                chosen.saved = fault

    def _group(self, plugins: tuple[GuardedSampler, ...]) -> _SamplerGroup:
        """The group of these plugins, with one slot more."""
        group = self._groups.get(plugins)
        if group is None:
            group = self._groups[plugins] = _SamplerGroup(next(self._unused), plugins)
            self._by_number[group.number] = group
        group.slots += 1
        return group

    def _plugin(self, chosen: ChosenSampler) -> GuardedSampler:
        kind = type(chosen.params)
        for plugin in self._plugins:
            if plugin.kind is kind:
                return plugin
        plugin = self._open_sampler(chosen)
        self._plugins.append(plugin)
        return plugin
