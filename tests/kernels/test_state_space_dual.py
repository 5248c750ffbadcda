"""Mamba-2's state-space dual in chunks: rows of any lengths, cut and marked anywhere, against the
recurrence token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.reference.state_space_dual import recurrent_state_space
from asyncinfer.kernels.row_spans import CHUNK, RowSpans

GROUPS, HEADS, STATE, HEAD = 2, 6, 5, 3


class Rows:
    """Random rows of these lengths, and what the recurrence gives for them token by token."""

    def __init__(self, *lengths: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        total = sum(lengths)
        self.x = torch.randn(total, HEADS, HEAD)
        self.b = torch.randn(total, GROUPS, STATE)
        self.c = torch.randn(total, GROUPS, STATE)
        self.decay = -torch.rand(total, HEADS)
        self.before = torch.randn(len(lengths), HEADS, STATE, HEAD)
        outputs, states = [], []
        state = self.before.clone()
        for token, row in enumerate(np.repeat(range(len(lengths)), lengths)):
            one = slice(token, token + 1)
            b, c = (part[one].repeat_interleave(HEADS // GROUPS, 1) for part in (self.b, self.c))
            parts = (part[None] for part in (self.x[one], b, c, self.decay[one]))
            y, state[row : row + 1] = recurrent_state_space(*parts, state[row : row + 1])
            outputs.append(y[0, 0])
            states.append(state[row].clone())
        self.right, self.states = torch.stack(outputs), torch.stack(states)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.b, self.c, self.decay


def test_the_recurrence_is_its_definition() -> None:
    rows = Rows(1)
    b, c = (part[0].repeat_interleave(HEADS // GROUPS, 0) for part in (rows.b, rows.c))
    for head in range(HEADS):
        state = rows.before[0, head] * rows.decay[0, head].exp()
        state = state + torch.outer(b[head], rows.x[0, head])
        torch.testing.assert_close(rows.states[0, head], state)
        torch.testing.assert_close(rows.right[0, head], state.t() @ c[head])


@pytest.mark.parametrize(
    ("lengths", "marks"),
    [
        ((1, 1, 1), [0, 1, 2]),
        ((1, 9, 1, 3), [0, 9, 10, 13]),
        ((2 * CHUNK + 7, 3, CHUNK, CHUNK + 1), [31, 63, 64, 70, 134, 137, 201, 266]),
        # Each token's state, as for a draft.
        ((4, 2), [0, 1, 2, 3, 4, 5]),
        # Not every row's last one.
        ((7, 6), [2, 9]),
    ],
)
def test_chunks_are_the_recurrence(lengths: tuple[int, ...], marks: list[int]) -> None:
    rows = Rows(*lengths, seed=len(marks))
    held = rows.before.clone()
    y, states = ops.state_space_dual(*rows.inputs, rows.before, RowSpans(lengths, marks))
    assert torch.equal(held, rows.before)
    torch.testing.assert_close(y, rows.right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, rows.states[marks], rtol=1e-4, atol=1e-5)


def test_any_cuts_give_the_whole() -> None:
    whole = Rows(40)
    state, done, parts = whole.before, 0, []
    for count in (1, 13, 2, 1, 23):
        cut = slice(done, done + count)
        y, state = ops.state_space_dual(
            *(part[cut] for part in whole.inputs),
            state,
            RowSpans([count], [count - 1]),
        )
        parts.append(y)
        done += count
    torch.testing.assert_close(torch.cat(parts), whole.right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[0], whole.states[-1], rtol=1e-4, atol=1e-5)


def test_a_decay_to_nothing_leaves_no_nan() -> None:
    rows = Rows(CHUNK)
    rows.decay[:] = -1000.0
    y, states = ops.state_space_dual(*rows.inputs, rows.before, RowSpans([CHUNK], [3]))
    # All that is left is the token's own.
    torch.testing.assert_close(states[0, 0], torch.outer(rows.b[3, 0], rows.x[3, 0]))
    assert y.isfinite().all()


def test_what_a_row_is_in_bfloat16() -> None:
    rows = Rows(9, 4)
    b, c = rows.b.bfloat16(), rows.c.bfloat16()
    y, states = ops.state_space_dual(rows.x, b, c, rows.decay, rows.before, RowSpans([9, 4], [12]))
    assert y.dtype is states.dtype is torch.float32
    torch.testing.assert_close(y, rows.right, rtol=0.1, atol=0.1)


def test_shapes_that_do_not_fit() -> None:
    rows = Rows(3, 2)
    arguments = [*rows.inputs, rows.before, RowSpans([3, 2], [4])]
    wrong = {
        0: rows.x.bfloat16(),
        1: rows.b[:, :1],
        3: rows.decay.double(),
        4: rows.before.mT,
        5: RowSpans([3, 3], [4]),
    }
    for place, value in wrong.items():
        given = [*arguments]
        given[place] = value
        with pytest.raises(ValueError, match="state_space_dual"):
            ops.state_space_dual(*given)


@pytest.mark.parametrize("strong", [-30.0, -1e4])
def test_tokens_that_forget_nearly_all_cost_no_precision(strong: float) -> None:
    """Sums of decays are then large, and their differences small."""
    torch.manual_seed(1)
    tokens = 256
    x, b, c = torch.randn(tokens, 4, 16), torch.randn(tokens, 4, 8), torch.randn(tokens, 4, 8)
    decay = torch.full((tokens, 4), -0.01)
    decay[::3] = strong
    before = torch.zeros(1, 4, 8, 16)
    found, _ = ops.state_space_dual(x, b, c, decay, before, RowSpans([tokens], [tokens - 1]))
    parts = (part.double()[:, None] for part in (x, b, c, decay))
    right = recurrent_state_space(*parts, before.double())[0][:, 0]
    torch.testing.assert_close(found.double(), right, rtol=0, atol=2e-6 * right.abs().max().item())
