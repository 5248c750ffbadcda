"""`Registry`: plugins by name, loaded when first used and checked when loaded.

A plugin is found in one of three places, the first that knows the name:

- the built-ins,
- `registry.register("name", factory)`,
- an entry point of an installed distribution, in the registry's group::

      [project.entry-points."asyncinfer.cache_policies"]
      my_policy = "my_package:MyPolicy"

A factory is called without arguments, or with those that go with the name (a class of that kind
is one); that of a sampler is its parameters' class, called with those of a request. A plugin that
nobody uses is never imported, so a broken one breaks nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Generic, TypeVar

from asyncinfer.errors import PluginError

__all__ = ["PluginInfo", "Registry"]

T = TypeVar("T")

BUILT_IN: Final = "built in"
REGISTERED: Final = "registered by the application"


@dataclass(frozen=True, slots=True)
class _Origin:
    """A factory and where it is from, for messages."""

    factory: Callable[..., Any]
    label: str


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What is known of one plugin."""

    name: str
    #: "built in", "registered by the application", or distribution and version.
    origin: str
    #: First sentence of its docstring.
    summary: str
    #: Why it cannot be used; None if it can.
    problem: str | None


class Registry(Generic[T]):
    """The plugins of one kind."""

    def __init__(
        self,
        group: str,
        protocol: type[T],
        version: int,
        builtins: Mapping[str, str],
        *,
        dataclasses_only: bool = False,
    ) -> None:
        """`builtins` maps names to `module:attribute`, so that nothing is imported before use.
        A plugin may state the protocol it was written for as `protocol_version`. With
        `dataclasses_only`, plugins are frozen dataclasses: the parameters of a request."""
        self.group = group
        self._dataclasses_only = dataclasses_only
        self._protocol = protocol
        self._version = version
        self._builtins = dict(builtins)
        self._registered: dict[str, Callable[..., Any]] = {}
        self._loaded: dict[str, _Origin] = {}

    def names(self) -> tuple[str, ...]:
        """Every known name, sorted; loads nothing."""
        found = (point.name for point in entry_points(group=self.group))
        return tuple(sorted({*self._builtins, *self._registered, *found}))

    def register(self, name: str, factory: Callable[..., T]) -> None:
        """Make `factory` known as `name` in this process. Raises `PluginError` if it lacks
        something, or if the name is that of a built-in or installed plugin or of another factory;
        the same factory may be registered again."""
        label = self._label(name, REGISTERED)
        if not isinstance(name, str) or not name:
            raise PluginError(f"{label}: a name must be a non-empty string")
        self._check_factory(factory, label)
        installed = entry_points(group=self.group, name=name)
        if name in self._builtins:
            raise PluginError(f"{label}: the name is taken, by a plugin that is {BUILT_IN}")
        if installed:
            owners = " and ".join(sorted(map(_distribution, installed)))
            raise PluginError(f"{label}: the name is taken, by {owners}")
        # One step, so that of two threads only one gets the name.
        if self._registered.setdefault(name, factory) is not factory:
            raise PluginError(f"{label}: the name is taken, by {self._registered[name]!r}")
        self._loaded.pop(name, None)

    def resolve(self, plugin: str | T, args: Mapping[str, Any] | None = None) -> T:
        """The plugin of a name, made anew, with `args` if there are any; or `plugin` itself,
        checked. Raises `PluginError`."""
        if isinstance(plugin, str):
            return self._make(self._find(plugin), args or {})
        label = self.label(plugin)
        if isinstance(plugin, type):
            raise PluginError(f"{label}: {plugin.__name__} is a class; give an instance of it")
        self._check_kind(type(plugin), label)
        self._check_parts(plugin, label)
        return plugin

    def factory(self, name: str) -> tuple[Callable[..., T], str]:
        """What makes the plugin of a name, and what messages call it. Raises `PluginError`."""
        origin = self._find(name)
        return origin.factory, origin.label

    def label(self, plugin: object) -> str:
        """What messages call a plugin given as an object."""
        return self._label(type(plugin).__name__, "given as an object")

    def describe(self) -> list[PluginInfo]:
        """Every known plugin, by name; imports them all."""
        return [self._describe(name) for name in self.names()]

    def _describe(self, name: str) -> PluginInfo:
        if name in self._builtins:
            origin = BUILT_IN
        elif name in self._registered:
            origin = REGISTERED
        else:
            points = entry_points(group=self.group, name=name)
            origin = " and ".join(sorted(map(_distribution, points)))
        try:
            factory, _ = self.factory(name)
        except PluginError as error:
            return PluginInfo(name, origin, "", str(error))
        paragraph = (inspect.getdoc(factory) or "").partition("\n\n")[0]
        summary = " ".join(paragraph.split()).partition(". ")[0].removesuffix(".")
        return PluginInfo(name, origin, summary, None)

    def _find(self, name: str) -> _Origin:
        origin = self._loaded.get(name)
        if origin is None:
            # Two threads may both load it; they find the same.
            origin = self._loaded[name] = self._load(name)
        return origin

    def _load(self, name: str) -> _Origin:
        if name in self._builtins:
            module, _, attribute = self._builtins[name].partition(":")
            return _Origin(getattr(import_module(module), attribute), self._label(name, BUILT_IN))
        if name in self._registered:
            label = self._label(name, REGISTERED)
            return _Origin(self._registered[name], label)
        points = tuple(entry_points(group=self.group, name=name))
        if not points:
            raise PluginError(
                f"no plugin {name!r} in group {self.group}; known: {', '.join(self.names())}"
            )
        if len({point.value for point in points}) > 1:
            owners = " and ".join(sorted(map(_distribution, points)))
            raise PluginError(
                f"plugin {name!r} in group {self.group} comes from several distributions: {owners}"
            )
        label = self._label(name, _distribution(points[0]))
        try:
            factory = points[0].load()
        # A module may also leave by sys.exit(), which must not end the host.
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"{label}: {points[0].value} cannot be imported: {error!r}"
            ) from error
        self._check_factory(factory, label)
        return _Origin(factory, label)

    def _make(self, origin: _Origin, args: Mapping[str, Any]) -> T:
        try:
            plugin = origin.factory(**args)
        except (Exception, SystemExit) as error:
            raise PluginError(f"{origin.label}: cannot be made: {error!r}") from error
        self._check_parts(plugin, origin.label)
        return plugin  # type: ignore[no-any-return]

    def _check_factory(self, factory: object, label: str) -> None:
        if not callable(factory):
            raise PluginError(f"{label}: {factory!r} is not a class or a function")
        self._check_kind(factory, label)
        if isinstance(factory, type):
            self._check_parts(factory, label)

    def _check_kind(self, kind: object, label: str) -> None:
        if self._dataclasses_only:
            name = getattr(kind, "__name__", repr(kind))
            params = getattr(kind, "__dataclass_params__", None)
            if not isinstance(kind, type) or params is None or not params.frozen:
                raise PluginError(f"{label}: {name} must be a frozen dataclass")

    def _check_parts(self, plugin: object, label: str) -> None:
        """Compare a plugin, or its class, with the protocol."""
        version = getattr(plugin, "protocol_version", self._version)
        if version != self._version:
            raise PluginError(
                f"{label}: is written for version {version!r} of {self._protocol.__name__}, "
                f"this is version {self._version}"
            )
        for name, needed in _methods(self._protocol).items():
            method = getattr(plugin, name, None)
            if not callable(method):
                raise PluginError(f"{label}: has no method {name!r}")
            arguments = [*inspect.signature(needed).parameters][1:]
            if not _accepts(plugin, name, len(arguments)):
                raise PluginError(f"{label}: method {name!r} must take ({', '.join(arguments)})")

    def _label(self, name: object, origin: str) -> str:
        return f"plugin {name!r} ({origin}, group {self.group})"


def _methods(protocol: type) -> dict[str, Callable[..., Any]]:
    return {
        name: value
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
        # Written in C: it has no signature to look at.
        return True
    return True


def _distribution(point: EntryPoint) -> str:
    dist = point.dist
    return "an unknown distribution" if dist is None else f"{dist.name} {dist.version}"
