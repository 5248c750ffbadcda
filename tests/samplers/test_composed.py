"""Several samplers of one request: called in order, each on its own account."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar

import anyio
import numpy as np
import pytest
import torch
from samplers.crowds import answers, check_preempted

from asyncinfer import InvalidRequest, RequestFailed, SamplingParams
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.samplers import DRY, XTC, DynamicTemperature, Mirostat, TopNSigma
from asyncinfer.sampling import PluginSamplers, TokenHistory
from asyncinfer.scheduler import ChosenSampler
from asyncinfer.testing.sampler_bench import SamplerBench

pytestmark = pytest.mark.anyio

LISTS: list[list[Any]] = [
    [DRY(multiplier=3.0, allowed_length=1), XTC(threshold=0.01, probability=0.7)],
    [TopNSigma(n=1.5), DRY(multiplier=3.0, allowed_length=1), Mirostat(tau=2.0, eta=0.7)],
]


@pytest.mark.parametrize("samplers", LISTS, ids=["draws", "state"])
async def test_a_seed_gives_the_same_tokens_alone_batched_and_preempted(
    open_tiny: Any, samplers: list[Any]
) -> None:
    others = (None, samplers[0], samplers[-1], list(reversed(samplers[:-1])), samplers)
    requests = [
        {"prompt": f"request {i} " * (1 + i % 3), "seed": i, "sampler": which}
        for i in range(10)
        for which in [others[i % 5]]
    ]
    async with open_tiny() as engine:
        alone = [(await answers(engine, [request]))[0] for request in requests]
        assert await answers(engine, requests) == alone
    # Every list gives answers of its own.
    assert len({*map(tuple, alone)}) == 10
    await check_preempted(open_tiny, requests, alone)


async def test_deterministic(open_tiny: Any) -> None:
    requests = [{"prompt": f"{i}", "seed": i, "sampler": LISTS[i % 2]} for i in range(4)]
    async with open_tiny(deterministic=True) as engine:
        alone = [(await answers(engine, [request]))[0] for request in requests]
        assert await answers(engine, requests) == alone


async def test_names_pairs_and_objects_are_one(open_tiny: Any) -> None:
    dry, xtc = {"multiplier": 3.0, "allowed_length": 1}, {"threshold": 0.01}
    written = json.loads(json.dumps([["dry", dry], ["xtc", xtc]]))
    forms: list[Any] = [
        [DRY(**dry), XTC(**xtc)],
        (DRY(**dry), ("xtc", xtc)),
        [("dry", dry), XTC(**xtc)],
        written,
    ]
    single: list[dict[str, Any]] = [
        {"sampler": "dry", "sampler_args": dry},
        {"sampler": ("dry", dry)},
        {"sampler": ["dry", dry]},
        {"sampler": [("dry", dry)]},
        {"sampler": [DRY(**dry)]},
        {"sampler": DRY(**dry)},
    ]
    asked: dict[str, Any] = {"prompt": "ab" * 9, "seed": 5}
    async with open_tiny() as engine:
        for group in ([{"sampler": form} for form in forms], single):
            got = await answers(engine, [{**asked, **form} for form in group])
            assert [*map(len, got)] == [40] * len(group)
            assert all(each == got[0] for each in got)


def test_parameters_are_frozen_with_the_list() -> None:
    given: list[Any] = [["dry", {"base": 2.0}], "xtc"]
    params = SamplingParams(sampler=given)
    given.append("mirostat")
    given[0][1]["base"] = 3.0
    assert params.sampler == (("dry", {"base": 2.0}), "xtc")
    assert hash(params) == hash(SamplingParams(sampler=(("dry", {"base": 2.0}), "xtc")))


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"sampler": ["mirostat", "dry"]}, r"sampler[0]", "'mirostat'.*must be the last"),
        ({"sampler": ["xtc", Mirostat()]}, r"sampler[0]", "'xtc'.*must be the last"),
        ({"sampler": ["dry", DRY(base=2.0)]}, r"sampler[1]", "'DRY'.*into a list once"),
        ({"sampler": ["dry", "nobody"]}, r"sampler[1]", r"known: .*\bdry, "),
        ({"sampler": ["dry", ("xtc", {"threshold": 2})]}, r"sampler[1].threshold", r"\[0, 1\]"),
        ({"sampler": ["dry", ("xtc", {"treshold": 1})]}, r"sampler[1].treshold", "threshold, pro"),
        ({"sampler": ("xtc", {"threshold": 2})}, "sampler.threshold", r"\[0, 1\]"),
        ({"sampler": ("xtc", {1: 2})}, "sampler", "pair"),
        ({"sampler": [("dry", 3)]}, r"sampler[0]", "pair"),
        ({"sampler": ["dry", ["xtc"]]}, r"sampler[1]", "pair"),
        ({"sampler": ["dry", {"base": 2.0}, "xtc"]}, r"sampler[1]", "a name, "),
        ({"sampler": ["dry", None]}, r"sampler[1]", "a name, "),
        ({"sampler": []}, "sampler", "at least one"),
        ({"sampler": ["dry"] * 17}, "sampler", "17 entries.*at most 16"),
        ({"sampler": ("dry", dict.fromkeys(map(str, range(65))))}, "sampler", "at most 64"),
        ({"sampler": "dry", "sampler_args": dict.fromkeys(map(str, range(65)))}, "sampler_args",
         "at most 64"),
        ({"sampler": ["dry"], "sampler_args": {"base": 2}}, "sampler_args", "go with a name"),
        ({"sampler": ("dry", {}), "sampler_args": {"base": 2}}, "sampler_args", "go with a name"),
        ({"sampler": ["dry", "xtc"], "temperature": 0.0}, "temperature", "'xtc'.*does nothing"),
    ],
)  # fmt: skip
async def test_what_is_refused_before_any_state_exists(
    open_tiny: Any, options: dict[str, Any], field: str, says: str
) -> None:
    async with open_tiny() as engine:
        with pytest.raises(InvalidRequest, match=says) as caught:
            await engine.generate("abc", max_tokens=4, **options)
        assert caught.value.field == field
        assert engine.stats().steps == 0


def test_sixteen_are_taken() -> None:
    SamplingParams(sampler=["dry"] * 16)
    SamplingParams(sampler="dry", sampler_args=dict.fromkeys(map(str, range(64))))


@dataclass(frozen=True)
class Told(SamplerPlugin):
    """Does as it is told from the third token on."""

    what: str
    commutes_with_speculation: ClassVar[bool] = True

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        if self.what == "open":
            raise OSError("no such device")
        return _Told(self.what)


class Other(Told):
    """The same, by another name."""


class _Told(Sampler):
    def __init__(self, what: str) -> None:
        self.what = what
        self.slots: set[int] = set()

    def join(self, slot: int, params: Told) -> None:
        if params.what == "join":
            raise OSError("no such slot")
        self.slots.add(slot)

    def leave(self, slot: int) -> None:
        self.slots.remove(slot)

    def sample(self, step: SamplerStep) -> Any:
        assert {*step.slots.tolist()} <= self.slots
        # Nobody answers for another: each finds rows it can draw from.
        assert step.logits.amax(dim=-1).isfinite().all()
        late = step.positions - step.prompt_lens >= 2
        match self.what:
            case "raise" if bool(late.any()):
                raise OSError("no such file")
            case "nan":
                step.logits[late, 5] = torch.nan
            case "bar":
                step.logits[late] = -torch.inf
            case "draw" if bool(late.any()):
                return step.draw(step.weights())
            case "revive":
                step.logits.clamp_(min=0.0)
        return None


@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("open", "open.. raised"),
        ("join", "join.. raised"),
        ("raise", "sample.. raised: OSError"),
        ("nan", "the largest is nan"),
        ("bar", "the largest is -inf"),
    ],
)
async def test_a_fault_is_that_of_the_one_that_did_it(
    open_tiny: Any, caplog: pytest.LogCaptureFixture, what: str, says: str, first: bool
) -> None:
    samplers: list[Any] = [Told(what), Other("nothing"), Mirostat(tau=3.0)]
    if not first:
        samplers = [Other("nothing"), TopNSigma(), Told(what)]
    good = [
        {"prompt": f"{i}", "seed": i, "max_tokens": 12, "sampler": which}
        for i, which in enumerate((None, Mirostat(tau=3.0), [DRY(), Other("x")], Other("x")))
    ]
    # A busy machine may keep any call waiting.
    async with open_tiny(sampler_timeout=60.0) as engine:
        expected = await answers(engine, good)
        got: list[list[int]] = []

        async def others() -> None:
            got.extend(await answers(engine, good))

        async def bad(i: int) -> None:
            with pytest.raises(RequestFailed, match=f"'Told'.*{says}"):
                await engine.generate(f"{i}", max_tokens=12, ignore_eos=True, sampler=samplers)

        async with anyio.create_task_group() as group:
            group.start_soon(others)
            for i in range(3):
                group.start_soon(bad, i)
        assert got == expected
        assert await answers(engine, good) == expected
    reports = [r.message for r in caplog.records if r.message.startswith("plugin_failed")]
    assert len(reports) == 1
    assert "'Told'" in reports[0]


async def test_one_that_draws_and_does_not_say_so(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 1.0}
        await engine.generate("abc", sampler=Told("draw"), **options)
        await engine.generate("abc", sampler=["dry", Told("draw")], **options)
        with pytest.raises(RequestFailed, match=r"'Told'.*other samplers follow.*`draws`"):
            await engine.generate("abc", sampler=[Told("draw"), "dry"], **options)


def test_bars_hold_between_samplers() -> None:
    bench = SamplerBench(6, 1)
    bench.join(0, [Told("revive"), TopNSigma(n=9.0), Mirostat()], allowed_token_ids=[2, 3])
    assert {bench.draw([[9.0, 8, 1, 0, 7, 5]], [0])[0] for _ in range(20)} <= {2, 3}


@dataclass(frozen=True)
class Noisy(SamplerPlugin):
    """Notes a random number."""

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _Noisy(type(self))


class Noisy2(Noisy):
    """Another plugin."""


class _Noisy(Sampler):
    seen: ClassVar[dict[type, list[float]]] = {}

    def __init__(self, kind: type) -> None:
        self.numbers = self.seen.setdefault(kind, [])

    def join(self, slot: int, params: Noisy) -> None: ...

    def sample(self, step: SamplerStep) -> None:
        self.numbers += step.uniform().tolist()


def test_samplers_of_a_row_have_random_numbers_of_their_own() -> None:
    _Noisy.seen.clear()
    bench = SamplerBench(4, 2)
    bench.join(0, [Noisy(), Noisy2()], seed=3)
    for _ in range(50):
        bench.draw([[0.0] * 4], [0])
    first, second = _Noisy.seen[Noisy][:], _Noisy.seen[Noisy2]
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.4
    # The last one has the numbers it would have alone.
    bench.join(1, Noisy(), seed=3)
    _Noisy.seen[Noisy].clear()
    for _ in range(50):
        bench.draw([[0.0] * 4], [1])
    assert _Noisy.seen[Noisy] == second


def test_one_that_does_nothing_changes_nothing() -> None:
    still = DRY(multiplier=0.0)
    for last in (XTC(threshold=0.01), Mirostat(tau=2.0), DynamicTemperature()):
        drawn = []
        for samplers in (last, [still, last]):
            bench = SamplerBench(9, 1)
            bench.join(0, samplers, seed=1)
            drawn.append([bench.draw([[0.1 * i for i in range(9)]], [0])[0] for _ in range(40)])
        assert drawn[0] == drawn[1]


def test_orders_are_forgotten_with_their_last_request() -> None:
    """A client can think of more orders than an engine should remember."""
    there = PluginSamplers(2, 4, TokenHistory(2, torch.device("cpu")), timeout=math.inf)
    kinds: list[Any] = [TopNSigma(), DRY(), DynamicTemperature()]
    there.join(0, [ChosenSampler(kind, "kept") for kind in kinds])
    numbers = set()
    for order in permutations(kinds):
        numbers.add(there.join(1, [ChosenSampler(kind, "tried") for kind in order]))
        assert there.groups <= 2
        there.leave(1)
    assert len(numbers) == 6
    assert there.groups == 1
    there.leave(0)
    assert there.groups == 0
