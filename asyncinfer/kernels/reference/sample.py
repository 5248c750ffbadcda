"""One token per row: temperature, top-k, top-p, min-p, and a draw that depends on its keys only."""

from __future__ import annotations

import torch

from asyncinfer.kernels.noise import hash_tokens, key_rows, mix_tokens

__all__ = ["sample"]

#: A score, `(logit - largest) / temperature`, that cannot win a draw.
_NEVER = -80.0


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

    The draw is a race (Gumbel-max): the token with the smallest exponential variable over its
    weight wins. A variable is a hash of (seed, position, token id), the same on every device and in
    every batch. Each filter is a threshold, so tokens that tie with its last are kept.

    Args:
        logits: `[n, vocab]`; computed on in float32, or in float64 if they are.
        seeds: int64 `[n]`: `mix_seeds` of each row's seed.
        positions: int32 or int64 `[n]`: the position of the drawn token in its sequence.
        temperature: float32 `[n]`; 0 takes the most likely token, the first of equals. None: 0 for
            all rows.
        top_k: int32 `[n]`, 0 keeps all.
        top_p: float32 `[n]`, 1 keeps all.
        min_p: float32 `[n]`: least share of the most likely token's weight.

    Returns:
        Tokens int64 `[n]`, always in `[0, vocab)`; each row's largest logit, float32 `[n]`, NaN if
        any logit is; the tokens' logprobs under `softmax(logits)`, float32 `[n]`. Where the largest
        logit is not finite, the token means nothing.
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
    hashed = hash_tokens(mix_tokens(like.shape[1], like.device), key_rows(seeds, positions))
    # -u, with u = (hash + 0.5) / 2^31. The largest u is 1 - 2^-24: no variable is infinite.
    return torch.log1p(hashed.to(like.dtype) * -(2.0**-31 * (1 - 2.0**-24)) - 2.0**-32)
