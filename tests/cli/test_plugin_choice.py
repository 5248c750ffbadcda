"""A plugin with its arguments on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from asyncinfer import plugins
from asyncinfer.cli.app import asyncinfer as cli
from asyncinfer.cli.plugin_choice import parse_plugin
from asyncinfer.protocols import Observer, ObserverEvent


@pytest.mark.parametrize(
    ("text", "name", "args"),
    [
        ("lru", "lru", {}),
        ("ttl:seconds=60", "ttl", {"seconds": 60}),
        ("eta:epsilon=0.01,b=1e-3", "eta", {"epsilon": 0.01, "b": 1e-3}),
        ('a:x="b,c",y=[1,2],z={"k":[1,"="]}', "a", {"x": "b,c", "y": [1, 2], "z": {"k": [1, "="]}}),
        ("a:x=true,y=null,z=False", "a", {"x": True, "y": None, "z": "False"}),
        ("a:host=localhost:80,p=/a b/c=d", "a", {"host": "localhost:80", "p": "/a b/c=d"}),
        ("a:x=NaN,y=Infinity,z=-Infinity", "a", {"x": "NaN", "y": "Infinity", "z": "-Infinity"}),
        ("a:x=,y=1", "a", {"x": "", "y": 1}),
        ("a:x=1 2,y=1x,z=[1", "a", {"x": "1 2", "y": "1x", "z": "[1"}),
        ("a:x=" + "[" * 100_000, "a", {"x": "[" * 100_000}),
        ("a:x=" + "9" * 5000, "a", {"x": "9" * 5000}),
    ],
)
def test_values_are_json_or_text(text: str, name: str, args: dict[str, Any]) -> None:
    assert parse_plugin(text) == (name, args)


@pytest.mark.parametrize(
    "text", ["", ":", ":a=1", "a:", "a:b", "a:=1", "a:b=1,", "a:b=1,c", "a:,b=1"]
)
def test_what_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"must begin with a plugin's name|:ARGUMENT=VALUE"):
        parse_plugin(text)


def test_an_argument_twice() -> None:
    with pytest.raises(ValueError, match="argument 'b' is given twice"):
        parse_plugin("a:b=1,b=2")


@pytest.mark.parametrize("command", [["generate", "x"], ["chat"]], ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--sampler", "nobody", "no plugin 'nobody'.*known: .*dry"),
        ("--sampler", "mirostat:tau=x", "'mirostat'.*tau='x': must be a number"),
        ("--sampler", "mirostat:tua=3", "'mirostat'.*no argument 'tua': takes tau, eta"),
        ("--sampler", "mirostat:tau", "must come :ARGUMENT=VALUE"),
        ("--cache-policy", "ttl:seconds=-1", "'ttl'.*seconds: a life of -1"),
        ("--cache-policy", "mirostat", "no plugin 'mirostat'.*known: arc"),
        ("--scheduler", "fcfs:a=1", "'fcfs'.*no argument 'a': takes no arguments"),
        ("--observer", "request-log:slow=1", "'request-log'.*no argument 'slow'"),
        ("--proposer", "prompt-lookup:longest=0", "'prompt-lookup'.*longest=0: must be"),
    ],
)
def test_an_error_names_option_plugin_and_argument(
    command: list[str], option: str, value: str, says: str
) -> None:
    done = CliRunner().invoke(cli, [*command, option, value])
    assert done.exit_code == 2
    shown = " ".join(done.output.replace("│", " ").split())
    assert f"Invalid value for '{option}': '{value}': " in shown
    assert re.search(says, shown)


class Notes(Observer):
    """Keeps what it was made with."""

    made: list[str] = []  # noqa: RUF012

    def __init__(self, word: str) -> None:
        self.made.append(word)

    def observe(self, event: ObserverEvent) -> None: ...


def test_all_of_them_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in plugins.registries():
        monkeypatch.setattr(registry, "_registered", {})
        monkeypatch.setattr(registry, "_loaded", {})
    plugins.register("asyncinfer.observers", "notes", Notes)
    Notes.made.clear()
    common = ["generate", "x = ", "--max-tokens", "6", "--json", "--seed", "5", "-t", "2"]
    chosen = ["--sampler", "dry:base=2.0", "--sampler", "top-n-sigma:n=0.0"]
    engine = ["--cache-policy", 'ttl:seconds=60,scopes={"a":1}', "--scheduler", "priority:ageing=3"]
    told = ["--observer", "notes:word=one", "--observer", "notes:word=two"]
    guesses = ["--proposer", "prompt-lookup:longest=4,shortest=1"]
    runs = [
        CliRunner().invoke(cli, [*common, *options], catch_exceptions=False)
        for options in ([], [*chosen, *engine, *told], ["--top-k", "1"], guesses)
    ]
    plain, cut, best, guessed = (json.loads(run.stdout)["text"] for run in runs)
    # Made once, by the engine, and not when the command line was read.
    assert Notes.made == ["one", "two"]
    # n = 0 leaves the likeliest token alone.
    assert cut == best != plain == guessed


def test_samplers_that_do_not_go_together() -> None:
    done = CliRunner().invoke(cli, ["generate", "x", "--sampler", "xtc", "--sampler", "dry"])
    assert isinstance(done.exception, ValueError)
    assert "sampler[0]" in str(done.exception)
    assert "'xtc'" in str(done.exception)
    assert "must be the last" in str(done.exception)


def test_bench_takes_them(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": i, "hash_ids": [1, 2, i + 3]} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    record = tmp_path / "cache.json"
    command = ["bench", "cache", str(trace), "--blocks", "8", "--json", str(record)]
    for policy in ("ttl:seconds=60", "ttl", "arc"):
        command += ["--policy", policy]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    names = {figure["name"] for figure in json.loads(record.read_text())["figures"]}
    for policy in ("ttl:seconds=60", "ttl", "arc"):
        assert f"hit rate, {policy}, 8 blocks" in names
    done = CliRunner().invoke(cli, [*command, "--policy", "ttl:second=60"])
    assert done.exit_code == 2
    assert "no argument 'second'" in " ".join(done.output.split())
