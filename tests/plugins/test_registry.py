"""The plugin registry: found lazily, checked when loaded, the culprit named."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pytest

from asyncinfer.errors import PluginError
from asyncinfer.models.llama import Llama
from asyncinfer.models.mistral import Mistral
from asyncinfer.plugins import Registry, cache_policies, register, registries, schedulers
from asyncinfer.protocols import (
    CachedBlock,
    EvictionPolicy,
    Observer,
    ObserverEvent,
    RequestView,
    SchedulingPolicy,
)
from asyncinfer.samplers import XTC, Mirostat
from asyncinfer.speculation import PromptLookup


class Greeter(Protocol):
    def greet(self, name: str, loud: bool) -> str: ...

    def stop(self) -> None: ...


class Polite:
    def greet(self, name: str, loud: bool = False) -> str:
        return f"Good day, {name}"

    def stop(self) -> None:
        """Never."""


class NoStop:
    greet = Polite.greet


class WrongArguments(Polite):
    def greet(self, name: str) -> str:  # type: ignore[override]
        return name


class Old(Polite):
    protocol_version = 1


class Broken(Polite):
    def __init__(self) -> None:
        raise OSError("no socket")


GROUP = "asyncinfer.test_greeters"


@pytest.fixture
def registry() -> Registry[Greeter]:
    return Registry(GROUP, Greeter, 2, {"polite": f"{__name__}:Polite"})  # type: ignore[type-abstract]


GOOD = """
class Hello:
    protocol_version = 2
    def greet(self, name, loud):
        return "Hello, " + name
    def stop(self):
        pass
"""


def test_a_plugin_of_an_installed_distribution(registry: Registry[Greeter], install: Any) -> None:
    install(GROUP, "hello", "hello_module:Hello", GOOD)
    assert registry.names() == ("hello", "polite")
    assert "hello_module" not in sys.modules
    first = registry.resolve("hello")
    assert first.greet("you", False) == "Hello, you"
    assert registry.resolve("hello") is not first


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise ImportError('no such driver')", "no such driver"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("import asyncio; raise asyncio.CancelledError('nobody did')", "CancelledError"),
        ("def Hello(): raise GeneratorExit", "cannot be made: GeneratorExit"),
        ("def broken(:", "SyntaxError"),
        ("Other = 1", "Hello"),
        ("Hello = 1", "not a class or a function"),
        ("class Hello:\n    def greet(self, name, loud): pass", "no method 'stop'"),
        ("class Hello:\n    greet = None\n    def stop(self): pass", "no method 'greet'"),
        (GOOD.replace("name, loud", "name"), r"'greet' must take \(name, loud\)"),
        (GOOD.replace("name, loud", "name, loud, more"), "'greet' must take"),
        (GOOD.replace("def greet", "async def greet"), "'greet' must not be async"),
        (GOOD.replace("= 2", "= 3"), "version 3 of Greeter, this is version 2"),
        ("def Hello(): return 7", "no method 'greet'"),
        ("def Hello(size): return 7", "cannot be made: needs size"),
        (f"{GOOD}\nclass Late(Hello): pass\ndef Hello(): return Late", "it gave the class .*Late"),
        ("def Hello():\n    from asyncinfer import plugins\n    return Hello()", "RecursionError"),
        ("import asyncinfer.plugins as p; p.register(1, 2, 3)", "no group 1"),
        ("from hello_module import Hello", "cannot import name 'Hello'"),
        ("class Hello:\n    greet = property(lambda s: 1 / 0)", "no method 'greet'"),
        (
            "class Meta(type):\n    @property\n    def greet(self): raise OSError('no disk')\n"
            "class Hello(metaclass=Meta): pass",
            r"cannot be looked at: OSError\('no disk'\)",
        ),
    ],
)
def test_a_broken_plugin_is_named_and_harms_only_its_user(
    registry: Registry[Greeter], install: Any, source: str, says: str
) -> None:
    install(GROUP, "hello", "hello_module:Hello", source)
    assert isinstance(registry.resolve("polite"), Polite)
    with pytest.raises(PluginError, match=says) as caught:
        registry.resolve("hello")
    for part in ("'hello'", "greetings 1.2", GROUP):
        assert part in str(caught.value)


def test_a_ctrl_c_of_its_own_making(registry: Registry[Greeter], install: Any) -> None:
    """Off the main thread nobody has pressed Ctrl-C."""
    install(GROUP, "hello", "hello_module:Hello", "raise KeyboardInterrupt('by itself')")
    with (
        ThreadPoolExecutor(1) as thread,
        pytest.raises(PluginError, match=r"'hello' .*KeyboardInterrupt"),
    ):
        thread.submit(registry.resolve, "hello").result(120)


@pytest.mark.parametrize("target", ["hello_module", "", "hello_module:", "1 2 3", "..:a", ":Hello"])
def test_an_entry_point_that_leads_nowhere(
    registry: Registry[Greeter], install: Any, target: str
) -> None:
    install(GROUP, "hello", target, GOOD)
    with pytest.raises(PluginError, match=r"'hello' \(greetings 1\.2"):
        registry.resolve("hello")
    (info,) = (info for info in registry.describe() if info.name == "hello")
    assert info.problem


def test_two_distributions_with_one_name(registry: Registry[Greeter], install: Any) -> None:
    install(GROUP, "hello", "hello_module:Hello", GOOD)
    install(GROUP, "hello", "other_module:Hello", GOOD, dist="others")
    says = r"several times: hello_module:Hello \(greetings 1\.2\) and other_module:Hello \(others 1"
    with pytest.raises(PluginError, match=says):
        registry.resolve("hello")
    (found,) = registry.shadowed()
    (described,) = (info for info in registry.describe() if info.name == "hello")
    assert found == described
    assert found.origin == "greetings 1.2 and others 1.2"


def test_two_that_are_one(registry: Registry[Greeter], install: Any) -> None:
    """A package may be there twice, installed and editable."""
    install(GROUP, "hello", "hello_module:Hello", GOOD)
    install(GROUP, "hello", "hello_module:Hello", GOOD, dist="others")
    assert registry.resolve("hello").greet("you", False) == "Hello, you"
    assert registry.shadowed() == []


def test_a_built_in_cannot_be_replaced(registry: Registry[Greeter], install: Any) -> None:
    install(GROUP, "polite", "hello_module:Hello", GOOD)
    assert isinstance(registry.resolve("polite"), Polite)
    with pytest.raises(PluginError, match="taken"):
        registry.register("polite", Polite)


def test_an_unknown_name_lists_the_known_ones(registry: Registry[Greeter]) -> None:
    registry.register("again", Polite)
    with pytest.raises(PluginError, match=f"'rude' in group {GROUP}; known: again, polite"):
        registry.resolve("rude")


def test_registering(registry: Registry[Greeter]) -> None:
    registry.register("mine", Polite)
    registry.register("mine", Polite)
    assert isinstance(registry.resolve("mine"), Polite)
    with pytest.raises(PluginError, match=r"'mine'.*taken"):
        registry.register("mine", Broken)
    for factory, says in (
        (NoStop, "stop"),
        (WrongArguments, "greet"),
        (Old, "version 1"),
        (3, "3"),
    ):
        with pytest.raises(PluginError, match=f"'new'.*{says}"):
            registry.register("new", factory)  # type: ignore[arg-type]
    registry.register("new", Broken)
    with pytest.raises(PluginError, match=r"'new'.*no socket"):
        registry.resolve("new")


def test_an_installed_plugin_cannot_be_replaced(registry: Registry[Greeter], install: Any) -> None:
    install(GROUP, "hello", "hello_module:Hello", GOOD)
    with pytest.raises(PluginError, match=r"'hello'.*taken, by greetings 1\.2"):
        registry.register("hello", Polite)
    assert "hello_module" not in sys.modules
    assert registry.resolve("hello").greet("you", False) == "Hello, you"


def test_arguments_go_with_a_name(registry: Registry[Greeter]) -> None:
    class Tall(Polite):
        def __init__(self, height: int = 2) -> None:
            self.height = height

    registry.register("tall", Tall)
    made = registry.resolve("tall", {"height": 3})
    assert isinstance(made, Tall)
    assert made.height == 3
    with pytest.raises(PluginError, match=r"'tall'.*cannot be made.*'width'"):
        registry.resolve("tall", {"width": 3})


class Quiet(Observer):
    def observe(self, event: ObserverEvent) -> None: ...


class ByLength:
    def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
        return (request.prompt_len,)


#: Group -> what may be registered there, and what it lacks if it is of another kind.
PLUGINS: dict[str, tuple[Any, str]] = {
    "asyncinfer.cache_policies": (lambda: cache_policies.resolve("lru"), "published"),
    "asyncinfer.models": (Llama, "read"),
    "asyncinfer.observers": (Quiet, "observe"),
    "asyncinfer.proposers": (PromptLookup, "propose"),
    "asyncinfer.samplers": (XTC, "frozen dataclass"),
    "asyncinfer.schedulers": (ByLength, "rank"),
}


OTHERS: dict[str, Any] = {
    "asyncinfer.models": Mistral,
    "asyncinfer.observers": type("Again", (Quiet,), {}),
    "asyncinfer.proposers": type("Again", (PromptLookup,), {}),
    "asyncinfer.samplers": Mirostat,
    "asyncinfer.schedulers": type("Again", (ByLength,), {}),
}


def test_there_is_one_for_each_group() -> None:
    assert sorted(PLUGINS) == [registry.group for registry in registries()]


@pytest.mark.parametrize("group", PLUGINS)
def test_registering_in_a_group(group: str) -> None:
    (registry,) = (registry for registry in registries() if registry.group == group)
    factory, lacks = PLUGINS[group]
    register(group, "mine", factory)
    register(group, "mine", factory)
    assert registry.factory("mine")[0] is factory
    (info,) = (info for info in registry.describe() if info.name == "mine")
    assert (info.origin, info.problem) == ("registered by the application", None)
    built_in = next(name for name in registry.names() if registry.is_built_in(name))
    with pytest.raises(PluginError, match=f"'{built_in}'.*{group}.*taken, by .*built in"):
        register(group, built_in, factory)
    with pytest.raises(PluginError, match=f"'other'.*{group}.*{lacks}"):
        register(group, "other", Polite)
    with pytest.raises(PluginError, match=r"'mine'.*taken"):
        register(group, "mine", OTHERS.get(group, lambda: cache_policies.resolve("lfu")))
    with pytest.raises(PluginError, match="non-empty string"):
        register(group, "", factory)
    assert registry.factory("mine")[0] is factory


def test_a_group_there_is_not_names_those_there_are() -> None:
    with pytest.raises(
        PluginError, match=r"'samplers'.*asyncinfer\.proposers, asyncinfer\.samplers"
    ):
        register("samplers", "mine", XTC)


def test_objects(registry: Registry[Greeter]) -> None:
    plugin = Polite()
    assert registry.resolve(plugin) is plugin
    with pytest.raises(PluginError, match="give an instance"):
        registry.resolve(Polite)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"'NoStop' .*no method 'stop'"):
        registry.resolve(NoStop())  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="'int'"):
        registry.resolve(7)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lru"])
def test_cache_policies(name: str) -> None:
    policy = cache_policies.resolve(name)
    assert isinstance(policy, EvictionPolicy)
    assert cache_policies.resolve(name) is not policy


@pytest.mark.parametrize("name", ["fcfs", "priority", "deadline"])
def test_schedulers(name: str) -> None:
    assert isinstance(schedulers.resolve(name), SchedulingPolicy)


def test_a_plugin_of_thirty_lines() -> None:
    class Newest:
        def __init__(self) -> None:
            self.free: list[int] = []

        def published(self, block: CachedBlock) -> None: ...

        def released(self, block: CachedBlock) -> None:
            self.free.append(block.block)

        def reused(self, block: CachedBlock) -> None: ...

        def removed(self, block: CachedBlock) -> None: ...

        def victims(self, count: int) -> Sequence[int]:
            return self.free[-count:]

    class ShortestFirst:
        def rank(self, request: RequestView, now: float) -> tuple[float, ...]:
            return (request.prompt_len,)

    assert cache_policies.resolve(Newest())
    assert schedulers.resolve(ShortestFirst())
