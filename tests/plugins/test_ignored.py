"""What is installed and can be used by nobody is reported, whoever's fault it is."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncinfer import Engine, PluginError, plugins
from asyncinfer.cli.app import asyncinfer as cli
from asyncinfer.testing import FakeModel

SOURCE = """
class Hello:
    def rank(self, request, now):
        return (0,)
"""


def reasons() -> dict[tuple[str, str], str]:
    return {(info.group, info.name): info.problem or "" for info in plugins.ignored()}


def test_there_is_nothing_to_report() -> None:
    assert plugins.ignored() == []


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("asyncinfer.cache_policies", "lru"),
        ("asyncinfer.models", "LlamaForCausalLM"),
        ("asyncinfer.observers", "request-log"),
        ("asyncinfer.samplers", "mirostat"),
        ("asyncinfer.schedulers", "fcfs"),
    ],
)
def test_a_name_that_a_built_in_has(install: Any, group: str, name: str) -> None:
    install(group, name, "hello_module:Hello", SOURCE)
    (found,) = plugins.ignored()
    assert (found.group, found.name, found.origin) == (group, name, "greetings 1.2")
    assert found.problem == "the name is taken, by a plugin that is built in"
    done = CliRunner().invoke(cli, ["plugins"])
    assert "NOT USABLE: the name is taken, by a plugin that is built in  [greetings" in done.output
    # The built-in wins, as ever.
    (registry,) = (each for each in plugins.registries() if each.group == group)
    assert "built in" in registry.factory(name)[1]


def test_a_name_that_the_application_has(install: Any) -> None:
    plugins.register("asyncinfer.schedulers", "mine", type("Mine", (), {"rank": lambda s, r, n: r}))
    assert not reasons()
    install("asyncinfer.schedulers", "mine", "hello_module:Hello", SOURCE)
    assert "registered by the application" in reasons()["asyncinfer.schedulers", "mine"]


def test_a_name_that_two_have(install: Any) -> None:
    install("asyncinfer.schedulers", "hello", "hello_module:Hello", SOURCE)
    install("asyncinfer.schedulers", "hello", "other_module:Hello", SOURCE, dist="others")
    assert "is there several times" in reasons()["asyncinfer.schedulers", "hello"]
    done = CliRunner().invoke(cli, ["plugins"])
    assert done.output.count("is there several times") == 1


@pytest.mark.parametrize(
    ("group", "meant"),
    [
        ("asyncinfer.sampler", "asyncinfer.samplers"),
        ("asyncinfer.scheduler", "asyncinfer.schedulers"),
        ("asyncinfer.cache-policies", "asyncinfer.cache_policies"),
        ("asyncinfer_observers", "asyncinfer.observers"),
        ("async_infer.models", "asyncinfer.models"),
        ("AsyncInfer.Samplers", "asyncinfer.samplers"),
        ("asyninfer.samplers", "asyncinfer.samplers"),
        ("asyncinfer", "asyncinfer."),
    ],
)
def test_a_group_there_is_not(install: Any, group: str, meant: str) -> None:
    install(group, "hello", "hello_module:Hello", SOURCE)
    ((where, why),) = reasons().items()
    assert where == (group, "hello")
    assert why.startswith(f"there is no group {group}; the nearest is {meant}")


@pytest.mark.parametrize("group", ["console_scripts", "pytest11", "infer.plugins", "llm.samplers"])
def test_groups_of_others_are_theirs(install: Any, group: str) -> None:
    install(group, "hello", "hello_module:Hello", SOURCE)
    assert plugins.ignored() == []


@pytest.mark.parametrize(
    "text",
    [
        "[asyncinfer.samplers]\nhello\n",
        "hello = before.any:Section\n[asyncinfer.samplers]\nhello\n",
        "[asyncinfer.samplers\nx = y:z",
    ],
)
def test_entry_points_that_cannot_be_read_harm_nobody_else(
    install: Any, tmp_path: Path, text: str
) -> None:
    install("asyncinfer.schedulers", "hello", "hello_module:Hello", SOURCE)
    broken = tmp_path / "broken-3.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 3\n")
    (broken / "entry_points.txt").write_text(text)
    assert plugins.schedulers.resolve("hello")
    assert "hello" in plugins.schedulers.names()
    with pytest.raises(PluginError, match="known: deadline, fcfs, hello, priority"):
        plugins.schedulers.resolve("nobody")
    if "hello\n" in text:
        (found,) = plugins.ignored()
        assert found.origin == "broken 3"
        assert "cannot be read" in (found.problem or "")


def test_a_distribution_without_a_name(install: Any, tmp_path: Path) -> None:
    install("asyncinfer.schedulers", "hello", "hello_module:Hello", SOURCE)
    (tmp_path / "greetings-1.2.dist-info" / "METADATA").unlink()
    assert plugins.schedulers.resolve("hello")
    assert "without a name" in plugins.schedulers.factory("hello")[1]


def test_of_two_versions_the_first_on_the_path_counts(
    install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("asyncinfer.schedulers", "hello", "hello_module:Hello", SOURCE)
    newer = tmp_path / "newer"
    info = newer / "greetings-2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greetings\nVersion: 2\n")
    (info / "entry_points.txt").write_text("[asyncinfer.schedulers]\nhi = hello_module:Hello\n")
    monkeypatch.syspath_prepend(str(newer))
    assert {"hi", "hello"} & {*plugins.schedulers.names()} == {"hi"}


def test_what_is_installed_later_is_found(install: Any, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="no plugin 'hello'"):
        plugins.schedulers.resolve("hello")
    install("asyncinfer.schedulers", "hello", "hello_module:Hello", SOURCE)
    # A file system may count time in ticks, of which both fell into one.
    os.utime(tmp_path, ns=(1, 1))
    assert plugins.schedulers.resolve("hello")


def test_nothing_is_read_again_where_nothing_has_changed(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("asyncinfer.schedulers", "hello", "hello_module:Hello", SOURCE)
    assert "hello" in plugins.schedulers.names()
    monkeypatch.setattr("asyncinfer.plugins.installed.distributions", lambda: 1 / 0)
    for _ in range(3):
        assert "hello" in plugins.schedulers.names()
        with pytest.raises(PluginError, match="known: deadline, fcfs, hello"):
            plugins.schedulers.resolve("nobody")


def test_the_command_lists_it_as_data(install: Any) -> None:
    install("asyncinfer.sampler", "hello", "hello_module:Hello", SOURCE)
    rows = json.loads(CliRunner().invoke(cli, ["plugins", "--json"]).output)
    (row,) = (row for row in rows if row["name"] == "hello")
    assert row["group"] == "asyncinfer.sampler"
    assert "nearest is asyncinfer.samplers" in row["problem"]


@pytest.mark.anyio
async def test_an_engine_tells_when_it_opens(
    install: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install("asyncinfer.samplers", "mirostat", "hello_module:Hello", SOURCE)
    caplog.set_level(logging.WARNING, logger="asyncinfer")
    async with Engine(FakeModel()):
        pass
    (record,) = (r for r in caplog.records if r.message.startswith("plugin_ignored"))
    told = record.asyncinfer  # type: ignore[attr-defined]
    assert (told["group"], told["name"], told["origin"]) == (
        "asyncinfer.samplers",
        "mirostat",
        "greetings 1.2",
    )
