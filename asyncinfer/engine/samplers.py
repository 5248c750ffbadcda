"""From `SamplingParams.sampler` to a plugin's own parameters, before any state exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from asyncinfer import plugins
from asyncinfer.errors import InvalidRequest, PluginError
from asyncinfer.params import SamplingParams
from asyncinfer.protocols import SamplerPlugin

__all__ = ["resolve_sampler"]


def resolve_sampler(params: SamplingParams) -> tuple[SamplerPlugin, str]:
    """The parameters of the sampler that a request asks for, and what messages call it.

    Raises:
        InvalidRequest: there is no such plugin, or its parameters are out of bounds.
        PluginError: the plugin is there, and broken.
    """
    chosen, args = params.sampler, params.sampler_args
    if isinstance(chosen, str):
        plugin, label = _by_name(chosen, args)
    elif isinstance(chosen, type) or not callable(getattr(chosen, "open", None)):
        raise InvalidRequest("sampler", chosen, "must be a name or a sampler plugin's parameters")
    elif args:
        raise InvalidRequest("sampler_args", dict(args), "go with a name, not with an object")
    else:
        plugin = plugins.samplers.resolve(cast(SamplerPlugin, chosen))
        label = plugins.samplers.label(chosen)
    if params.greedy and not getattr(plugin, "changes_argmax", True):
        raise InvalidRequest(
            "temperature", params.temperature, f"must be > 0 for {label}: greedy, it does nothing"
        )
    return plugin, label


def _by_name(name: str, args: Mapping[str, Any]) -> tuple[SamplerPlugin, str]:
    try:
        factory, label = plugins.samplers.factory(name)
    except PluginError:
        if name in (known := plugins.samplers.names()):
            raise
        bound = f"no sampler plugin of this name; known: {', '.join(known)}"
        raise InvalidRequest("sampler", name, bound) from None
    assert isinstance(factory, type), "the registry takes frozen dataclasses only"
    _check_names(factory, args)
    try:
        return factory(**args), label
    except InvalidRequest as error:
        bound = f"{error.bound} ({label})"
        raise InvalidRequest(f"sampler_args.{error.field}", error.value, bound) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest("sampler_args", dict(args), f"{error} ({label})") from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"{label}: cannot be made: {error!r}") from error


def _check_names(kind: type, args: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` unless `args` name fields of the dataclass `kind`, every one that
    has no default among them."""
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    has = f"has the parameters {', '.join(fields)}" if fields else "has no parameters"
    for name in args:
        if name not in fields:
            raise InvalidRequest(f"sampler_args.{name}", args[name], f"{kind.__name__} {has}")
    for name, field in fields.items():
        missing = dataclasses.MISSING
        if name not in args and field.default is missing and field.default_factory is missing:
            raise InvalidRequest("sampler_args", dict(args), f"{kind.__name__} needs {name}")
