"""`Registry`: plugins by name, loaded when first used and checked when loaded.

A plugin is found in one of three places, the first that knows the name:

- the built-ins,
- `registry.register("name", factory)`,
- an entry point of an installed distribution, in the registry's group::

      [project.entry-points."asyncinfer.cache_policies"]
      my_policy = "my_package:MyPolicy"

A factory, such as a class of that kind, is called with the arguments that are given with the name.
A sampler's factory is the class of its parameters, called with those of a request. A plugin that
nobody uses is never imported, so a broken one does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import Any, Final, Generic, TypeVar, cast

from asyncinfer.errors import InvalidRequest, PluginError
from asyncinfer.plugins.arguments import find_misfit
from asyncinfer.plugins.blocked import Blocked
from asyncinfer.plugins.chosen import Chosen, chosen_name
from asyncinfer.plugins.conformance import Needs, check_factory, check_kind, check_parts
from asyncinfer.plugins.info import PluginInfo, summary_of
from asyncinfer.plugins.installed import installed, origin
from asyncinfer.plugins.source import PluginSource, load
from asyncinfer.plugins.supervision import interrupted
from asyncinfer.plugins.timed_call import CallTimeout

__all__ = ["Registry"]

T = TypeVar("T")

BUILT_IN: Final = "built in"
REGISTERED: Final = "registered by the application"


class Registry(Generic[T]):
    """The plugins of one kind."""

    def __init__(
        self,
        group: str,
        protocol: type[T],
        version: int,
        builtins: Mapping[str, str],
        *,
        optional: tuple[type, ...] = (),
        dataclasses_only: bool = False,
    ) -> None:
        """
        Args:
            version: of the protocol; a plugin may state the one it was written for as
                `protocol_version`.
            builtins: names to `module:attribute`, strings so that nothing is imported before use.
            optional: protocols of methods that a plugin need not have.
            dataclasses_only: plugins are frozen dataclasses, the parameters of a request.
        """
        self.group = group
        self._dataclasses_only = dataclasses_only
        self._needs = Needs(protocol, version, optional)
        self._builtins = dict(builtins)
        self._registered: dict[str, Callable[..., Any]] = {}
        self._loaded: dict[str, PluginSource] = {}
        #: Names of installed plugins whose import did not return, and the message about each. They
        #: are not imported again, since each try leaves a thread behind.
        self._hung: dict[str, str] = {}
        self._blocked = Blocked(group)

    def names(self) -> tuple[str, ...]:
        """Every name that is known and not blocked, sorted; loads nothing."""
        return tuple(name for name in self._all_names() if self.blocked(name) is None)

    def is_built_in(self, name: str) -> bool:
        """Whether the plugin of a name comes with the package."""
        return name in self._builtins

    def register(self, name: str, factory: Callable[..., T]) -> None:
        """Make `factory` known as `name` in this process. Raises `PluginError` if it lacks
        something, or if the name is that of a built-in or installed plugin or of another factory;
        the same factory may be registered again."""
        label = self._label(name, REGISTERED)
        if not isinstance(name, str) or not name:
            raise PluginError(f"{label}: a name must be a non-empty string")
        self._check_factory(factory, label)
        if name in self._builtins:
            raise PluginError(f"{label}: the name is taken, by a plugin that is {BUILT_IN}")
        if points := self._points(name):
            raise PluginError(f"{label}: the name is taken, by {_owners(points)}")
        # `setdefault` is atomic, so that of two threads only one gets the name.
        if self._registered.setdefault(name, factory) is not factory:
            raise PluginError(f"{label}: the name is taken, by {self._registered[name]!r}")
        self._loaded.pop(name, None)

    def block(self, name: str) -> None:
        """Refuse the plugin of this name from now on; `"*"` stands for every installed one. It is
        not imported any more. A plugin that is already in use goes on."""
        self._blocked.add(name)

    def unblock(self, name: str) -> None:
        """Take a `block` back."""
        self._blocked.discard(name)

    def blocked(self, name: str) -> str | None:
        """What blocks a name, "plugins.block()" or the environment variable; None if nothing
        does."""
        ours = name in self._builtins or name in self._registered
        return self._blocked.reason(name, installed=not ours)

    def resolve(self, chosen: Chosen[T], args: Mapping[str, Any] | None = None) -> T:
        """The plugin of a name, made anew, with the arguments that go with it (`(name, args)`, or
        `args`); or the object itself, checked. Raises `PluginError`."""
        if args and isinstance(chosen, str):
            chosen = chosen, args
        return self.choose(chosen)[0]

    def choose(self, chosen: Chosen[T]) -> tuple[T, str]:
        """`resolve`, with the plugin's name for messages."""
        try:
            named = chosen_name(chosen)
        except ValueError as error:
            raise PluginError(f"{chosen!r} (group {self.group}): {error}") from None
        if named is not None:
            name, args = named
            source = self.source(name)
            return self._make(source, args), source.label
        label = self.label(chosen)
        if isinstance(chosen, type):
            raise PluginError(f"{label}: {chosen.__name__} is a class; give an instance of it")
        if self._dataclasses_only:
            check_kind(type(chosen), label)
        check_parts(chosen, self._needs, label)
        return cast(T, chosen), label

    def check(self, name: str, args: Mapping[str, Any]) -> None:
        """Raise `PluginError` unless there is a plugin of this name that takes these arguments.
        Does not call its factory."""
        source = self.source(name)
        self._check_arguments(source, args)

    def factory(self, name: str) -> tuple[Callable[..., T], str]:
        """The factory of the plugin of a name, and the plugin's name for messages. Raises
        `PluginError`."""
        source = self.source(name)
        return source.factory, source.label

    def source(self, name: str) -> PluginSource:
        """The source of the plugin of a name; imports it. Raises `PluginError`."""
        by = self.blocked(name)
        if by is not None:
            raise PluginError(f"plugin {name!r} in group {self.group} is blocked, by {by}")
        source = self._loaded.get(name)
        if source is None:
            if name in self._hung:
                raise PluginError(self._hung[name])
            try:
                # Two threads may both load it, and then find the same.
                source = self._loaded[name] = self._load(name)
            except PluginError as error:
                if isinstance(error.__cause__, CallTimeout):
                    self._hung[name] = str(error)
                raise
        return source

    def at_hand(self, name: str) -> bool:
        """Whether looking the plugin up and calling it imports nothing and runs no code of an
        installed distribution."""
        source = self._loaded.get(name)
        return source is not None and not source.installed

    def label(self, plugin: object) -> str:
        """The name for messages of a plugin that was given as an object."""
        kind = plugin if isinstance(plugin, type) else type(plugin)
        return self._label(kind.__name__, "given as an object")

    def describe(self) -> list[PluginInfo]:
        """Every known plugin, by name. Imports all that are not blocked."""
        return [self._describe(name) for name in self._all_names()]

    def shadowed(self) -> list[PluginInfo]:
        """Installed plugins that cannot be used since another plugin has their name."""
        found = []
        for name in sorted({point.name for point in installed().points.get(self.group, ())}):
            points = self._points(name)
            if name in self._builtins:
                problem: str | None = f"the name is taken, by a plugin that is {BUILT_IN}"
            elif name in self._registered:
                problem = f"the name is taken, by a plugin that is {REGISTERED}"
            else:
                problem = self._clash(name)
            if problem is not None:
                found.append(PluginInfo(name, _owners(points), "", problem, self.group))
        return found

    def _describe(self, name: str) -> PluginInfo:
        if name in self._builtins:
            whence = BUILT_IN
        elif name in self._registered:
            whence = REGISTERED
        else:
            whence = _owners(self._points(name))
        try:
            factory, _ = self.factory(name)
        except PluginError as error:
            return PluginInfo(name, whence, "", str(error), self.group)
        return PluginInfo(name, whence, summary_of(factory), None, self.group)

    def _all_names(self) -> list[str]:
        found = installed().points.get(self.group, ())
        return sorted({*self._builtins, *self._registered, *(point.name for point in found)})

    def _points(self, name: str) -> tuple[EntryPoint, ...]:
        found = installed().points.get(self.group, ())
        return tuple(point for point in found if point.name == name)

    def _clash(self, name: str) -> str | None:
        """A message if several installed plugins have one name, else None. Call it late, since
        `origin` reads files."""
        points = self._points(name)
        if len({point.value for point in points}) < 2:
            return None
        values = {point.value: origin(point) for point in points}
        each = " and ".join(f"{value} ({whence})" for value, whence in sorted(values.items()))
        return f"plugin {name!r} in group {self.group} is there several times: {each}"

    def _load(self, name: str) -> PluginSource:
        if name in self._builtins:
            module, _, attribute = self._builtins[name].partition(":")
            return PluginSource(
                getattr(import_module(module), attribute), self._label(name, BUILT_IN)
            )
        if name in self._registered:
            return PluginSource(self._registered[name], self._label(name, REGISTERED))
        points = self._points(name)
        if not points:
            raise PluginError(
                f"no plugin {name!r} in group {self.group}; known: {', '.join(self.names())}"
            )
        if (clash := self._clash(name)) is not None:
            raise PluginError(clash)
        label = self._label(name, origin(points[0]))
        factory = load(points[0], label)
        self._check_factory(factory, label)
        return PluginSource(factory, label, installed=True)

    def _make(self, source: PluginSource, args: Mapping[str, Any]) -> T:
        self._check_arguments(source, args)
        try:
            plugin = source.make(args)
        except PluginError:
            raise
        except BaseException as error:
            if interrupted(error):
                raise
            # An InvalidRequest is what `check_real` and its like raise: it names the argument.
            what = str(error) if isinstance(error, InvalidRequest) else repr(error)
            raise PluginError(f"{source.label}: cannot be made: {what}") from error
        if isinstance(plugin, type):
            raise PluginError(f"{source.label}: cannot be made: it gave the class {plugin!r}")
        check_parts(plugin, self._needs, source.label)
        return plugin  # type: ignore[no-any-return]

    def _check_arguments(self, source: PluginSource, args: Mapping[str, Any]) -> None:
        misfit = find_misfit(source.factory, args)
        if misfit is not None:
            what = "" if misfit.name is None else f"has no argument {misfit.name!r}: "
            raise PluginError(f"{source.label}: cannot be made: {what}{misfit.why}")

    def _check_factory(self, factory: object, label: str) -> None:
        if self._dataclasses_only and callable(factory):
            check_kind(factory, label)
        check_factory(factory, self._needs, label)

    def _label(self, name: object, whence: str) -> str:
        return f"plugin {name!r} ({whence}, group {self.group})"


def _owners(points: tuple[EntryPoint, ...]) -> str:
    return " and ".join(sorted({origin(point) for point in points}))
