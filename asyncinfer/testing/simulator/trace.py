"""`SimulationTrace`: a failing life as a file, to be run again."""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from asyncinfer.testing.simulator.life import Life
from asyncinfer.testing.simulator.plugins import Plugins
from asyncinfer.testing.simulator.scenario import Action, Scenario
from asyncinfer.testing.simulator.shrink import shrink

__all__ = ["SimulationTrace", "kind_of", "quiet"]

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SimulationTrace:
    """What happened in a life, up to its failure."""

    #: The life's.
    seed: int
    scenario: Scenario
    actions: list[Action]
    #: What did not hold.
    failure: str
    #: Plugins in place of the scenario's, by option of `EngineConfig`: a name, a name with
    #: arguments, or what makes one, of which a file holds only what it looks like.
    plugins: Plugins = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Raises `OSError`."""
        values = {
            "format": FORMAT,
            "seed": self.seed,
            "failure": self.failure,
            "plugins": {name: _plain(plugin) for name, plugin in self.plugins.items()},
            "scenario": self.scenario.to_json(),
            "actions": self.actions,
        }
        lines = json.dumps(values, indent=1, ensure_ascii=False)
        # One action a line.
        lines = re.sub(r"\n {3,}| {0}\n  (?=\])", "", lines)
        path.write_text(lines + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> SimulationTrace:
        """Raises `OSError`, and `ValueError` for a file that is no trace."""
        try:
            values = json.loads(path.read_text("utf-8"))
            if values["format"] != FORMAT:
                raise ValueError(f"format={values['format']!r}: must be {FORMAT}")
            return cls(
                seed=values["seed"],
                scenario=Scenario.from_json(values["scenario"]),
                actions=values["actions"],
                failure=values["failure"],
                plugins=values["plugins"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: is no trace of a simulation: {error!r}") from error

    def run(self, **plugins: Any) -> Exception | None:
        """Live it again; how it fails, None if it does not. `plugins` stand in for those of the
        trace. Raises `ValueError` if one of these was an object, which a file cannot hold."""
        chosen = {**self.plugins, **plugins}
        for name, plugin in chosen.items():
            if isinstance(plugin, Mapping):
                raise ValueError(f"{name}: {plugin['object']} is not in the file; give it again")
        return failure_of(self.scenario, self.actions, chosen)

    def smaller(self, most: int = 400) -> SimulationTrace:
        """The same failure in fewer and plainer actions, found in about `most` lives."""
        kind = kind_of(self.failure)

        def fails(actions: list[Action]) -> bool:
            error = failure_of(self.scenario, actions, self.plugins)
            return error is not None and kind_of(_text(error)) == kind

        actions = shrink(self.actions, fails, most)
        for index in range(len(actions)):
            for plainer in _plainer(actions[index]):
                trial = [*actions[:index], plainer(actions[index]), *actions[index + 1 :]]
                if fails(trial):
                    actions = trial
        error = failure_of(self.scenario, actions, self.plugins)
        # If the smaller life does not fail when it is run once more, the old failure is kept.
        failure = self.failure if error is None else _text(error)
        return replace(self, actions=actions, failure=failure)


def failure_of(scenario: Scenario, actions: Iterable[Action], plugins: Plugins) -> Exception | None:
    """How a life of these actions fails."""
    left: Iterator[Action] = iter([*actions])
    with quiet():
        try:
            Life(scenario, lambda life: next(left, None), plugins=plugins).run()
        except Exception as error:
            return error
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log events and warnings that faults bring about: they are meant."""
    logger = logging.getLogger("asyncinfer")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            # Streams that are dropped unread.
            warnings.simplefilter("ignore", ResourceWarning)
            yield
    finally:
        logger.disabled = before


def kind_of(failure: str) -> str:
    """A failure without what differs from run to run of the same fault: names and numbers."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|req-\d+(\.\d+)?|\d+(\.\d+)?|\[.*\]|\(.*\)", "_", failure)


def _text(error: Exception) -> str:
    return str(error) or repr(error)


def _plainer(action: Action) -> list[Callable[[Action], Action]]:
    """Ways to make an action say less."""
    if action[0] == "submit":
        return [partial(_without, name) for name in action[1] if name not in ("id", "prompt")]
    return [_uninterrupted] if action[0] == "turn" else []


def _without(name: str, submit: Action) -> Action:
    ask = submit[1]
    return ["submit", {other: value for other, value in ask.items() if other != name}]


def _uninterrupted(turn: Action) -> Action:
    return [*turn[:3], None]


def _plain(plugin: Any) -> Any:
    """What a file can hold of it."""
    return plugin if isinstance(plugin, str | tuple | list) else {"object": repr(plugin)}
