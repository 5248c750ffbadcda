"""Sampler plugins in a simulated life, what each makes of a token, and how those that misbehave may
fail their own requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from asyncinfer.protocols import Sampler, SamplerPlugin, SamplerStep
from asyncinfer.testing.oracle import EOS_ID
from asyncinfer.testing.simulator.host import VirtualHost
from asyncinfer.testing.simulator.vocabulary import VOCAB

if TYPE_CHECKING:
    import torch

__all__ = ["SAMPLERS", "may_fail", "sampled", "samplers_of"]

#: Calls of the raising sampler of which the last one raises, and positions of the lying one of
#: which it answers the last with no token.
_EVERY: Final = 7


@dataclass(frozen=True)
class _Moving(SamplerPlugin):
    """Every token but the end becomes another one: the next, or as many further as were drawn.
    Without state, it takes several positions of a slot."""

    host: VirtualHost
    commutes_with_speculation: ClassVar[bool] = True
    sampler: ClassVar[type[_Mover]]

    def open(self, slots: int, vocab_size: int, device: torch.device) -> Sampler:
        return self.sampler(slots, self.host)


class _Mover(Sampler):
    def __init__(self, slots: int, host: VirtualHost) -> None:
        self._host = host

    def join(self, slot: int, params: Any) -> None: ...

    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        _move(step.logits, 1)
        return None


class _Counter(_Mover):
    """Has state: how many tokens each slot has drawn."""

    def __init__(self, slots: int, host: VirtualHost) -> None:
        import torch

        self._drawn = torch.zeros(slots, dtype=torch.int64)

    def join(self, slot: int, params: Any) -> None:
        self._drawn[slot] = 0

    def state(self) -> Sequence[torch.Tensor]:
        return (self._drawn,)

    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        _move(step.logits, self._drawn[step.slots][:, None])
        self._drawn[step.slots] += 1
        return None


class _Drawer(_Mover):
    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        super().sample(step)
        return step.draw(step.weights())


class _PausingMover(_Mover):
    """Others run while it is called, perhaps for longer than a sampler may take."""

    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        self._host.point()
        return super().sample(step)


class _RaisingMover(_Mover):
    """Gives up in the middle now and then, its logits changed."""

    def __init__(self, slots: int, host: VirtualHost) -> None:
        self._calls = 0

    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        super().sample(step)
        self._calls += 1
        if self._calls % _EVERY == 0:
            raise SystemExit("gives up")
        return None


class _LyingMover(_Mover):
    """Answers now and then with a token that there is not."""

    def sample(self, step: SamplerStep) -> torch.Tensor | None:
        super().sample(step)
        return step.logits.argmax(-1).masked_fill_(step.positions % _EVERY == 0, VOCAB)


class _Counting(_Moving):
    commutes_with_speculation = False
    sampler = _Counter


class _Drawing(_Moving):
    draws = True
    commutes_with_speculation = False
    sampler = _Drawer


class _PausingSampler(_Moving):
    commutes_with_speculation = False
    sampler = _PausingMover


class _RaisingSampler(_Moving):
    commutes_with_speculation = False
    sampler = _RaisingMover


class _LyingSampler(_Moving):
    draws = True
    commutes_with_speculation = False
    sampler = _LyingMover


_Moving.sampler = _Mover

#: Plugins, in the order in which they are called, by the name that scenarios have for them.
SAMPLERS: Final[dict[str, tuple[Callable[[VirtualHost], _Moving], ...]]] = {
    "moving": (_Moving,),
    "counting": (_Counting,),
    "drawing": (_Drawing,),
    "counting, drawing": (_Counting, _Drawing),
    "moving, counting": (_Moving, _Counting),
    "(pausing)": (_PausingSampler,),
    "counting, (raising)": (_Counting, _RaisingSampler),
    "(lying)": (_LyingSampler,),
}
#: By plugin, part of what its requests are told.
_FAILURES: Final = {
    _PausingSampler: "sampler_timeout",
    _RaisingSampler: "gives up",
    _LyingSampler: "out of range",
}


def samplers_of(name: str, host: VirtualHost) -> list[_Moving]:
    """The plugins of a name, made anew."""
    return [kind(host) for kind in SAMPLERS[name]]


def sampled(name: str) -> Callable[[int, int], int]:
    """What the plugins of a name make of the model's draw, when so many were drawn before."""
    kinds = SAMPLERS[name]

    def moved(token: int, before: int) -> int:
        for kind in kinds:
            token = _moved(token, before if kind is _Counting else 1)
        return token

    return moved


def may_fail(name: str | None, message: str) -> bool:
    """Whether a request with these plugins may fail by this message."""
    kinds = () if name is None else SAMPLERS[name]
    return any(told in message for kind, told in _FAILURES.items() if kind in kinds)


def _moved(token: int, by: int) -> int:
    return token if token == EOS_ID else 1 + (token - 1 + by) % (VOCAB - 1)


def _move(logits: torch.Tensor, by: Any) -> None:
    """`_moved` of every token. `by`: int, or int64 `[n, 1]`."""
    import torch

    others = logits[:, 1:]
    places = (torch.arange(VOCAB - 1) - by) % (VOCAB - 1)
    logits[:, 1:] = others.gather(1, places.expand_as(others))
