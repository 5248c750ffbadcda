"""Resolves `SamplingParams.sampler` to the parameters of plugins, before any state exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from asyncinfer import plugins
from asyncinfer.errors import InvalidRequest, PluginError
from asyncinfer.params import SamplingParams
from asyncinfer.plugins.arguments import find_misfit
from asyncinfer.plugins.chosen import chosen_name
from asyncinfer.plugins.supervision import interrupted
from asyncinfer.protocols import SamplerPlugin

__all__ = ["resolve_samplers", "samplers_at_hand"]


def samplers_at_hand(params: SamplingParams) -> bool:
    """Whether `resolve_samplers` takes microseconds: it imports nothing, does not look for what is
    installed, and calls no code of an installed distribution. Only then may an event loop call
    it."""
    return all(
        plugins.samplers.at_hand(name)
        for chosen in _listed(params.sampler)
        if isinstance(name := chosen[0] if isinstance(chosen, tuple) and chosen else chosen, str)
    )


def resolve_samplers(params: SamplingParams) -> tuple[tuple[SamplerPlugin, str], ...]:
    """The parameters of the samplers that a request asks for, in order, each with what messages
    call it.

    Raises:
        InvalidRequest: there is no such plugin, its parameters are out of bounds, or the samplers
            do not go together.
        PluginError: a plugin is there, and broken.
    """
    chosen = params.sampler
    if _is_list(chosen):
        if params.sampler_args:
            raise InvalidRequest("sampler_args", dict(params.sampler_args), "go with a name")
        found = tuple(_resolve(each, f"sampler[{i}]") for i, each in enumerate(_listed(chosen)))
        _check_order(found, _listed(chosen))
    else:
        found = tuple(_resolve(each, "sampler", params.sampler_args) for each in _listed(chosen))
    for plugin, label in found:
        if params.greedy and not getattr(plugin, "changes_argmax", True):
            raise InvalidRequest(
                "temperature",
                params.temperature,
                f"must be > 0 for {label}: greedy, it does nothing",
            )
    return found


def _is_list(chosen: object) -> bool:
    """Whether it is a list of samplers, not a pair of a name and its arguments."""
    match chosen:
        case tuple((_, Mapping())):
            return False
    return isinstance(chosen, tuple)


def _listed(chosen: Any) -> tuple[object, ...]:
    if chosen is None:
        return ()
    return chosen if _is_list(chosen) else (chosen,)


def _check_order(found: tuple[tuple[SamplerPlugin, str], ...], listed: tuple[object, ...]) -> None:
    seen: set[type] = set()
    for i, ((plugin, label), chosen) in enumerate(zip(found, listed, strict=True)):
        # A plugin's sampler keeps one set of parameters for each slot.
        if type(plugin) in seen:
            raise InvalidRequest(f"sampler[{i}]", chosen, f"{label} goes into a list once")
        seen.add(type(plugin))
        if i + 1 < len(found) and getattr(plugin, "draws", False):
            bound = f"{label} draws the token, so it must be the last"
            raise InvalidRequest(f"sampler[{i}]", chosen, bound)


def _resolve(
    chosen: object, field: str, more: Mapping[str, Any] | None = None
) -> tuple[SamplerPlugin, str]:
    """`field` is what messages call the option; `more` is `sampler_args`."""
    try:
        named = chosen_name(chosen)
    except ValueError as error:
        raise InvalidRequest(field, chosen, str(error)) from None
    if isinstance(chosen, str) and more is not None:
        return _by_name(chosen, more, field, "sampler_args")
    if more:
        raise InvalidRequest("sampler_args", dict(more), "go with a name")
    if named is not None:
        return _by_name(*named, field, field)
    if isinstance(chosen, type) or not callable(getattr(chosen, "open", None)):
        bound = "must be a name, a pair (name, arguments) or a sampler plugin's parameters"
        raise InvalidRequest(field, chosen, bound)
    plugin = plugins.samplers.resolve(cast(SamplerPlugin, chosen))
    return plugin, plugins.samplers.label(chosen)


def _by_name(
    name: str, args: Mapping[str, Any], field: str, args_field: str
) -> tuple[SamplerPlugin, str]:
    try:
        source = plugins.samplers.source(name)
    except PluginError:
        if (by := plugins.samplers.blocked(name)) is not None:
            raise InvalidRequest(field, name, f"is blocked, by {by}") from None
        if name in (known := plugins.samplers.names()):
            raise
        bound = f"no sampler plugin of this name; known: {', '.join(known)}"
        raise InvalidRequest(field, name, bound) from None
    label = source.label
    misfit = find_misfit(source.factory, args)
    if misfit is not None:
        if misfit.name is None:
            raise InvalidRequest(args_field, dict(args), f"{label} {misfit.why}")
        where = f"{args_field}.{misfit.name}"
        raise InvalidRequest(where, args[misfit.name], f"{label} {misfit.why}")
    try:
        return source.make(args), label
    except PluginError:
        raise
    except InvalidRequest as error:
        bound = f"{error.bound} ({label})"
        raise InvalidRequest(f"{args_field}.{error.field}", error.value, bound) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(args_field, dict(args), f"{error} ({label})") from error
    except BaseException as error:
        if interrupted(error):
            raise
        raise PluginError(f"{label}: cannot be made: {error!r}") from error
