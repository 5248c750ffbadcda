"""Whether a plugin, or its factory, has what its protocol asks for."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache

from asyncinfer.errors import PluginError
from asyncinfer.plugins.supervision import interrupted

__all__ = ["Needs", "check_factory", "check_kind", "check_parts"]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a kind of plugin must have."""

    protocol: type
    version: int
    #: Protocols of optional methods: a plugin that has one must take its arguments.
    optional: tuple[type, ...] = ()


def check_factory(factory: object, needs: Needs, label: str) -> None:
    """Raise `PluginError` unless it is callable and, if it is a class, passes `check_parts`."""
    if not callable(factory):
        raise PluginError(f"{label}: {factory!r} is not a class or a function")
    if isinstance(factory, type):
        check_parts(factory, needs, label)


def check_kind(kind: object, label: str) -> None:
    """Raise `PluginError` unless it is a frozen dataclass."""
    name = getattr(kind, "__name__", repr(kind))
    params = getattr(kind, "__dataclass_params__", None)
    if not isinstance(kind, type) or not getattr(params, "frozen", False):
        raise PluginError(f"{label}: {name} must be a frozen dataclass")


def check_parts(plugin: object, needs: Needs, label: str) -> None:
    """Compare a plugin, or its class, with the protocol. Raises `PluginError`."""
    try:
        lack = _lack(plugin, needs)
    # Reading an attribute may run a metaclass or a property, which may raise anything.
    except BaseException as error:
        if interrupted(error):
            raise
        raise PluginError(f"{label}: cannot be looked at: {error!r}") from error
    if lack is not None:
        raise PluginError(f"{label}: {lack}")


def _lack(plugin: object, needs: Needs) -> str | None:
    """What the plugin lacks, for a message; None if nothing."""
    version = getattr(plugin, "protocol_version", needs.version)
    if version != needs.version:
        what = f"version {version!r} of {needs.protocol.__name__}"
        return f"is written for {what}, this is version {needs.version}"
    optional = {name: each for kind in needs.optional for name, each in _methods(kind).items()}
    for name, arguments in {**_methods(needs.protocol), **optional}.items():
        if name in optional and not hasattr(plugin, name):
            continue
        method = getattr(plugin, name, None)
        if not callable(method):
            return f"has no method {name!r}"
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            return f"method {name!r} must not be async: it is called on a thread without a loop"
        if not _accepts(plugin, name, len(arguments)):
            return f"method {name!r} must take ({', '.join(arguments)})"
    return None


@cache
def _methods(protocol: type) -> dict[str, list[str]]:
    """The methods that a protocol requires, each with the names of its arguments."""
    return {
        name: [*inspect.signature(value).parameters][1:]
        for base in reversed(protocol.__mro__)
        if getattr(base, "_is_protocol", False)
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def _accepts(plugin: object, name: str, count: int) -> bool:
    """Whether method `name` of an object (or of a class) takes `count` positional arguments."""
    method = getattr(plugin, name)
    static = isinstance(inspect.getattr_static(plugin, name), staticmethod | classmethod)
    if isinstance(plugin, type) and not static:
        count += 1
    try:
        inspect.signature(method).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        # A method written in C may have no signature.
        return True
    return True
