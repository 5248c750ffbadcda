"""The conformance kit: passes what is right, catches each of these wrong samplers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, ClassVar

import pytest
import torch

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.samplers import DRY, XTC, DynamicTemperature, Mirostat, TopNSigma
from asyncinfer.testing import RuleError, check_sampler, sampler_limits
from asyncinfer.testing.sampler_limits import VOCABULARY


@pytest.mark.parametrize(
    "sampler",
    [
        "dry",
        "mirostat",
        DRY(multiplier=3.0, allowed_length=1),
        DRY(multiplier=3.0, allowed_length=1, breakers=(1,), window=6),
        DynamicTemperature(low=0.2, high=3.0),
        Mirostat(tau=1.0, eta=0.5),
        TopNSigma(n=0.7),
        XTC(threshold=0.05, probability=0.6),
    ],
    ids=str,
)
def test_what_is_right_passes(sampler: Any) -> None:
    check_sampler(sampler)


@dataclass(frozen=True)
class Base(SamplerPlugin):
    """Warms the odd and cools the even tokens."""

    by: float = 1.0

    kind: ClassVar[type[Steady]]

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return self.kind(slots, vocab_size)


class Steady(Sampler):
    """Right; each of the others is wrong in one way."""

    def __init__(self, slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.by = torch.zeros(slots)
        self.drawn = torch.zeros(slots)

    def join(self, slot: int, params: Base) -> None:
        self.by[slot] = params.by
        self.drawn[slot] = 0

    def state(self) -> Sequence[torch.Tensor]:
        return (self.drawn,)

    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        step.logits[:, 1::2] += self.factor(step)[:, None]
        self.drawn[step.slots] += 1
        return None

    def factor(self, step: SamplerStep) -> torch.Tensor:
        return self.by[step.slots] * (self.drawn[step.slots] % 3)


def plugin(kind: type[Steady], **declared: Any) -> SamplerPlugin:
    made = dataclass(frozen=True)(
        type(kind.__name__, (Base,), {"__doc__": "Wrong.", "kind": kind, **declared})
    )
    return made()  # type: ignore[no-any-return]


class Raises(Steady):
    def sample(self, step: SamplerStep) -> Any:
        raise OSError("no file")


class Column(Steady):
    def sample(self, step: SamplerStep) -> Any:
        return step.draw(step.weights())[:, None]


class Narrow(Steady):
    def sample(self, step: SamplerStep) -> Any:
        return step.draw(step.weights()).int()


class Beyond(Steady):
    def sample(self, step: SamplerStep) -> Any:
        return step.draw(step.weights()) + 1


class Overflows(Steady):
    def sample(self, step: SamplerStep) -> Any:
        weights = step.logits.exp()
        step.logits.copy_((weights / weights.sum(dim=-1, keepdim=True)).log())


class ByRow(Steady):
    def factor(self, step: SamplerStep) -> torch.Tensor:
        return self.drawn[: len(step.slots)] % 3


class OverTheBatch(Steady):
    def factor(self, step: SamplerStep) -> torch.Tensor:
        return step.logits.clamp(-9, 9).mean().expand(len(step.slots)) * 3


class EverySlot(Steady):
    def sample(self, step: SamplerStep) -> Any:
        step.logits[:, 1::2] += self.factor(step)[:, None]
        self.drawn += 1


class NeverForgets(Steady):
    def join(self, slot: int, params: Base) -> None:
        self.by[slot] = params.by


class HidesState(Steady):
    def state(self) -> Sequence[torch.Tensor]:
        return ()


class StateWithoutSlots(Steady):
    def state(self) -> Sequence[torch.Tensor]:
        return (self.drawn.sum(),)


class Draws(Steady):
    def sample(self, step: SamplerStep) -> Any:
        super().sample(step)
        return step.draw(step.weights())


class OwnChance(Steady):
    def factor(self, step: SamplerStep) -> torch.Tensor:
        return torch.rand(len(step.slots))


class IgnoresBars(Steady):
    def sample(self, step: SamplerStep) -> Any:
        return (step.positions * 7) % self.vocab_size


class Loops(Steady):
    def sample(self, step: SamplerStep) -> Any:
        for row, factor in zip(step.logits, self.factor(step), strict=True):
            row[1::2] += factor
        self.drawn[step.slots] += 1


class Waits(Steady):
    def sample(self, step: SamplerStep) -> Any:
        if self.drawn.max().item() >= 0:
            return super().sample(step)


class Branches(Steady):
    def sample(self, step: SamplerStep) -> Any:
        if step.positions.max() >= 0:
            return super().sample(step)


class Slow(Steady):
    #: Calls that are slow: where the kit does not notice any of them, the others pass quickly.
    slow: ClassVar[list[float]] = [0.4] * 20

    def sample(self, step: SamplerStep) -> Any:
        if self.slow:
            Event().wait(self.slow.pop())
        return super().sample(step)


class SlowToJoin(Steady):
    def join(self, slot: int, params: Base) -> None:
        Event().wait(0.4)
        super().join(slot, params)


class KeepsLogits(Steady):
    def __init__(self, slots: int, vocab_size: int) -> None:
        super().__init__(slots, vocab_size)
        self.kept: list[torch.Tensor] = []

    def sample(self, step: SamplerStep) -> Any:
        self.kept.append(step.logits)
        return super().sample(step)


class KeepsWhatItComputes(KeepsLogits):
    def sample(self, step: SamplerStep) -> Any:
        self.kept.append(step.logits.softmax(dim=-1))
        return Steady.sample(self, step)


class SeedsTorch(Steady):
    def sample(self, step: SamplerStep) -> Any:
        torch.manual_seed(1)
        return super().sample(step)


class ChangesTheDtype(Steady):
    def sample(self, step: SamplerStep) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().sample(step)


class ChangesTheDtypeAtOnce(Steady):
    def __init__(self, slots: int, vocab_size: int) -> None:
        super().__init__(slots, vocab_size)
        torch.set_default_dtype(torch.float64)


class UsesAStaleStep(Steady):
    last: SamplerStep | None = None

    def factor(self, step: SamplerStep) -> torch.Tensor:
        last, self.last = self.last or step, step
        return last.positions[:1] * 0 + super().factor(step)


class DrawsDoubles(Steady):
    def sample(self, step: SamplerStep) -> Any:
        return step.draw(step.weights().double())


class DrawsNothing(Steady):
    def sample(self, step: SamplerStep) -> Any:
        return step.draw(step.weights() - 1.0)


class CountsInSecret(Steady):
    def state(self) -> Sequence[torch.Tensor]:
        return ()

    def factor(self, step: SamplerStep) -> torch.Tensor:
        return self.by[step.slots] * (self.drawn[step.slots] > 7)

    def sample(self, step: SamplerStep) -> Any:
        step.logits[:, 1::2] += 9 * self.factor(step)[:, None]
        self.drawn.index_put_((step.slots,), torch.ones(len(step.slots)), accumulate=True)


@pytest.mark.parametrize(
    ("kind", "declared", "says"),
    [
        (Slow, {}, r"^time: the fastest of 5 calls of sample\(\) took \d"),
        (SlowToJoin, {}, r"^time: the fastest of 8 calls of join\(\) took \d"),
        (KeepsLogits, {}, "^memory: 11 tensors more are kept after 11 more steps"),
        (KeepsWhatItComputes, {}, "^memory: 11 tensors more are kept after 11 more steps"),
        (SeedsTorch, {}, "^chance: it touched"),
        (ChangesTheDtype, {}, r"^answers: .*sample\(\) changed defaults of torch: dtype"),
        (ChangesTheDtypeAtOnce, {}, r"^answers: .*open\(\) changed defaults of torch: dtype"),
        (UsesAStaleStep, {}, "^chance: .*the step is over"),
        (DrawsDoubles, {"draws": True}, "^answers: .*weights must be float32"),
        (DrawsNothing, {"draws": True}, "^answers: .*a weight below 0|none is above 0"),
        (CountsInSecret, {"commutes_with_speculation": True}, "^(preemption|speculation): "),
        (Raises, {}, r"^answers: 1 rows, 1 tokens, ordinary logits: .*no file"),
        (Column, {}, "^answers: .*one per row"),
        (Narrow, {}, "^answers: .*torch.int32"),
        (Beyond, {}, "^answers: 1 rows, 1 tokens, .*out of range"),
        (Overflows, {}, "^answers: .*logits of 10,000.*largest is (nan|inf)"),
        (ByRow, {}, r"^batch: request \d of 2"),
        (OverTheBatch, {}, r"^batch: request \d of [23]"),
        (EverySlot, {}, r"^(batch|pause): request \d"),
        (NeverForgets, {}, "^reuse: request 1 of one slot"),
        (HidesState, {}, "^preemption: preempted after 1 tokens"),
        (StateWithoutSlots, {}, r"^answers: .*state\(\) must give tensors \[1, ...\]"),
        (OwnChance, {}, "^chance"),
        (IgnoresBars, {}, "^(bars|chance|batch): "),
        (Loops, {}, r"^rows: \d+ operations for 2 rows, \d+ for 6"),
        (Waits, {}, "^device: .*item"),
        (Branches, {}, "^device: .*__bool__"),
        (Draws, {}, "^draws: .*must declare draws = True"),
        (Steady, {"changes_argmax": False}, "^argmax: .*not .* but"),
        (Steady, {"commutes_with_speculation": True}, "^speculation: .*state.. gives 1"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_wrong_sampler_is_caught(
    kind: type[Steady], declared: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is slow is slow at once.
    monkeypatch.setattr(sampler_limits, "TURNS", 1)
    with pytest.raises(RuleError, match=says):
        check_sampler(plugin(kind, **declared))


class HeldUp(Steady):
    """By a machine that has more to do, for as many calls as the kit makes in one go."""

    calls: ClassVar[int] = 0

    def sample(self, step: SamplerStep) -> Any:
        if len(step.slots) == sampler_limits.ROWS and step.logits.shape[1] == VOCABULARY:
            HeldUp.calls += 1
            if HeldUp.calls <= sampler_limits.CALLS:
                Event().wait(0.3)
        return super().sample(step)


def test_a_busy_machine_is_not_a_slow_sampler() -> None:
    check_sampler(plugin(HeldUp))
    assert HeldUp.calls == 2 * sampler_limits.CALLS


class Hangs(Steady):
    def sample(self, step: SamplerStep) -> Any:
        stuck_in_here()


def stuck_in_here() -> None:
    Event().wait(120)


def test_one_that_hangs_is_named_and_shown() -> None:
    with pytest.raises(RuleError, match=r"^returns: sample\(\) of sampler Hangs did") as caught:
        check_sampler(plugin(Hangs), patience=1.0)
    assert "in stuck_in_here" in str(caught.value)


def test_the_base_of_the_wrong_ones_is_right() -> None:
    check_sampler(plugin(Steady))
    check_sampler(plugin(Draws, draws=True))


@dataclass(frozen=True)
class NotJson(Base):
    """A set is no JSON."""

    kind = Steady
    tokens: frozenset[int] = frozenset({1})


@dataclass(frozen=True)
class TurnsIntoAList(Base):
    """A tuple comes back as a list."""

    kind = Steady
    tokens: Sequence[int] = (1, 2)


@dataclass(frozen=True)
class Written(Base):
    """Its sampler writes to a parameter."""

    uses: list[int] = field(default_factory=list)

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        self.uses.append(slots)
        return Steady(slots, vocab_size)


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        (NotJson(), "^parameters: .*do not pass through JSON"),
        (TurnsIntoAList(), "^parameters: .*comes out of JSON"),
        (Written(), "^parameters: .*became"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_wrong_parameters_are_caught(sampler: SamplerPlugin, says: str) -> None:
    with pytest.raises(RuleError, match=says):
        check_sampler(sampler)


def test_parameters_that_are_not_frozen() -> None:
    @dataclass
    class Soft:
        """Not frozen."""

        changes_argmax: ClassVar[bool] = True

        def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
            return Steady(slots, vocab_size)

    with pytest.raises(RuleError, match=r"^parameters: .*must be a frozen dataclass"):
        check_sampler(Soft())
