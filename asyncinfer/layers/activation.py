"""Activations: the functions between the two products of a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
import torch.nn.functional as F

from asyncinfer.errors import PluginError
from asyncinfer.kernels import ops
from asyncinfer.layers.checks import refuse

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "LearnedActivation",
    "activation",
    "clamped_swiglu",
    "fused_gate",
    "learned",
    "renamed",
]

#: A function of each element, to a tensor of the same shape and dtype.
Activation: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"


@dataclass(frozen=True, slots=True)
class LearnedActivation:
    """An activation with weights of its own in each layer. Raises `ValueError` for bad fields."""

    #: `function(x, *weights)`, to a tensor of `x`'s shape and dtype.
    function: Callable[..., torch.Tensor]
    #: The weights' names in the checkpoint, without the layer's prefix, and their shapes.
    weights: tuple[tuple[str, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise refuse(self, "function", "must be one that can be called")
        if not isinstance(self.weights, tuple) or not all(map(_is_weight, self.weights)):
            raise refuse(self, "weights", 'must be a tuple of pairs such as ("mlp.act.beta", (1,))')


def _is_weight(pair: object) -> bool:
    match pair:
        case (str(name), tuple(shape)) if isinstance(pair, tuple) and name:
            return all(type(size) is int and size > 0 for size in shape)
    return False


def _silu(x: torch.Tensor) -> torch.Tensor:
    return F.silu(x)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU (Hendrycks and Gimpel, 2016)."""
    return F.gelu(x)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return ops.gelu_mul(gate_up, approximate="tanh")


def _relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    """The square of ReLU (So et al., 2021)."""
    return F.relu(x).square_()


def _xielu(
    x: torch.Tensor,
    alpha_p: torch.Tensor,
    alpha_n: torch.Tensor,
    beta: torch.Tensor,
    eps: torch.Tensor,
) -> torch.Tensor:
    """xIELU (Huang and Schlag, 2024)."""
    above = F.softplus(alpha_p) * x * x
    below = (torch.expm1(torch.minimum(x, eps)) - x) * (beta + F.softplus(alpha_n))
    return torch.where(x > 0, above, below).add_(beta * x)


#: Activations with a kernel for the gated form, by their names in `config.json`: plain and gated.
_FORMS: Final[dict[str, tuple[Activation, Activation]]] = {
    "gelu": (_gelu, ops.gelu_mul),
    "gelu_fast": (_gelu_tanh, _gelu_tanh_mul),
    "gelu_new": (_gelu_tanh, _gelu_tanh_mul),
    "gelu_pytorch_tanh": (_gelu_tanh, _gelu_tanh_mul),
    "silu": (_silu, ops.silu_mul),
    "swish": (_silu, ops.silu_mul),
}
#: Activations without such a kernel.
_PLAIN: Final[dict[str, Activation]] = {"relu": _relu, "relu2": _relu2}
_LEARNED: Final = {
    "xielu": LearnedActivation(
        _xielu,
        (
            ("mlp.act_fn.alpha_p", (1,)),
            ("mlp.act_fn.alpha_n", (1,)),
            ("mlp.act_fn.beta", ()),
            ("mlp.act_fn.eps", ()),
        ),
    )
}
ACTIVATIONS: Final = tuple(sorted((*_FORMS, *_PLAIN, *_LEARNED)))
_EPILOGUES: Final[dict[Activation, str]] = {
    ops.silu_mul: "silu",
    ops.gelu_mul: "gelu",
    _gelu_tanh_mul: "gelu_tanh",
}


def learned(chosen: str | Activation | LearnedActivation) -> LearnedActivation | None:
    """The activation if it has weights, else None."""
    if isinstance(chosen, str):
        return _LEARNED.get(chosen)
    return chosen if isinstance(chosen, LearnedActivation) else None


def renamed(chosen: str, names: Sequence[str]) -> LearnedActivation:
    """A learned activation of a name in `config.json` whose weights have other names, and are
    vectors of one number."""
    known = _LEARNED[chosen]
    assert len(names) == len(known.weights)
    return LearnedActivation(known.function, tuple((name, (1,)) for name in names))


def activation(
    chosen: str | Activation | LearnedActivation,
    *,
    gated: bool,
    weights: Sequence[torch.Tensor] = (),
) -> Activation:
    """The activation of a name in `config.json`, or the given function, with its weights if it has
    any. A gated one takes a packed `[tokens, 2 * size]`, gate first, and gives
    `activation(gate) * up`, `[tokens, size]`."""
    if isinstance(chosen, str) and chosen in _FORMS:
        return _FORMS[chosen][gated]
    with_weights = learned(chosen)
    if with_weights is not None:
        function = _with(with_weights.function, tuple(weights))
    elif isinstance(chosen, str):
        function = _PLAIN[chosen]
    else:
        assert not isinstance(chosen, LearnedActivation)
        function = chosen
    if not isinstance(chosen, str):
        function = _checked(function, chosen)
    return _gated(function) if gated else function


def fused_gate(chosen: str | Activation | LearnedActivation) -> str | None:
    """The name of the activation's gated form as an epilogue of `ops.linear_small`; None if no
    kernel has it."""
    return _EPILOGUES[_FORMS[chosen][1]] if isinstance(chosen, str) and chosen in _FORMS else None


def _with(function: Callable[..., torch.Tensor], weights: tuple[torch.Tensor, ...]) -> Activation:
    def activate(x: torch.Tensor) -> torch.Tensor:
        return function(x, *weights)

    return activate


def _gated(function: Activation) -> Activation:
    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return function(gate) * up

    return activate


def _checked(function: Activation, named: object) -> Activation:
    """`function` of a plugin: an exception of it, and a result whose shape or dtype is not that of
    its argument, becomes a `PluginError` that names it."""

    def activate(x: torch.Tensor) -> torch.Tensor:
        try:
            y = function(x)
        except Exception as error:
            raise PluginError(f"activation {named!r} raised {error!r}") from error
        if not isinstance(y, torch.Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            given, wanted = _like(y), _like(x)
            raise PluginError(f"activation {named!r} gave {given} for {wanted}")
        return y

    return activate


def _like(x: object) -> str:
    return f"{list(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__


def clamped_swiglu(alpha: float, limit: float) -> Activation:
    """`(up + 1) * gate * sigmoid(alpha * gate)` of a packed `[tokens, 2 * size]`, gate first
    (gpt-oss). `up` is clamped to `-limit .. limit`, and the gate to at most `limit`."""

    def activate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = gate.clamp(max=limit)
        up = up.clamp(min=-limit, max=limit)
        return (gate * torch.sigmoid(gate * alpha)).mul_(up.add_(1))

    return activate
