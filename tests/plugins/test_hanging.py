"""An installed plugin that does not return, when it is imported or when it is made."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from asyncinfer import PluginError, plugins
from asyncinfer.cli.app import asyncinfer as cli
from asyncinfer.plugins.timed_call import ThreadCall

GROUP = "asyncinfer.schedulers"
SOURCE = """
import gate_module
gate_module.wait({importing})

class Hello:
    def __init__(self, wait=True):
        gate_module.wait(wait and {making})
    def rank(self, request, now):
        return (0,)
"""


class Gate(ModuleType):
    """Closed until the test is over."""

    def __init__(self) -> None:
        super().__init__("gate_module")
        self.opened = threading.Event()
        self.calls = 0

    def wait(self, really: bool) -> None:
        if really:
            self.calls += 1
            self.opened.wait(120)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setitem(sys.modules, "gate_module", made)
    wait = ThreadCall.wait

    def patient(call: ThreadCall[Any], seconds: float) -> bool:
        """Time is up once the call is at the gate, and not before."""
        while not wait(call, 0.001):
            if "opened.wait" in call.stack():
                return False
        return True

    monkeypatch.setattr(ThreadCall, "wait", patient)
    before = set(threading.enumerate())
    yield made
    made.opened.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(120)


def resolve(chosen: Any) -> Any:
    """On a thread of the engine's, as it were."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(plugins.schedulers.resolve, chosen).result(120)


def test_an_import(install: Any, gate: Gate) -> None:
    install(GROUP, "hello", "hello_module:Hello", SOURCE.format(importing=True, making=False))
    for _ in range(3):
        with pytest.raises(PluginError, match=r"'hello' \(greetings.*cannot be imported: has not"):
            resolve("hello")
    # Tried once, and shown where it was.
    assert gate.calls == 1
    with pytest.raises(PluginError, match=r"opened\.wait"):
        resolve("hello")
    assert resolve("fcfs")


def test_a_factory(install: Any, gate: Gate) -> None:
    install(GROUP, "hello", "hello_module:Hello", SOURCE.format(importing=False, making=True))
    assert resolve(("hello", {"wait": False})).rank(None, 0.0) == (0,)
    with pytest.raises(PluginError, match=r"'hello' \(greetings.*cannot be made: has not returned"):
        resolve("hello")
    for chosen in ("hello", ("hello", {"wait": False})):
        with pytest.raises(PluginError, match=r"'hello'.*is not made any more"):
            resolve(chosen)
    assert gate.calls == 1


def test_what_a_plugin_prints_is_not_in_the_list(install: Any) -> None:
    install(
        GROUP, "hello", "hello_module:Hello", "print('hello, world')\nclass Hello: rank = print"
    )
    done = CliRunner().invoke(cli, ["plugins", "--json"])
    assert "hello, world" not in done.stdout
    assert "hello, world" in done.stderr
