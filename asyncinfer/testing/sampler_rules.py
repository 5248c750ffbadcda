"""The rules of `check_sampler`, each a function of a trial that raises `RuleError` with the
smallest case it finds."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt
import torch

from asyncinfer.errors import AsyncInferError
from asyncinfer.testing.rule_error import RuleError
from asyncinfer.testing.sampler_limits import is_quick, lets_go
from asyncinfer.testing.sampler_trial import SLOTS, STEPS, VOCAB, SamplerTrial, model_says, prompt
from asyncinfer.testing.watched_sampler import TorchCalls, WatchedPlugin

__all__ = ["RULES"]

#: Methods of a tensor that no sampler may call in a step, since each waits for the device.
WAITS: Final = frozenset(
    {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "equal"}
)


def _is_a_plugin(trial: SamplerTrial) -> None:
    plugin, kind = trial.plugin, type(trial.plugin)
    _hold("parameters", kind.__doc__ is not None, f"{kind.__name__} has no docstring")
    names = [field.name for field in dataclasses.fields(cast(Any, kind))]
    values = {name: getattr(plugin, name) for name in names}
    try:
        again = kind(**json.loads(json.dumps(values)))
    except (TypeError, ValueError) as error:
        raise RuleError("parameters", f"{values} do not pass through JSON: {error}") from error
    _hold("parameters", again == plugin, f"{plugin} comes out of JSON as {again}")


def _answers(trial: SamplerTrial) -> None:
    """Answers are usable for any vocabulary, number of rows and logits that a model may give."""
    for vocab in (1, 2, VOCAB):
        for rows in (1, 2, SLOTS):
            for what, logits in _extremes(rows, vocab):
                bench = trial.bench(rows, vocab)
                for slot in range(rows):
                    bench.join(slot, trial.plugin, seed=slot, tokens=[0] * (slot + 1))
                try:
                    bench.draw(logits, range(rows))
                except AsyncInferError as error:
                    case = f"{rows} rows, {vocab} tokens, {what}"
                    raise RuleError("answers", f"{case}: {error}") from error


def _extremes(rows: int, vocab: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    plain = model_says(0, 0)[:vocab]
    yield "ordinary logits", np.tile(plain, (rows, 1))
    yield "equal logits", np.zeros((rows, vocab), np.float32)
    yield "logits of 10,000", np.tile(plain * 10_000, (rows, 1))
    for value in (3e38, -3e38):
        one = np.tile(plain, (rows, 1))
        one[:, 0] = value
        yield f"a logit of {value:g}", one


def _does_not_mind_the_batch(trial: SamplerTrial) -> None:
    """A request gets the same tokens alone or with others, and in any slot."""
    for count in range(2, SLOTS + 1):
        for name, slots in (
            ("in slots of its row's number", list(range(count))),
            ("in other slots", [(3 * i + 1) % 7 for i in range(count)]),
        ):
            for request, tokens in enumerate(trial.together(slots)):
                _same(
                    "batch", trial.alone[request], tokens, f"request {request} of {count}, {name}"
                )


def _does_not_mind_a_pause(trial: SamplerTrial) -> None:
    """A step changes nothing for a slot that has no row in it."""
    bench = trial.bench(2)
    seen: list[list[int]] = [[], []]
    for request in range(2):
        trial.join(bench, request, request)
    for turn in range(3 * STEPS):
        rows = [i for i in range(2) if (turn + i) % 3 and len(seen[i]) < STEPS]
        if rows:
            logits = [model_says(i, len(seen[i])) for i in rows]
            for i, token in zip(rows, bench.draw(logits, rows), strict=True):
                seen[i].append(token)
    for request, tokens in enumerate(seen):
        _same("pause", trial.alone[request], tokens, f"request {request} of 2")


def _forgets(trial: SamplerTrial) -> None:
    """A slot's next request finds nothing of the last one."""
    bench = trial.bench(1)
    for request in range(3):
        trial.join(bench, 0, request)
        tokens = [bench.draw([model_says(request, step)], [0])[0] for step in range(STEPS)]
        _same("reuse", trial.alone[request], tokens, f"request {request} of one slot")
        bench.leave(0)


def _survives_preemption(trial: SamplerTrial) -> None:
    """`state()` holds everything that a preempted request needs."""
    for at in range(STEPS):
        bench = trial.bench(3)
        trial.join(bench, 0, 0)
        trial.join(bench, 2, 1)
        slot, tokens = 0, []
        for step in range(STEPS):
            if step == at:
                bench.leave(2)
                bench.move(0, 2)
                # Another request takes the slot.
                trial.join(bench, 0, 4)
                bench.draw([model_says(4, 0)], [0])
                slot = 2
            tokens += bench.draw([model_says(0, step)], [slot])
        _same("preemption", trial.alone[0], tokens, f"preempted after {at} tokens")


def _uses_the_engines_chance(trial: SamplerTrial) -> None:
    """The sampler neither draws from nor seeds any random generator but the engine's."""
    numbers = np.random.get_state()
    python = random.getstate()
    with torch.random.fork_rng():
        # States that no seed gives.
        torch.manual_seed(20_261_120)
        torch.rand(1)
        np.random.seed(20_261_120)
        np.random.random()
        random.seed(20_261_120)
        random.random()
        try:
            before = _generators()
            trial.together(range(SLOTS))
            _hold("chance", _generators() == before, "it touched a global random generator")
        finally:
            np.random.set_state(numbers)
            random.setstate(python)


def _obeys_bars(trial: SamplerTrial) -> None:
    """Barred tokens are never drawn."""
    for allowed in ([3], [3, 4], [0, 5, 9, 30]):
        for seed in range(8):
            bench = trial.bench(1)
            bench.join(0, trial.plugin, seed=seed, allowed_token_ids=allowed)
            try:
                token = bench.draw([model_says(seed, 0)], [0])[0]
            except AsyncInferError as error:
                raise RuleError("bars", f"allowed {allowed}: {error}") from error
            _hold("bars", token in allowed, f"it drew {token}, allowed are {allowed}")


def _declares_its_argmax(trial: SamplerTrial) -> None:
    if trial.plugin.changes_argmax:
        return
    bench = trial.bench(1)
    trial.join(bench, 0, 0, temperature=0.0, allowed_token_ids=None)
    for step in range(STEPS):
        logits, known = model_says(0, step), bench.tokens(0)
        token, best = bench.draw([logits], [0])[0], int(logits.argmax())
        case = f"it declares changes_argmax = False; greedy after {known}, not {best} but {token}"
        _hold("argmax", token == best, case)


def _declares_draws(trial: SamplerTrial) -> None:
    """Other samplers may follow one that leaves the draw to them."""
    if getattr(trial.plugin, "draws", False):
        return
    bench = trial.bench(1)
    trial.join(bench, 0, 0)
    for step in range(STEPS):
        logits, slots = model_says(0, step), np.zeros(1, np.int64)
        positions = np.array([len(bench.tokens(0))])
        calls = bench.sample([logits], slots, positions).calls
        case = f"sample() answers with tokens after {bench.tokens(0)}; it must declare draws = True"
        _hold("draws", all(call.tokens is None for call in calls), case)
        bench.draw([logits], [0])


def _declares_speculation(trial: SamplerTrial) -> None:
    if not trial.plugin.commutes_with_speculation:
        return
    declares = "it declares commutes_with_speculation = True"
    state = trial.plugin.open(1, VOCAB, torch.device(trial.device)).state()
    _hold("speculation", not len(state), f"{declares}; state() gives {len(state)} tensors")
    for request in range(SLOTS):
        bench = trial.bench(1)
        trial.join(bench, 0, request)
        first = len(bench.tokens(0))
        drawn: list[int] = []
        for end in (3, STEPS):
            logits = [model_says(request, step) for step in range(end)]
            for row in logits[len(drawn) :]:
                drawn += bench.draw([row], [0])
            _same("speculation", trial.alone[request], drawn, f"{declares}; after a verification")
            # The same positions once more, all in one step.
            positions = np.arange(first, first + end)
            tokens = bench.sample(logits, np.zeros(end, np.int64), positions).tokens.tolist()
            case = f"{declares}; {end} positions of request {request} in one step"
            _same("speculation", trial.alone[request][:end], tokens, case)


def _is_vectorised(trial: SamplerTrial) -> None:
    """A step takes as many operations for six rows as for two, and none waits for the device."""
    counts = {}
    for rows in (2, SLOTS):
        bench = trial.bench(rows)
        calls = TorchCalls()
        for slot in range(rows):
            bench.join(slot, WatchedPlugin(trial.plugin, calls), seed=slot, tokens=prompt(0))
        logits = np.tile(model_says(0, 0), (rows, 1))
        bench.draw(logits, range(rows))
        calls.names.clear()
        bench.draw(logits, range(rows))
        waits = sorted(WAITS.intersection(calls.names))
        _hold("device", not waits, f"sample() waits for the device: {', '.join(waits)}")
        counts[rows] = len(calls.names)
    few, many = counts.values()
    _hold("rows", few == many, f"{few} operations for 2 rows, {many} for {SLOTS}")


def _leaves_parameters_alone(trial: SamplerTrial) -> None:
    """Parameters are never changed, since the answers of a request share them."""
    before = copy.deepcopy(trial.plugin)
    tokens = trial.together([0, 1], requests=[0, 0])
    _hold("parameters", trial.plugin == before, f"{before} became {trial.plugin}")
    _same("n", tokens[0], tokens[1], "two answers with one seed")


RULES: Final[dict[str, Callable[[SamplerTrial], None]]] = {
    "parameters": _is_a_plugin,
    "time": is_quick,
    "answers": _answers,
    "chance": _uses_the_engines_chance,
    "batch": _does_not_mind_the_batch,
    "pause": _does_not_mind_a_pause,
    "reuse": _forgets,
    "preemption": _survives_preemption,
    "bars": _obeys_bars,
    "argmax": _declares_its_argmax,
    "draws": _declares_draws,
    "speculation": _declares_speculation,
    "device": _is_vectorised,
    "n": _leaves_parameters_alone,
    "memory": lets_go,
}


def _generators() -> tuple[bytes, str, object]:
    torch_state = torch.get_rng_state().numpy().tobytes()
    return torch_state, repr(np.random.get_state(legacy=False)), random.getstate()


def _hold(rule: str, condition: object, case: str) -> None:
    if not condition:
        raise RuleError(rule, case)


def _same(rule: str, expected: Sequence[int], tokens: Sequence[int], case: str) -> None:
    for at, (one, other) in enumerate(zip(expected, tokens, strict=False)):
        if one != other:
            raise RuleError(rule, f"{case}: token {at} is {other}; alone it is {one}")
