"""One token per row: temperature, top-k, top-p, min-p, and a draw that hangs on its keys only."""

from __future__ import annotations

import torch

__all__ = ["sample"]

#: A score (a logit less the largest, over temperature) that cannot win a draw.
_NEVER = -80.0
_M32 = 2**32 - 1


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    *,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw from `softmax(logits / temperature)`, truncated by top-k, then top-p, then min-p.

    The draw is a race (Gumbel-max): of exponential variables over weights the smallest wins. A
    variable is a hash of (seed, position, token id), the same on every device and in every batch.
    Each filter is a threshold; what ties with the last that it keeps is kept.

    Args:
        logits: `[n, vocab]`; computed on in float32, or in float64 if they are.
        seeds: int64 `[n]`: each seed put through splitmix64 once.
        positions: int32 or int64 `[n]`: where in its sequence the drawn token will stand.
        temperature: float32 `[n]`; 0 takes the most likely token, of equals the first. None is 0
            for all.
        top_k: int32 `[n]`, 0 keeps all.
        top_p: float32 `[n]`, 1 keeps all.
        min_p: float32 `[n]`: least share of the most likely token's weight.

    Returns:
        Tokens int64 `[n]`, always in `[0, vocab)`; each row's largest logit, float32 `[n]`, NaN if
        any is: where it is not finite the token means nothing; the tokens' logprobs under
        `softmax(logits)`, float32 `[n]`.
    """
    values = logits if logits.dtype is torch.float64 else logits.float()
    peak, tokens = values.max(dim=-1)
    if temperature is not None:
        assert seeds is not None
        assert positions is not None
        scores = (values - peak[:, None]) / temperature[:, None]
        kept = _kept(scores, top_k, top_p, min_p)
        weights = scores.clamp(min=_NEVER).exp() * kept
        drawn = (weights / _race(seeds, positions, values)).argmin(dim=-1)
        tokens = torch.where(temperature > 0, drawn, tokens)
    logprobs = values.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
    return tokens, peak.float(), logprobs.float()


def _kept(
    scores: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor:
    """Bool `[n, vocab]`. `scores` are 0 at best."""
    vocab = scores.shape[1]
    ranked = scores.sort(dim=-1, descending=True).values
    kept = torch.ones_like(scores, dtype=torch.bool)
    if top_k is not None:
        last = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long() - 1
        cut = ranked.gather(1, last[:, None])
        kept &= scores >= cut
        ranked = ranked.masked_fill(ranked < cut, -torch.inf)
    if top_p is not None:
        mass = ranked.double().exp().cumsum(dim=-1)
        before = (mass < mass[:, -1:] * top_p[:, None]).sum(dim=-1, keepdim=True)
        cut = ranked.gather(1, before.clamp(max=vocab - 1))
        kept &= (scores >= cut) | (top_p[:, None] >= 1)
    if min_p is not None:
        kept &= scores >= min_p.log()[:, None]
    return kept


def _race(seeds: torch.Tensor, positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`[n, vocab]`: minus an exponential variable of rate 1 for each row and token."""
    vocab = like.shape[1]
    keys = _splitmix(seeds + (positions.long() + 1) * _signed(0x9E3779B97F4A7C15))
    low, high = keys & _M32, _shifted(keys, 32) | 1
    tokens = _lowbias(torch.arange(vocab, device=like.device))
    x = (tokens ^ low[:, None]) * high[:, None] & _M32
    x = (x ^ (x >> 16)) * 0x846CA68B & _M32
    # -u of u = (31 bits + 0.5) / 2^31. The largest u is 1 - 2^-24: no variable is infinite.
    bits = (x & (2**31 - 1)).to(like.dtype)
    return torch.log1p(bits * -(2.0**-31 * (1 - 2.0**-24)) - 2.0**-32)


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele et al., 2014)."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _lowbias(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 (Wellons, 2018) of `x` in `[0, 2^32)`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & _M32
    x = (x ^ (x >> 15)) * 0x846CA68B & _M32
    return x ^ (x >> 16)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right; int64's own drags the sign along."""
    mask: int = 2 ** (64 - bits) - 1
    return (x >> bits) & mask


def _signed(word: int) -> int:
    """64 bits as torch takes them: its integers are signed and wrap."""
    return word - 2**64 if word >= 2**63 else word
