"""`SimulatedModel`: the fake model with faults that are put in by hand, and points at which others
may run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from asyncinfer.cache import KVGroupSpec
from asyncinfer.chunk import LoadProgress
from asyncinfer.config import EngineConfig
from asyncinfer.engine import Loaded
from asyncinfer.engine.source import Progress
from asyncinfer.scheduler import RunnerSpec, Step
from asyncinfer.testing.simulator.scenario import Scenario
from asyncinfer.testing.simulator.vocabulary import VOCAB, simulated_tokenizer
from asyncinfer.testing.strict_runner import StrictRunner
from asyncinfer.text import ChatTemplate, Tokenizer

__all__ = ["Fault", "SimulatedModel"]

#: No room for the next step; its row of this number fails; launching or collecting it raises;
#: loading the model does.
Fault = Literal["memory", "row", "launch", "collect", "load"]

#: What is said, and nothing else.
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@cache
def _template() -> ChatTemplate:
    """Compiled once, for no render changes it."""
    return ChatTemplate(_TEMPLATE, shield=simulated_tokenizer().shield)


class SimulatedModel:
    """A `ModelSource`.

    Args:
        point: called where others may run.
        before_launch: called with every plan before it is launched.
        encoding: called with every text that is tokenised.
        struck: called with a plan and the rows of it that are about to fail.
        broke: called when the runner is about to raise.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        point: Callable[[], None],
        before_launch: Callable[[Step], None],
        encoding: Callable[[str], None],
        struck: Callable[[Step, list[int]], None],
        broke: Callable[[], None],
    ) -> None:
        self._scenario = scenario
        self._point = point
        self._before_launch = before_launch
        self._encoding = encoding
        self._struck = struck
        self._broke = broke
        #: What goes wrong next, and with which row.
        self.faults: dict[Fault, int] = {}
        #: Steps that there was no room for.
        self.retractions = 0
        self.runner: StrictRunner | None = None
        groups = [KVGroupSpec(scenario.blocks)]
        if scenario.window is not None:
            groups.append(KVGroupSpec(scenario.window_pages, scenario.window))
        self.spec = RunnerSpec(
            groups=tuple(groups),
            block_size=scenario.block_size,
            max_slots=scenario.max_running,
            max_context=scenario.max_context,
            vocab_size=VOCAB,
            max_step_tokens=scenario.max_step_tokens,
        )

    def load(self, config: EngineConfig, progress: Progress | None) -> Loaded:
        scenario, tokenizer = self._scenario, simulated_tokenizer()
        for done in range(scenario.load_points):
            self._point()
            if progress is not None:
                progress(LoadProgress(done, scenario.load_points))
        if self.faults.pop("load", None) is not None:
            raise RuntimeError("fault: the model cannot be loaded")
        self.runner = StrictRunner(
            self.spec,
            eos_every=scenario.eos_every,
            gate=self._gate,
            failing=self._failing,
            no_room=self._no_room,
        )
        watched = _WatchedTokenizer(tokenizer, self._encoding, self._point)
        return Loaded(self.runner, watched, _template())

    def _gate(self, phase: Literal["launch", "collect"], plan: Step) -> None:
        if phase == "launch":
            self._before_launch(plan)
        self._point()
        if self.faults and self.faults.pop(phase, None) is not None:
            self._broke()
            raise RuntimeError(f"fault: the runner broke at {phase}")

    def _no_room(self, plan: Step) -> bool:
        lacking = self.faults.pop("memory", None) is not None
        self.retractions += lacking
        return lacking

    def _failing(self, plan: Step) -> Mapping[int, Exception]:
        row = self.faults.pop("row", None)
        if row is None:
            return {}
        rows = [row % len(plan.slots)]
        self._struck(plan, rows)
        return {row: ArithmeticError("fault: NaN logits") for row in rows}


class _WatchedTokenizer(Tokenizer):
    """The same tokenizer, seen at work."""

    def __init__(
        self, tokenizer: Tokenizer, encoding: Callable[[str], None], point: Callable[[], None]
    ) -> None:
        # Immutable, so that nothing can tell them apart.
        self.__dict__.update(tokenizer.__dict__)
        self._tokenizer = tokenizer
        self._encoding = encoding
        self._point = point

    def encode(self, text: str, **options: Any) -> list[int]:
        self._begin(text)
        return self._tokenizer.encode(text, **options)

    def encode_chat(self, text: str) -> list[int]:
        self._begin(text)
        return self._tokenizer.encode_chat(text)

    def _begin(self, text: str) -> None:
        self._encoding(text)
        self._point()
