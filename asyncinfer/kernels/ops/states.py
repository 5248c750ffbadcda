"""Operators of layers that keep a state."""

from __future__ import annotations

import torch

from asyncinfer.kernels import reference
from asyncinfer.kernels.dispatch import check, dispatched
from asyncinfer.kernels.row_spans import RowSpans

__all__ = ["causal_conv", "gated_delta_rule", "state_space_dual"]


def _check_causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor,
    spans: RowSpans,
) -> None:
    right = (
        (x.ndim, weight.ndim, before.ndim) == (2, 2, 3)
        and weight.shape[1] == x.shape[1]
        and (bias is None or bias.shape == x.shape[1:])
        and before.shape[1:] == (weight.shape[0] - 1, x.shape[1])
        and before.dtype is x.dtype
        and (x.shape[0], before.shape[0]) == (spans.tokens, spans.rows)
    )
    check(right, "causal_conv", x, weight, bias, before)


causal_conv = dispatched(reference.causal_conv, _check_causal_conv)


def _check_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    before: torch.Tensor,
    spans: RowSpans,
) -> None:
    right = (
        (q.ndim, v.ndim, before.ndim) == (3, 3, 4)
        and q.shape == k.shape
        and q.shape[0] == v.shape[0]
        and v.shape[1] % q.shape[1] == 0
        and beta.shape == v.shape[:2]
        and decay.shape in (beta.shape, (*beta.shape, q.shape[2]))
        and before.shape[1:] == (v.shape[1], q.shape[2], v.shape[2])
        and decay.dtype is beta.dtype is before.dtype is torch.float32
        and (v.shape[0], before.shape[0]) == (spans.tokens, spans.rows)
    )
    check(right, "gated_delta_rule", q, k, v, decay, beta, before)


gated_delta_rule = dispatched(reference.gated_delta_rule, _check_gated_delta_rule)


def _check_state_space_dual(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    decay: torch.Tensor,
    before: torch.Tensor,
    spans: RowSpans,
) -> None:
    right = (
        (x.ndim, b.ndim, before.ndim) == (3, 3, 4)
        and b.shape == c.shape
        and b.shape[0] == x.shape[0]
        and x.shape[1] % b.shape[1] == 0
        and decay.shape == x.shape[:2]
        and before.shape[1:] == (x.shape[1], b.shape[2], x.shape[2])
        and x.dtype is decay.dtype is before.dtype is torch.float32
        and (x.shape[0], before.shape[0]) == (spans.tokens, spans.rows)
    )
    check(right, "state_space_dual", x, b, c, decay, before)


state_space_dual = dispatched(reference.state_space_dual, _check_state_space_dual)
