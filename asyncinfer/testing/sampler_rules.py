"""The rules of `check_sampler`, each a function of a plugin and a device that raises
`SamplerRuleError` with the smallest case it finds."""

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
from torch.overrides import TorchFunctionMode

from asyncinfer.errors import AsyncInferError
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.testing.rule_error import SamplerRuleError
from asyncinfer.testing.sampler_bench import SamplerBench

__all__ = ["RULES"]

VOCAB: Final = 31
SLOTS: Final = 6
#: A prime, so that no cycle of a sampler ends with it.
STEPS: Final = 11
#: What no sampler may ask of a tensor in a step: each waits for the device.
WAITS: Final = frozenset(
    {"item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "equal"}
)


def _is_a_plugin(plugin: SamplerPlugin, device: str) -> None:
    kind = type(plugin)
    _hold("parameters", kind.__doc__ is not None, f"{kind.__name__} has no docstring")
    names = [field.name for field in dataclasses.fields(cast(Any, kind))]
    values = {name: getattr(plugin, name) for name in names}
    try:
        again = kind(**json.loads(json.dumps(values)))
    except (TypeError, ValueError) as error:
        raise SamplerRuleError(f"parameters: {values} do not pass through JSON: {error}") from error
    _hold("parameters", again == plugin, f"{plugin} comes out of JSON as {again}")


def _answers(plugin: SamplerPlugin, device: str) -> None:
    """Any vocabulary, any number of rows, any logits a model may give."""
    for vocab in (1, 2, VOCAB):
        for rows in (1, 2, SLOTS):
            for what, logits in _extremes(rows, vocab):
                bench = SamplerBench(vocab, rows, device=device)
                for slot in range(rows):
                    bench.join(slot, plugin, seed=slot, tokens=[0] * (slot + 1))
                try:
                    bench.draw(logits, range(rows))
                except AsyncInferError as error:
                    case = f"{rows} rows, {vocab} tokens, {what}"
                    raise SamplerRuleError(f"answers: {case}: {error}") from error


def _extremes(rows: int, vocab: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    plain = _logits(0, 0)[:vocab]
    yield "ordinary logits", np.tile(plain, (rows, 1))
    yield "equal logits", np.zeros((rows, vocab), np.float32)
    yield "logits of 10,000", np.tile(plain * 10_000, (rows, 1))
    for value in (3e38, -3e38):
        one = np.tile(plain, (rows, 1))
        one[:, 0] = value
        yield f"a logit of {value:g}", one


def _does_not_mind_the_batch(plugin: SamplerPlugin, device: str) -> None:
    """Alone or with others, in this slot or that, the same tokens."""
    alone = _alone(plugin, device)
    for count in range(2, SLOTS + 1):
        for name, slots in (
            ("in slots of its row's number", list(range(count))),
            ("in other slots", [(3 * i + 1) % 7 for i in range(count)]),
        ):
            for request, tokens in enumerate(_together(plugin, device, slots)):
                _same("batch", alone[request], tokens, f"request {request} of {count}, {name}")


def _does_not_mind_a_pause(plugin: SamplerPlugin, device: str) -> None:
    """Nothing happens to a slot in a step that it is not in."""
    alone = _alone(plugin, device)[:2]
    slots = [0, 1]
    bench = _bench(plugin, device, slots)
    seen: list[list[int]] = [[], []]
    for turn in range(3 * STEPS):
        rows = [i for i in slots if (turn + i) % 3 and len(seen[i]) < STEPS]
        if rows:
            logits = [_logits(i, len(seen[i])) for i in rows]
            for i, token in zip(rows, bench.draw(logits, rows), strict=True):
                seen[i].append(token)
    for request in slots:
        _same("pause", alone[request], seen[request], f"request {request} of 2")


def _forgets(plugin: SamplerPlugin, device: str) -> None:
    """A slot's next tenant finds nothing of the last one."""
    alone = _alone(plugin, device)
    bench = SamplerBench(VOCAB, 1, device=device)
    for request in range(3):
        _join(bench, plugin, 0, request)
        tokens = [bench.draw([_logits(request, step)], [0])[0] for step in range(STEPS)]
        _same("reuse", alone[request], tokens, f"tenant {request} of one slot")
        bench.leave(0)


def _survives_preemption(plugin: SamplerPlugin, device: str) -> None:
    """What `state()` gives is all that has to be kept."""
    alone = _alone(plugin, device)[0]
    for at in range(STEPS):
        bench = SamplerBench(VOCAB, 3, device=device)
        _join(bench, plugin, 0, 0)
        _join(bench, plugin, 2, 1)
        slot, tokens = 0, []
        for step in range(STEPS):
            if step == at:
                bench.leave(2)
                bench.move(0, 2)
                # A stranger takes the seat.
                _join(bench, plugin, 0, 4)
                bench.draw([_logits(4, 0)], [0])
                slot = 2
            tokens += bench.draw([_logits(0, step)], [slot])
        _same("preemption", alone, tokens, f"preempted after {at} tokens")


def _uses_the_engines_chance(plugin: SamplerPlugin, device: str) -> None:
    """No generator but the engine's."""
    before = _generators()
    _alone(plugin, device)
    _hold("chance", _generators() == before, "it drew from a global random generator")


def _obeys_bars(plugin: SamplerPlugin, device: str) -> None:
    """What may not be drawn is not drawn."""
    for allowed in ([3], [3, 4], [0, 5, 9, 30]):
        for seed in range(8):
            bench = SamplerBench(VOCAB, 1, device=device)
            bench.join(0, plugin, seed=seed, allowed_token_ids=allowed)
            try:
                token = bench.draw([_logits(seed, 0)], [0])[0]
            except AsyncInferError as error:
                raise SamplerRuleError(f"bars: allowed {allowed}: {error}") from error
            _hold("bars", token in allowed, f"it drew {token}, allowed are {allowed}")


def _declares_its_argmax(plugin: SamplerPlugin, device: str) -> None:
    if plugin.changes_argmax:
        return
    bench = _bench(plugin, device, [0], temperature=0.0, allowed_token_ids=None)
    for step in range(STEPS):
        logits, known = _logits(0, step), bench.tokens(0)
        token, best = bench.draw([logits], [0])[0], int(logits.argmax())
        case = f"it declares changes_argmax = False; greedy after {known}, not {best} but {token}"
        _hold("argmax", token == best, case)


def _declares_speculation(plugin: SamplerPlugin, device: str) -> None:
    if not plugin.commutes_with_speculation:
        return
    alone = _alone(plugin, device)[0]
    bench = _bench(plugin, device, [0])
    first = len(bench.tokens(0))
    for step in range(3):
        bench.draw([_logits(0, step)], [0])
    # The same three positions once more, all in one step.
    logits = [_logits(0, step) for step in range(3)]
    positions = np.arange(first, first + 3)
    tokens = bench.sample(logits, np.zeros(3, np.int64), positions).tokens.tolist()
    case = "it declares commutes_with_speculation = True; three positions in one step"
    _same("speculation", alone[:3], tokens, case)


class _Calls(TorchFunctionMode):
    """The names of the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class _Watched(SamplerPlugin):
    """A plugin of which the calls in `sample` are recorded."""

    plugin: SamplerPlugin
    calls: _Calls

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _WatchedSampler(self.plugin.open(slots, vocab_size, device), self.calls)


class _WatchedSampler(Sampler):
    def __init__(self, sampler: Sampler, calls: _Calls) -> None:
        self.sampler = sampler
        self.calls = calls

    def join(self, slot: int, params: _Watched) -> None:
        self.sampler.join(slot, params.plugin)

    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        with self.calls:
            return self.sampler.sample(step)


def _is_vectorised(plugin: SamplerPlugin, device: str) -> None:
    """As many operations for six rows as for two, none of which waits."""
    counts = {}
    for rows in (2, SLOTS):
        bench = SamplerBench(VOCAB, rows, device=device)
        calls = _Calls()
        for slot in range(rows):
            bench.join(slot, _Watched(plugin, calls), seed=slot, tokens=_prompt(0))
        logits = np.tile(_logits(0, 0), (rows, 1))
        bench.draw(logits, range(rows))
        calls.names.clear()
        bench.draw(logits, range(rows))
        waits = sorted(WAITS.intersection(calls.names))
        _hold("device", not waits, f"sample() waits for the device: {', '.join(waits)}")
        counts[rows] = len(calls.names)
    few, many = counts.values()
    _hold("rows", few == many, f"{few} operations for 2 rows, {many} for {SLOTS}")


def _leaves_parameters_alone(plugin: SamplerPlugin, device: str) -> None:
    """They are shared by the answers of a request."""
    before = copy.deepcopy(plugin)
    tokens = _together(plugin, device, [0, 1], requests=[0, 0])
    _hold("parameters", plugin == before, f"{before} became {plugin}")
    _same("n", tokens[0], tokens[1], "two answers with one seed")


RULES: Final[dict[str, Callable[[SamplerPlugin, str], None]]] = {
    "parameters": _is_a_plugin,
    "answers": _answers,
    "chance": _uses_the_engines_chance,
    "batch": _does_not_mind_the_batch,
    "pause": _does_not_mind_a_pause,
    "reuse": _forgets,
    "preemption": _survives_preemption,
    "bars": _obeys_bars,
    "argmax": _declares_its_argmax,
    "speculation": _declares_speculation,
    "device": _is_vectorised,
    "n": _leaves_parameters_alone,
}


def _logits(request: int, step: int) -> npt.NDArray[np.float32]:
    """What the model says to a request, whatever was drawn: float32 `[VOCAB]`."""
    numbers = np.random.Generator(np.random.Philox(key=1000 * request + step))
    return (numbers.normal(size=VOCAB) * 2).astype(np.float32)


def _prompt(request: int) -> list[int]:
    """Few different tokens, so that the text repeats itself."""
    return [(request + i * i) % 3 for i in range(4 + request)]


def _join(
    bench: SamplerBench, plugin: SamplerPlugin, slot: int, request: int, **options: Any
) -> None:
    # Some may draw a few tokens only, for the same reason.
    allowed = None if request % 3 == 2 else range(4 * (request + 1))
    options = {"allowed_token_ids": allowed, **options}
    bench.join(slot, plugin, tokens=_prompt(request), seed=request, **options)


def _bench(
    plugin: SamplerPlugin, device: str, slots: Sequence[int], **options: Any
) -> SamplerBench:
    """Request `i` in `slots[i]`."""
    bench = SamplerBench(VOCAB, SLOTS + 1, device=device)
    for request, slot in enumerate(slots):
        _join(bench, plugin, slot, request, **options)
    return bench


def _together(
    plugin: SamplerPlugin, device: str, slots: Sequence[int], requests: Sequence[int] | None = None
) -> list[list[int]]:
    """The answers of several requests in one batch, a plain one among them."""
    its = range(len(slots)) if requests is None else requests
    bench = SamplerBench(VOCAB, SLOTS + 2, device=device)
    for request, slot in zip(its, slots, strict=True):
        _join(bench, plugin, slot, request)
    plain = SLOTS + 1
    bench.join(plain, None)
    answers: list[list[int]] = [[] for _ in slots]
    for step in range(STEPS):
        logits = [_logits(request, step) for request in its]
        drawn = bench.draw([*logits, _logits(99, step)], [*slots, plain])
        for answer, token in zip(answers, drawn, strict=False):
            answer.append(token)
    return answers


def _alone(plugin: SamplerPlugin, device: str) -> list[list[int]]:
    """The answers of as many requests as there are slots, each by itself in a new engine."""
    answers = []
    for request in range(SLOTS):
        bench = SamplerBench(VOCAB, 1, device=device)
        _join(bench, plugin, 0, request)
        answers.append([bench.draw([_logits(request, step)], [0])[0] for step in range(STEPS)])
    return answers


def _generators() -> tuple[bytes, str, object]:
    torch_state = torch.get_rng_state().numpy().tobytes()
    return torch_state, repr(np.random.get_state(legacy=False)), random.getstate()


def _hold(rule: str, condition: object, case: str) -> None:
    if not condition:
        raise SamplerRuleError(f"{rule}: {case}")


def _same(rule: str, expected: Sequence[int], tokens: Sequence[int], case: str) -> None:
    if list(expected) != list(tokens):
        at = next(
            i for i, pair in enumerate(zip(expected, tokens, strict=True)) if len({*pair}) > 1
        )
        raise SamplerRuleError(
            f"{rule}: {case}: token {at} is {tokens[at]}; alone it is {expected[at]}"
        )
