"""The state-space dual of Mamba-2 over rows of different lengths, with its state: token by token,
and in chunks."""

from __future__ import annotations

import torch

from asyncinfer.kernels.reference.chunks import PreparedChunks, compute_in_chunks
from asyncinfer.kernels.row_spans import RowSpans

__all__ = ["recurrent_state_space", "state_space_dual"]


def recurrent_state_space(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's tokens one after another, as the recurrence is defined (Dao and Gu,
    Transformers are SSMs, 2024). For a token with `x`, `b`, `c` and `decay` the state `S` becomes
    `exp(decay) S + b x^T`, and its output is `S^T c`.

    All are float32; `x` `[tokens, sequences, heads, head_dim]`, `b` and `c` `[tokens, sequences,
    heads, state_dim]`, `decay` `[tokens, sequences, heads]`, `state` `[sequences, heads, state_dim,
    head_dim]`. Returns the outputs, in the shape of `x`, and the last state.
    """
    outputs = torch.empty_like(x)
    for token in range(len(x)):
        state = state * decay[token].exp()[..., None, None]
        state = state.addcmul_(b[token][..., None], x[token][..., None, :])
        outputs[token] = (c[token][..., None, :] @ state)[..., 0, :]
    return outputs, state


def state_space_dual(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    decay: torch.Tensor,
    before: torch.Tensor,
    spans: RowSpans,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of `recurrent_state_space`, computed in float32 and in chunks where a row has
    several tokens.

    Args:
        x: float32 `[tokens, heads, head_dim]`, row after row, each times its step.
        b, c: `[tokens, groups, state_dim]`. Each of the groups serves as many adjacent heads.
        decay: float32 `[tokens, heads]`, 0 at most.
        before: float32 `[rows, heads, state_dim, head_dim]`: the state before each row.
        spans: the rows, and the tokens after which the state is wanted.

    Returns the outputs `[tokens, heads, head_dim]` and the states `[marks, heads, state_dim,
    head_dim]`, both in float32.
    """
    shared = x.shape[1] // b.shape[1]
    b, c = b.float(), c.float()
    if spans.single:
        b, c = (part.repeat_interleave(shared, dim=1) for part in (b, c))
        y, states = recurrent_state_space(x[None], b[None], c[None], decay[None], before)
        return y[0], spans.at_marks(states)
    outputs = torch.empty_like(x)
    inputs = (b, c, x, decay)
    return outputs, compute_in_chunks(_prepared, inputs, 2, outputs, before, spans)


def _prepared(
    b: torch.Tensor, c: torch.Tensor, x: torch.Tensor, decay: torch.Tensor
) -> PreparedChunks:
    """Of chunks: `b`, `c` and `x` are `[heads, chunks, tokens, dim]`, `decay` without the last.

    The tokens' part in each other's outputs is attention with a decay (section 6 of the paper).
    """
    b, c = (part.repeat_interleave(len(x) // len(b), dim=0) for part in (b, c))
    # In float64: a difference of two sums is small where both are large.
    total = decay.double().cumsum(-1)
    # The share of token j's change that is left at token i.
    left = (total[..., :, None] - total[..., None, :]).float().tril().exp().tril()
    last = total[..., -1:]
    return PreparedChunks(
        change=x,
        read=c * total.float().exp()[..., None],
        kept=(b * (last - total).float().exp()[..., None]).mT,
        lasting=last.float().exp()[..., None],
        seen=(c @ b.mT) * left,
    )
