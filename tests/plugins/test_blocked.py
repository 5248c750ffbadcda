"""A name can be blocked: by the program, and from outside by the environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from asyncinfer import Engine, InvalidRequest, PluginError, plugins
from asyncinfer.cli.app import asyncinfer as cli
from asyncinfer.testing import FakeModel

GROUP = "asyncinfer.schedulers"
SOURCE = """
class Hello:
    def rank(self, request, now):
        return (0,)
"""


@pytest.fixture(params=["program", "environment"])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    done: list[tuple[str, str]] = []

    def blocks(group: str, name: str) -> None:
        done.append((group, name))
        if request.param == "program":
            plugins.block(group, name)
        else:
            listed = ", ".join(f"{group}:{name}" for group, name in done)
            monkeypatch.setenv("ASYNCINFER_BLOCK_PLUGINS", listed)

    yield blocks
    for group, name in done:
        plugins.unblock(group, name)


def test_an_installed_one_is_not_imported(install: Any, block: Any) -> None:
    install(GROUP, "hello", "hello_module:Hello", SOURCE)
    block(GROUP, "hello")
    block("asyncinfer.samplers", "hello")
    with pytest.raises(PluginError, match=r"'hello' in group asyncinfer.schedulers is blocked, by"):
        plugins.schedulers.resolve("hello")
    assert "hello" not in plugins.schedulers.names()
    done = CliRunner().invoke(cli, ["plugins"])
    assert "NOT USABLE: plugin 'hello' in group asyncinfer.schedulers is blocked" in done.output
    assert "hello_module" not in sys.modules


def test_one_that_was_loaded_before(install: Any, block: Any) -> None:
    install(GROUP, "hello", "hello_module:Hello", SOURCE)
    assert plugins.schedulers.resolve("hello")
    block(GROUP, "hello")
    with pytest.raises(PluginError, match="is blocked"):
        plugins.schedulers.resolve("hello")


def test_a_built_in(block: Any) -> None:
    block("asyncinfer.cache_policies", "arc")
    with pytest.raises(PluginError, match="is blocked"):
        plugins.cache_policies.resolve(("arc", {}))
    assert plugins.cache_policies.resolve("lru")


def test_all_that_is_installed(install: Any, block: Any) -> None:
    install(GROUP, "hello", "hello_module:Hello", SOURCE)
    block(GROUP, "*")
    with pytest.raises(PluginError, match="is blocked"):
        plugins.schedulers.resolve("hello")
    assert plugins.schedulers.resolve("fcfs")
    assert plugins.schedulers.names() == ("deadline", "fcfs", "priority")


def test_a_name_that_is_given_later(block: Any) -> None:
    block(GROUP, "mine")
    plugins.register(GROUP, "mine", type("Mine", (), {"rank": lambda s, r, n: r}))
    with pytest.raises(PluginError, match="is blocked"):
        plugins.schedulers.resolve("mine")


@pytest.mark.anyio
async def test_engines_and_requests(block: Any) -> None:
    block("asyncinfer.samplers", "dry")
    block(GROUP, "priority")
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match=r"sampler='dry': .*blocked") as caught:
            await engine.generate("x", sampler="dry")
        assert caught.value.field == "sampler"
    with pytest.raises(PluginError, match=r"'priority'.*blocked"):
        await Engine.open(FakeModel(), scheduler="priority")


def test_unblocking() -> None:
    plugins.block(GROUP, "fcfs")
    plugins.block(GROUP, "fcfs")
    plugins.unblock(GROUP, "fcfs")
    assert plugins.schedulers.resolve("fcfs")
    plugins.unblock(GROUP, "never")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello", "'hello': must be group:name"),
        (f"{GROUP}:a,:b", "':b': must be"),
        (f"{GROUP}:", "must be"),
        ("asyncinfer.scheduler:hello", "no such group; there are: .*asyncinfer.schedulers"),
    ],
)
def test_a_list_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    monkeypatch.setenv("ASYNCINFER_BLOCK_PLUGINS", text)
    with pytest.raises(PluginError, match=f"ASYNCINFER_BLOCK_PLUGINS: .*{says}"):
        plugins.schedulers.resolve("fcfs")


@pytest.mark.parametrize("text", ["", " ", ",", f" {GROUP} : nobody ,, "])
def test_spaces_and_gaps(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ASYNCINFER_BLOCK_PLUGINS", text)
    assert plugins.schedulers.resolve("fcfs")


def test_a_group_there_is_not() -> None:
    for function in (plugins.block, plugins.unblock):
        with pytest.raises(PluginError, match="no group 'samplers'"):
            function("samplers", "dry")
