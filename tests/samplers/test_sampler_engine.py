"""Sampler plugins through a real engine: by name, by object, batched, preempted, broken."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from dataclasses import dataclass
from threading import Event
from typing import Any, ClassVar

import anyio
import pytest
import torch
from samplers.crowds import answers, check_preempted
from support import core_of

from asyncinfer import Engine, InvalidRequest, PluginError, RequestFailed, plugins
from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.samplers import DRY, XTC, DynamicTemperature, Mirostat, TopNSigma
from asyncinfer.testing import FakeModel

pytestmark = pytest.mark.anyio

BUILT_IN: dict[str, Any] = {
    "dry": DRY(multiplier=3.0, allowed_length=1),
    "dynamic-temperature": DynamicTemperature(low=0.2, high=3.0),
    "mirostat": Mirostat(tau=2.0, eta=0.7),
    "top-n-sigma": TopNSigma(n=1.5),
    "xtc": XTC(threshold=0.01, probability=0.7),
}


def crowd(sampler: Any) -> list[dict[str, Any]]:
    """Requests with a plugin among others without, and with another one."""
    return [
        {"prompt": f"request {i} " * (1 + i % 3), "seed": i, "sampler": which}
        for i in range(9)
        for which in [(sampler, None, Mirostat(tau=3.0))[i % 3]]
    ]


@pytest.mark.parametrize("name", BUILT_IN)
async def test_a_seed_gives_the_same_tokens_alone_batched_and_preempted(
    open_tiny: Any, name: str
) -> None:
    requests = crowd(BUILT_IN[name])
    async with open_tiny() as engine:
        alone = [(await answers(engine, [request]))[0] for request in requests]
        steps = engine.stats().steps
        assert await answers(engine, requests) == alone
        assert engine.stats().steps - steps < 9 * 40 / 2
        plain = [{**request, "sampler": None} for request in requests]
        changed = await answers(engine, plain)
    assert alone[0::3] != changed[0::3]
    assert alone[1::3] == changed[1::3]
    await check_preempted(open_tiny, requests, alone)


async def test_a_name_with_arguments_is_the_object(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        for name, given in BUILT_IN.items():
            args = dataclasses.asdict(given)
            asked: dict[str, Any] = {"prompt": "ab" * 9, "seed": 5}
            by_name = {**asked, "sampler": name, "sampler_args": args}
            got = await answers(engine, [{**asked, "sampler": given}, by_name])
            assert got[0] == got[1]


async def test_n_answers_of_a_stateful_sampler(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "seed": 3}
        done = await engine.generate("abc", n=4, sampler=Mirostat(tau=2.0), **options)
        again = await engine.generate("abc", n=4, sampler=Mirostat(tau=2.0), **options)
    texts = [choice.token_ids for choice in done.choices]
    assert len(set(texts)) == 4
    assert texts == [choice.token_ids for choice in again.choices]


async def test_logprobs_are_the_models_own_whatever_the_sampler(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        options: dict[str, Any] = {"max_tokens": 5, "logprobs": 2, "seed": 1, "ignore_eos": True}
        plain = await engine.generate("abc", **options)
        cut = await engine.generate("abc", sampler=TopNSigma(n=0.0), **options)
        best = await engine.generate("abc", **{**options, "temperature": 0.0})
    assert cut.token_ids == best.token_ids
    assert cut.logprobs[0].top == plain.logprobs[0].top


@dataclass(frozen=True)
class Needs(SamplerPlugin):
    """Has a parameter without a default."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size must not be negative")

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return Nothing()


class Nothing(Sampler):
    def join(self, slot: int, params: Any) -> None: ...

    def sample(self, step: SamplerStep) -> None: ...


@dataclass
class Thawed(SamplerPlugin):
    """Not frozen."""

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return Nothing()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins.samplers, "_registered", {"needs": Needs})
    monkeypatch.setattr(plugins.samplers, "_loaded", {})


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"sampler": "nobody"}, "sampler", "known: .*dry, dynamic-temperature, mirostat"),
        ({"sampler": 7}, "sampler", "a name, "),
        ({"sampler": Mirostat}, "sampler", "a name, "),
        ({"sampler": "mirostat", "sampler_args": {"tua": 5}}, "sampler_args.tua", "tau, eta"),
        ({"sampler": "mirostat", "sampler_args": {"tau": -1}}, "sampler_args.tau", r"\[0, 100\]"),
        ({"sampler": "mirostat", "sampler_args": {"tau": "5"}}, "sampler_args.tau", "a number"),
        ({"sampler": "dry", "sampler_args": {"breakers": "ab"}}, "sampler_args.breakers", "list"),
        ({"sampler": Mirostat(), "sampler_args": {"tau": 5}}, "sampler_args", "go with a name"),
        ({"sampler_args": {"tau": 5}}, "sampler_args", "needs sampler"),
        ({"sampler": "needs"}, "sampler_args", "needs size"),
        ({"sampler": "needs", "sampler_args": {"size": -1}}, "sampler_args", "not be negative"),
        ({"sampler": "needs", "sampler_args": {"size": "x"}}, "sampler_args", "'<'"),
        ({"sampler": "mirostat", "temperature": 0.0}, "temperature", "does nothing"),
    ],
)
async def test_what_is_refused_before_any_state_exists(
    open_tiny: Any, options: dict[str, Any], field: str, says: str
) -> None:
    async with open_tiny() as engine:
        with pytest.raises(InvalidRequest, match=says) as caught:
            await engine.generate("abc", max_tokens=4, **options)
        assert caught.value.field == field
        assert engine.stats().failed == engine.stats().steps == 0
        assert (await engine.generate("abc", max_tokens=4, ignore_eos=True)).text


@pytest.mark.usefixtures("registered")
async def test_a_plugin_that_is_not_frozen_is_the_plugins_fault(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        with pytest.raises(PluginError, match="Thawed must be a frozen dataclass"):
            await engine.generate("abc", max_tokens=4, sampler=Thawed())
    for factory in (Thawed, lambda: Needs(1)):
        with pytest.raises(PluginError, match="must be a frozen dataclass"):
            plugins.register("asyncinfer.samplers", "thawed", factory)
    assert "thawed" not in plugins.samplers.names()


async def test_a_model_that_runs_no_samplers_says_so() -> None:
    async with Engine(FakeModel()) as engine:
        with pytest.raises(InvalidRequest, match="runs no samplers"):
            await engine.generate("abc", max_tokens=4, sampler="xtc")
        # What is wrong with the plugin itself is said first.
        with pytest.raises(PluginError, match="Thawed must be a frozen dataclass"):
            await engine.generate("abc", max_tokens=4, sampler=Thawed())


# -- faults ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faulty(SamplerPlugin):
    """Misbehaves as told, from the fourth token of an answer on."""

    how: str = "raise"

    commutes_with_speculation: ClassVar[bool] = True

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        if self.how == "open":
            raise OSError("no such device")
        return _Faulty()


#: What weights are made of that cannot be drawn from.
WEIGHTS = {
    "weights nan": [torch.nan],
    "weights zero": [0.0],
    "weights below": [-0.5, 1.0],
    "weights inf": [torch.inf, 1.0],
    "weights -inf": [-torch.inf, 1.0],
    "one nan": [1.0] * 30 + [torch.nan],
}


class _Faulty(Sampler):
    block = Event()

    def __init__(self) -> None:
        self.how: dict[int, str] = {}
        self.kept: SamplerStep | None = None

    def join(self, slot: int, params: Faulty) -> None:
        if params.how == "join":
            raise OSError("no such slot")
        self.how[slot] = params.how

    def sample(self, step: SamplerStep) -> Any:
        late = step.positions - step.prompt_lens >= 3
        logits, rows = step.logits, len(step.slots)
        if not bool(late.any()):
            return None
        match self.how[int(step.slots[late][0])]:
            case "raise":
                raise OSError("no such file")
            case "exit":
                raise SystemExit(3)
            case "interrupt":
                raise KeyboardInterrupt
            case "cancel":
                raise asyncio.CancelledError
            case "generator":
                raise GeneratorExit
            case "type":
                return [0] * rows
            case "shape":
                return torch.zeros((rows, 1), dtype=torch.int64)
            case "few":
                return torch.zeros(rows + 1, dtype=torch.int64)
            case "dtype":
                return torch.zeros(rows, dtype=torch.int32)
            case "device":
                return torch.zeros(rows, dtype=torch.int64, device="meta")
            case "sparse":
                return torch.zeros(rows, dtype=torch.int64).to_sparse()
            case "below":
                return torch.where(late, -1, 7)
            case "beyond":
                return torch.where(late, 2**40, 7)
            case "nan":
                logits[late, 5] = torch.nan
            case "inf":
                logits[late, 5] = torch.inf
            case "barred":
                logits[late] = -torch.inf
            case "resize":
                logits.resize_(1, 3)
            case "slow":
                self.block.wait(0.35)
            case str(how) if how in WEIGHTS:
                weights = step.weights()
                weights[late] = torch.tensor(WEIGHTS[how]).repeat(1 + rows * 1000)[
                    : weights.shape[1]
                ]
                return step.draw(weights)
            case "another row's":
                return step.draw(torch.where(late[:, None], 0.0, step.weights()))
            case "drawn twice":
                # What was drawn first is not used, and its fault stays one.
                step.draw(torch.where(late[:, None], -1.0, step.weights()))
                return step.draw(step.weights())
            case "drawn for nothing":
                step.draw(torch.where(late[:, None], torch.nan, step.weights()))
            case "double":
                return step.draw(step.weights().double())
            case "transposed":
                return step.draw(step.weights().T)
            case "default dtype":
                torch.set_default_dtype(torch.float64)
            case "default device":
                torch.set_default_device("meta")
            case "threads":
                torch.set_num_threads(torch.get_num_threads() + 1)
            case "changes, raises":
                torch.set_default_dtype(torch.float64)
                raise OSError("after it has changed the dtype")
            case "stale":
                kept = self.kept or step
                self.kept = step
                return kept.draw(kept.weights())
            case "writes to what it sees":
                step.slots.fill_(99)
                step.positions.fill_(-7)
                step.prompt_lens.fill_(10**6)
        return None


@pytest.fixture
def reports(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, logger="asyncinfer")
    return lambda: [r.message for r in caplog.records if r.message.startswith("plugin_failed")]


async def beside_others(engine: Engine, how: str, **options: Any) -> list[RequestFailed]:
    """Four faulty requests, four that run through another plugin, four plain: the errors of the
    first, once the others are known to be right."""
    good = [
        {"prompt": f"good {i}", "seed": i, "max_tokens": 12, "sampler": which}
        for i in range(4)
        for which in (None, Mirostat(tau=3.0))
    ]
    expected = await answers(engine, good)
    errors: list[RequestFailed] = []
    got: list[list[int]] = []

    async def bad(i: int) -> None:
        with pytest.raises(RequestFailed) as caught:
            await engine.generate(
                f"bad {i}", max_tokens=12, ignore_eos=True, sampler=Faulty(how), **options
            )
        errors.append(caught.value)

    async def others() -> None:
        got.extend(await answers(engine, good))

    async with anyio.create_task_group() as group:
        group.start_soon(others)
        for i in range(4):
            group.start_soon(bad, i)
    assert got == expected
    assert await answers(engine, good) == expected
    assert engine.stats().failed == 4
    assert len({*map(id, errors)}) == 4
    return errors


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "sample.. raised: OSError..no such file"),
        ("exit", "sample.. raised: SystemExit"),
        ("interrupt", "sample.. raised: KeyboardInterrupt"),
        ("cancel", "sample.. raised: CancelledError"),
        ("generator", "sample.. raised: GeneratorExit"),
        ("join", "join.. raised: OSError..no such slot"),
        ("open", "open.. raised: OSError..no such device"),
    ],
)
async def test_a_sampler_that_raises_fails_its_own_rows(  # fault 18
    open_tiny: Any, reports: Any, how: str, says: str
) -> None:
    async with open_tiny(sampler_timeout=60.0) as engine:
        for error in await beside_others(engine, how):
            assert "'Faulty'" in str(error)
            assert "asyncinfer.samplers" in str(error)
            assert error.__cause__ is not None
            assert type(error.__cause__).__name__ in str(error)
            with pytest.raises(RequestFailed, match=says):
                raise error
    assert len(reports()) == 1


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("type", "must answer None or a tensor: it gave list"),
        ("shape", r"must answer int64, one per row: it gave torch.int64 \[\d, 1\]"),
        ("few", r"must answer int64, one per row: it gave torch.int64 \[\d\]"),
        ("dtype", r"must answer int64, one per row: it gave torch.int32"),
        ("device", "must answer on cpu: it gave meta"),
        ("sparse", "sample"),
        ("below", "out of range or barred"),
        ("beyond", "out of range or barred"),
        ("nan", "the largest is nan"),
        ("inf", "the largest is inf"),
        ("barred", "the largest is -inf"),
        ("resize", "changed the shape"),
        ("weights nan", r"draw\(\) was given a weight that is NaN: row \d of \d"),
        ("one nan", r"draw\(\) was given a weight that is NaN: row \d of \d"),
        ("weights zero", r"draw\(\) was given weights of which none is above 0: row \d of \d"),
        ("weights below", r"draw\(\) was given a weight below 0: row \d of \d"),
        ("weights -inf", r"draw\(\) was given a weight below 0: row \d of \d"),
        ("weights inf", r"draw\(\) was given a weight that is infinite: row \d of \d"),
        ("another row's", "none is above 0"),
        ("drawn twice", "a weight below 0"),
        ("drawn for nothing", "a weight that is NaN"),
        ("double", "weights must be float32 .* they are float64"),
        ("transposed", "weights must be float32"),
        (
            "default dtype",
            "changed defaults of torch: dtype torch.float64 instead of torch.float32",
        ),
        ("default device", "changed defaults of torch: device meta instead of cpu"),
        ("threads", r"changed defaults of torch: threads \d+ instead of"),
        ("changes, raises", "after it has changed the dtype"),
        ("stale", "the step is over: it can be used during the call of sample"),
    ],
)
@pytest.mark.parametrize("overlap", [1, 2])
async def test_rubbish_is_caught_before_it_is_committed(  # fault 19
    open_tiny: Any, reports: Any, how: str, says: str, overlap: int
) -> None:
    async with open_tiny(overlap=overlap, sampler_timeout=60.0) as engine:
        for error in await beside_others(engine, how):
            assert "'Faulty'" in str(error)
            with pytest.raises(RequestFailed, match=says):
                raise error
        assert torch.get_default_dtype() is torch.float32
        assert torch.get_default_device() == torch.device("cpu")
        stream = engine.stream("abc", max_tokens=12, sampler=Faulty(how), ignore_eos=True)
        seen: list[int] = []
        with pytest.raises(RequestFailed):
            async for chunk in stream:
                seen += chunk.token_ids
        # Three tokens were good; nothing of the fourth is seen ("stale": its step is used a step
        # later).
        assert len(seen) <= 3 + (how == "stale")
    assert len(reports()) == 1


async def test_what_a_sampler_may_read_is_its_own_to_write(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        requests: list[dict[str, Any]] = [{"prompt": f"abc {i}", "seed": i} for i in range(3)]
        expected = await answers(engine, requests)
        vandals = [{**each, "sampler": Faulty("writes to what it sees")} for each in requests]
        assert await answers(engine, vandals) == expected


async def test_state_that_raises_is_said_as_such(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        with pytest.raises(RequestFailed, match=r"state\(\) raised: OSError\('no such state'\)"):
            await engine.generate("abc", max_tokens=4, sampler=Hollow())


@dataclass(frozen=True)
class Hollow(SamplerPlugin):
    """Its sampler has a state that cannot be read."""

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _Hollow()


class _Hollow(Nothing):
    def state(self) -> Any:
        raise OSError("no such state")


async def test_a_token_that_the_request_bars(open_tiny: Any) -> None:  # fault 19
    async with open_tiny() as engine:
        options: dict[str, Any] = {"max_tokens": 4, "allowed_token_ids": [3, 4]}
        assert (await engine.generate("abc", sampler=Stubborn(3), **options)).token_ids == (3,) * 4
        with pytest.raises(RequestFailed, match="barred"):
            await engine.generate("abc", sampler=Stubborn(5), **options)
        # Written over, a bar stays.
        done = await engine.generate("abc", sampler=Stubborn(5, answer=False), **options)
        assert set(done.token_ids) <= {3, 4}


@dataclass(frozen=True)
class Stubborn(SamplerPlugin):
    """One token always."""

    token: int
    answer: bool = True

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return _Stubborn(self)


class _Stubborn(Sampler):
    def __init__(self, params: Stubborn) -> None:
        self.params = params

    def join(self, slot: int, params: Stubborn) -> None:
        self.params = params

    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        if self.params.answer:
            return torch.full_like(step.slots, self.params.token)
        step.logits.fill_(0.0)
        step.logits[:, self.params.token] = 100.0
        return None


async def test_a_sampler_that_blocks_is_quarantined(  # fault 20
    open_tiny: Any, reports: Any
) -> None:
    async with open_tiny(sampler_timeout=0.3) as engine:
        for error in await beside_others(engine, "slow"):
            assert "'Faulty'" in str(error)
            assert "3 calls of sample() in a row took more than sampler_timeout=0.3" in str(error)
        steps = engine.stats().steps
        with pytest.raises(RequestFailed, match="not called any more"):
            await engine.generate("new", max_tokens=4, sampler=Faulty("slow"))
        assert engine.stats().steps == steps + 1
    # Where the machine is slow, another one may be late once.
    faults = [line for line in reports() if "'Faulty'" in line]
    assert [("too slow" in line, "not called" in line) for line in faults] == [
        (True, False),
        (False, True),
    ]


async def test_a_model_that_is_broken_is_not_the_plugins_fault(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        decoder: Any = core_of(engine).runner.decoder  # type: ignore[attr-defined]
        head = decoder.logits

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = head(hidden)
            logits[0, 3] = torch.nan
            return logits

        decoder.logits = broken
        with pytest.raises(RequestFailed, match="the model's logits are not finite"):
            await engine.generate("abc", max_tokens=4, sampler=Mirostat())
