"""Angles of the rotary position embedding, with the scalings that checkpoints use.

Every formula follows transformers' `modeling_rope_utils`. Two are applied differently. "dynamic",
NTK-aware scaling whose base grows with the sequence beyond the trained context. There transformers
rotates a whole prompt by the prompt's length, so that a token's keys depend on what comes after it,
and no cache of keys can give that. Here a token at position `p` beyond the trained context is
rotated by the base for `p + 1` tokens, which is what transformers computes too when it is fed token
by token through its own cache. Within the trained context both are the same. A token's keys then
depend only on the tokens before it, however the prompt is cut into chunks.

"longrope" has one set of frequencies for sequences within the trained context and one for longer
ones. transformers looks at each sequence's length, and computes a sequence anew when it outgrows
the trained context. Here keys stay as they were rotated, and other sequences share them, so one set
serves all sequences of an engine: the second if the engine's `max_context` is beyond the trained
one. Within the trained context, or beyond it, both are the same then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from asyncinfer.kernels.rehearsal import device_of
from asyncinfer.layers.checks import (
    check_choice,
    check_flags,
    check_integers,
    check_number,
    refuse,
)

__all__ = ["Angles", "RopeConfig", "RopeType", "RotaryEmbedding"]

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]

#: Cosines and sines as `kernels.ops.rope` takes them: float32 `[tokens, 1, size]`, both halves
#: alike but the first half of the sines negated.
Angles: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rope settings of `config.json`, by its own names. Raises `ValueError` for bad fields."""

    rope_type: RopeType = "default"
    #: Dimensions of each head that are rotated, its first; None for all.
    size: int | None = None
    #: Whether dimensions that are rotated together are adjacent; else they are half of `size`
    #: apart.
    interleaved: bool = False
    theta: float = 10_000.0
    factor: float = 1.0
    #: The context the model was trained on, before scaling.
    original_context: int = 0
    #: "proportional": how many pairs are rotated; these are the fastest ones.
    turning: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    #: "longrope": what divides each frequency, in engines that keep to the trained context ...
    factors: tuple[float, ...] = ()
    #: ... and in those that go beyond it.
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_choice(self, "rope_type", get_args(RopeType))
        check_flags(self, "interleaved", "truncate")
        if self.size is not None:
            # The dynamic base's exponent is size / (size - 2).
            least = 4 if self.rope_type == "dynamic" else 2
            check_integers(self, "size", low=least, high=1 << 20)
            if self.size % 2:
                raise refuse(self, "size", "must be even")
        check_integers(self, "turning", low=0, high=1 << 20)
        for field in ("theta", "factor", "attention_factor", "beta_fast", "beta_slow"):
            check_number(self, field)
        if self.theta <= 1.0:
            raise refuse(self, "theta", "must be above 1")
        # Only these types do not use `original_context`.
        unscaled = self.rope_type in ("default", "linear", "proportional")
        check_integers(self, "original_context", low=0 if unscaled else 1, high=2**31 - 1)
        for field in ("low_freq_factor", "high_freq_factor"):
            check_number(self, field)
        if self.high_freq_factor < self.low_freq_factor:
            bound = f"must not be below low_freq_factor={self.low_freq_factor:g}"
            raise refuse(self, "high_freq_factor", bound)
        if self.beta_fast < self.beta_slow:
            raise refuse(self, "beta_fast", f"must not be below beta_slow={self.beta_slow:g}")
        for field in ("factors", "long_factors"):
            self._check_factors(field)

    def _check_factors(self, field: str) -> None:
        factors = getattr(self, field)
        if not isinstance(factors, tuple) or not all(
            type(factor) in (int, float) and 0 < factor < math.inf for factor in factors
        ):
            raise refuse(self, field, "must be a tuple of finite numbers above 0")
        if not factors and self.rope_type == "longrope":
            raise refuse(self, field, "must be given for rope_type 'longrope'")
        if factors and self.size is not None and len(factors) != self.size // 2:
            raise refuse(self, field, f"must be {self.size // 2} numbers, one for each two of size")


#: Bytes that a table may take; it saves a GPU eight launches a step.
_TABLE_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}


class RotaryEmbedding:
    """Positions to cosines and sines."""

    def __init__(
        self, config: RopeConfig, head_dim: int, device: torch.device, max_context: int = 0
    ) -> None:
        """`max_context` is the length of the longest sequence. If it is given and a table of its
        angles is small beside the model, angles are looked up instead of computed."""
        self._config = config
        self._max_context = max_context
        head_dim = config.size or head_dim
        self._half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self._frequencies = _frequencies(config, head_dim, max_context).to(device)
        #: float32 `[2, max_context, 1, size]`: looked up in one operation.
        self.table: torch.Tensor | None = None
        if 0 < 8 * max_context * head_dim <= _TABLE_BYTES.get(device_of(device).type, 0):
            self.table = torch.stack(self._compute(torch.arange(max_context, device=device)))

    @property
    def note(self) -> str | None:
        """Which of LongRoPE's two sets of factors is used; None for other rotations."""
        if self._config.rope_type != "longrope":
            return None
        long = _is_long(self._config, self._max_context)
        return (
            f"LongRoPE: the {'long' if long else 'short'} factors, for max_context="
            f"{self._max_context} is {'beyond' if long else 'within'} the trained context of "
            f"{self._config.original_context}"
        )

    def __call__(self, positions: torch.Tensor) -> Angles:
        """The angles of positions int64 `[tokens]`."""
        if self.table is None:
            return self._compute(positions)
        cos, sin = self.table.index_select(1, positions)
        return cos, sin

    def _compute(self, positions: torch.Tensor) -> Angles:
        frequencies = self._frequencies
        if self._config.rope_type == "dynamic":
            frequencies = self._dynamic(positions)
        angles = positions[:, None, None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._config.attention_factor != 1.0:
            cos.mul_(self._config.attention_factor)
            sin.mul_(self._config.attention_factor)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _dynamic(self, positions: torch.Tensor) -> torch.Tensor:
        """float32 `[tokens, 1, head_dim / 2]`: each position's own frequencies."""
        config = self._config
        head_dim = 2 * self._half.shape[0]
        length = (positions + 1).clamp(min=config.original_context).double()
        stretch = config.factor * length / config.original_context - (config.factor - 1)
        base = config.theta * stretch ** (head_dim / (head_dim - 2))
        return 1.0 / base.float()[:, None, None] ** self._half


def _frequencies(config: RopeConfig, head_dim: int, max_context: int) -> torch.Tensor:
    """float32 `[head_dim / 2]`, radians per position."""
    plain = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if config.rope_type == "linear":
        return plain / config.factor
    if config.rope_type == "proportional":
        plain[config.turning :] = 0.0
        return plain / config.factor
    if config.rope_type == "llama3":
        return _llama3(config, plain)
    if config.rope_type == "yarn":
        return _yarn(config, plain, head_dim)
    if config.rope_type == "longrope":
        factors = config.long_factors if _is_long(config, max_context) else config.factors
        return plain / torch.tensor(factors, dtype=torch.float32)
    return plain


def _is_long(config: RopeConfig, max_context: int) -> bool:
    """Whether LongRoPE's second set of factors is taken."""
    return max_context > config.original_context


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    turns = config.original_context * plain / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    # Without a span, as in Llama 4, nothing is blended.
    kept = ((turns - config.low_freq_factor) / (span or 1e-30)).clamp(0, 1)
    return (1 - kept) * plain / config.factor + kept * plain


def _yarn(config: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al., 2023): dimensions that turn often are kept, those that turn seldom are
    divided by the factor, with a linear ramp between."""

    def dimension(turns: float) -> float:
        ratio = config.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return ramp * plain / config.factor + (1 - ramp) * plain
