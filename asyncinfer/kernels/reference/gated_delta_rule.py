"""The gated delta rule over rows of different lengths, with its state: token by token, and in
chunks."""

from __future__ import annotations

import torch

from asyncinfer.kernels.reference.chunks import PreparedChunks, compute_in_chunks
from asyncinfer.kernels.row_spans import RowSpans

__all__ = ["gated_delta_rule", "recurrent_delta_rule"]


def recurrent_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's tokens one after another, as the rule is defined (Yang et al., Gated Delta
    Networks, 2024). For a token with `q`, `k`, `v`, `decay` and `beta` the state `S` becomes
    `exp(decay) S`, then `S + beta k (v - S^T k)^T`, and its output is `S^T q`.

    All are float32; `q` and `k` `[tokens, sequences, heads, key_dim]`, `v` `[tokens, sequences,
    heads, value_dim]`, `decay` `[tokens, sequences, heads, key_dim or 1]`, `beta` `[tokens,
    sequences, heads]`, `state` `[sequences, heads, key_dim, value_dim]`. Returns the outputs, in
    the shape of `v`, and the last state.
    """
    outputs = torch.empty_like(v)
    for token in range(len(v)):
        state = state * decay[token].exp()[..., None]
        known = (k[token][..., None, :] @ state)[..., 0, :]
        change = (v[token] - known) * beta[token][..., None]
        state = state.addcmul_(k[token][..., None], change[..., None, :])
        outputs[token] = (q[token][..., None, :] @ state)[..., 0, :]
    return outputs, state


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    before: torch.Tensor,
    spans: RowSpans,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of `recurrent_delta_rule`, computed in float32 and in chunks where a row has
    several tokens.

    Args:
        q, k: `[tokens, key_heads, key_dim]`, row after row. Each of these heads serves as many
            adjacent ones of `v`.
        v: `[tokens, heads, value_dim]`.
        decay: float32, 0 at most: `[tokens, heads]`, or with one for each row of a state `[tokens,
            heads, key_dim]` (Kimi Delta Attention, 2025).
        beta: float32 `[tokens, heads]`, from 0 to 1.
        before: float32 `[rows, heads, key_dim, value_dim]`: the state before each row.
        spans: the rows, and the tokens after which the state is wanted.

    Returns the outputs `[tokens, heads, value_dim]` in v's dtype, and the states `[marks, heads,
    key_dim, value_dim]` in float32.
    """
    shared = v.shape[1] // q.shape[1]
    dtype, q, k, v = v.dtype, q.float(), k.float(), v.float()
    prepare = _prepared if decay.ndim == 2 else _prepared_by_channel
    if spans.single:
        each = decay if decay.ndim == 3 else decay[..., None]
        q, k = (part.repeat_interleave(shared, dim=1) for part in (q, k))
        y, states = recurrent_delta_rule(q[None], k[None], v[None], each[None], beta[None], before)
        return y[0].to(dtype), spans.at_marks(states)
    outputs = torch.empty_like(v)
    inputs = (q, k, v, decay, beta)
    after = compute_in_chunks(prepare, inputs, 2, outputs, before, spans)
    return outputs.to(dtype), after


def _prepared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> PreparedChunks:
    """Chunks whose `decay` is `[heads, chunks, tokens]`. `q`, `k` and `v` are `[heads, chunks,
    tokens, dim]`."""
    q, k = (part.repeat_interleave(len(v) // len(k), dim=0) for part in (q, k))
    # In float64: a difference of two sums is small where both are large.
    total = decay.double().cumsum(-1)
    # The share of token j's change that is left at token i.
    left = (total[..., :, None] - total[..., None, :]).float().tril().exp().tril()
    last = total[..., -1:]
    share = total.float().exp()[..., None]
    return _solved(
        overlap=(k @ k.mT) * left,
        seen=(q @ k.mT) * left,
        arrived=k * share,
        read=q * share,
        v=v,
        beta=beta,
        kept=k * (last - total).float().exp()[..., None],
        lasting=last.float().exp()[..., None],
    )


def _prepared_by_channel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> PreparedChunks:
    """`_prepared` with `decay` `[heads, chunks, tokens, key_dim]`. The decay differs in each
    dimension of a key, and so is part of each product of two keys."""
    q, k = (part.repeat_interleave(len(v) // len(k), dim=0) for part in (q, k))
    total = decay.double().cumsum(-2)
    future = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    left = (total[..., :, None, :] - total[..., None, :, :]).float()
    left = left.masked_fill_(future[..., None], float("-inf")).exp_()
    # `[heads, chunks, tokens, tokens, 2]`: each token's key and query with each key before it.
    products = left.mul_(k[..., None, :, :]) @ torch.stack((k, q), dim=-1)
    overlap, seen = products.unbind(-1)
    last = total[..., -1:, :]
    share = total.float().exp()
    return _solved(
        overlap=overlap,
        seen=seen,
        arrived=k * share,
        read=q * share,
        v=v,
        beta=beta,
        kept=k * (last - total).float().exp(),
        lasting=last.float().exp().mT,
    )


def _solved(
    *,
    overlap: torch.Tensor,
    seen: torch.Tensor,
    arrived: torch.Tensor,
    read: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    kept: torch.Tensor,
    lasting: torch.Tensor,
) -> PreparedChunks:
    """What a token adds to the state, times its key, depends on what the tokens before it add: a
    triangular system, solved at once for all of them, and for any state (section 3.3 of the paper).
    """
    wanted = torch.cat((arrived, v), dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(
        overlap * beta[..., None], wanted, upper=False, unitriangular=True
    )
    corrected, change = solved.split([arrived.shape[-1], v.shape[-1]], dim=-1)
    return PreparedChunks(change, torch.cat((corrected, read), dim=-2), kept.mT, lasting, seen)
