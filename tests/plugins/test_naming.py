"""One way to name a plugin, for every kind: a name, a name with arguments, or an object."""

from __future__ import annotations

from typing import Any

import pytest

from asyncinfer import Engine, EngineConfig, PluginError, plugins
from asyncinfer.cache.policies.ttl import TTL
from asyncinfer.plugins import Registry
from asyncinfer.plugins.arguments import find_misfit
from asyncinfer.protocols import Observer, ObserverEvent, RequestView
from asyncinfer.samplers import Mirostat
from asyncinfer.scheduler.policy import Priority
from asyncinfer.telemetry.request_log import RequestLog
from asyncinfer.testing import FakeModel

#: Registry, a name, arguments, what they make.
KINDS: list[tuple[Registry[Any], str, dict[str, Any], type]] = [
    (plugins.cache_policies, "ttl", {"seconds": 7.0}, TTL),
    (plugins.observers, "request-log", {"slower_than": 1.0}, RequestLog),
    (plugins.samplers, "mirostat", {"tau": 3.0}, Mirostat),
    (plugins.schedulers, "priority", {"ageing": 3.0}, Priority),
]
kinds = pytest.mark.parametrize(
    ("registry", "name", "args", "kind"), KINDS, ids=[each[1] for each in KINDS]
)


@kinds
def test_all_forms(registry: Registry[Any], name: str, args: dict[str, Any], kind: type) -> None:
    made = [registry.resolve(name), registry.resolve((name, {})), registry.resolve(name, {})]
    made += [registry.resolve((name, args)), registry.resolve(name, args)]
    assert all(type(each) is kind for each in made)
    assert len({id(each) for each in made}) == len(made)
    assert registry.resolve(made[0]) is made[0]
    label = f"plugin {name!r} (built in, group {registry.group})"
    assert registry.choose((name, args))[1] == label
    given = f"plugin {kind.__name__!r} (given as an object, group {registry.group})"
    assert registry.choose(made[0]) == (made[0], given)


@kinds
def test_arguments_that_do_not_fit(
    registry: Registry[Any], name: str, args: dict[str, Any], kind: type
) -> None:
    for call in (registry.resolve, lambda chosen: registry.check(*chosen)):
        with pytest.raises(PluginError, match=rf"'{name}'.*has no argument 'nope': takes .*\w"):
            call((name, {**args, "nope": 1}))
    registry.check(name, args)
    with pytest.raises(PluginError, match="no plugin 'nobody'"):
        registry.check("nobody", {})


@kinds
@pytest.mark.parametrize("wrong", [(), ("ttl",), ("ttl", 3), ("ttl", {1: 2}), (1, {}), ["ttl", {}]])
def test_what_names_nothing(
    registry: Registry[Any], name: str, args: dict[str, Any], kind: type, wrong: Any
) -> None:
    with pytest.raises(PluginError, match=rf"group {registry.group}.*must be a pair"):
        registry.resolve(wrong)


@pytest.mark.parametrize("option", ["cache_policy", "scheduler", "observers"])
@pytest.mark.parametrize("wrong", [(), ("ttl",), ("ttl", 3), ("ttl", {1: 2}), ["ttl", {}]])
def test_a_config_looks_at_the_form(option: str, wrong: Any) -> None:
    value, where = (wrong, option) if option != "observers" else ([wrong], r"observers\[0\]")
    with pytest.raises(ValueError, match=f"^{where}=.*must be a pair"):
        EngineConfig(**{option: value})


def test_a_class_is_no_object() -> None:
    with pytest.raises(PluginError, match=r"'RequestView' .*RequestView is a class; give an ins"):
        plugins.schedulers.resolve(RequestView)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_an_engine_takes_them() -> None:
    seen: list[tuple[str, Any]] = []

    class Notes(Observer):
        def __init__(self, into: str) -> None:
            self.into = into

        def observe(self, event: ObserverEvent) -> None:
            seen.append((self.into, event))

    plugins.register("asyncinfer.observers", "notes", Notes)
    async with Engine(
        FakeModel(),
        cache_policy=("ttl", {"seconds": 60}),
        scheduler=("priority", {"ageing": 3}),
        observers=[("notes", {"into": "a"}), Notes("b")],
    ) as engine:
        assert (await engine.generate("x", max_tokens=2)).text
    assert {"a", "b"} == {into for into, _ in seen}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_policy": ("ttl", {"second": 1})}, "'ttl'.*no argument 'second': takes seconds"),
        ({"cache_policy": ("ttl", {"seconds": -1})}, "'ttl'.*seconds: a life of -1"),
        ({"cache_policy": "nobody"}, "no plugin 'nobody'.*known: arc"),
        ({"scheduler": ("fcfs", {"n": 1})}, "'fcfs'.*no argument 'n': takes no arguments"),
        ({"observers": [("request-log", {"slow": 1})]}, "'request-log'.*no argument 'slow'"),
    ],
)
async def test_what_an_engine_refuses_names_plugin_and_argument(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(PluginError, match=says):
        await Engine.open(FakeModel(), **options)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {"cache_policy": "nobody"},
        {"scheduler": ("fcfs", {"n": 1})},
        {"observers": ["request-log", "nobody"]},
    ],
    ids=lambda options: next(iter(options)),
)
async def test_it_is_refused_before_the_model_is_loaded(options: dict[str, Any]) -> None:
    with pytest.raises(PluginError):
        await Engine.open(FakeModel(load_error=AssertionError("loaded")), **options)


def test_misfits() -> None:
    def takes(a: int, /, b: int, *rest: int, c: int, d: int = 4) -> None: ...

    def takes_any(b: int, **more: int) -> None: ...

    class Raises:
        @property
        def __signature__(self) -> object:
            raise OSError("no disk")

        def __call__(self) -> None: ...

    class Liar:
        __signature__ = 3

    assert find_misfit(takes, {"b": 1, "c": 2}) is None
    assert find_misfit(takes, {"b": 1, "c": 2, "a": 3}) == ("a", "takes b, c, d")
    assert find_misfit(takes, {"b": 1}) == (None, "needs c")
    assert find_misfit(takes_any, {"b": 1, "z": 2}) is None
    assert find_misfit(takes_any, {"z": 2}) == (None, "needs b")
    assert find_misfit(lambda: None, {"z": 2}) == ("z", "takes no arguments")
    assert find_misfit(Liar, {"z": 2}) is None
    assert find_misfit(Raises(), {"z": 2}) is None
    assert find_misfit(min, {"z": 2}) is None
