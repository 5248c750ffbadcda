"""The gated delta rule in chunks: rows of any lengths, cut and marked anywhere, against the rule
token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncinfer.kernels import ops
from asyncinfer.kernels.reference.gated_delta_rule import recurrent_delta_rule
from asyncinfer.kernels.row_spans import CHUNK, RowSpans

KEY_HEADS, HEADS, KEY, VALUE = 2, 6, 5, 3


class Rows:
    """Random rows of these lengths, and what the rule gives for them token by token."""

    def __init__(self, *lengths: int, seed: int = 0, channels: bool = False) -> None:
        """`channels`: each row of a state decays at a speed of its own."""
        torch.manual_seed(seed)
        total = sum(lengths)
        self.lengths = lengths
        self.q = torch.randn(total, KEY_HEADS, KEY)
        self.k = torch.nn.functional.normalize(torch.randn(total, KEY_HEADS, KEY), dim=-1)
        self.v = torch.randn(total, HEADS, VALUE)
        self.decay = -torch.rand(total, HEADS, *[KEY] * channels)
        each = self.decay if channels else self.decay[..., None]
        self.beta = torch.rand(total, HEADS)
        self.before = torch.randn(len(lengths), HEADS, KEY, VALUE)
        outputs, states = [], []
        state = self.before.clone()
        for token, row in enumerate(np.repeat(range(len(lengths)), lengths)):
            one = slice(token, token + 1)
            q, k = (part[one].repeat_interleave(HEADS // KEY_HEADS, 1) for part in (self.q, self.k))
            parts = (part[None] for part in (q, k, self.v[one], each[one], self.beta[one]))
            y, state[row : row + 1] = recurrent_delta_rule(*parts, state[row : row + 1])
            outputs.append(y[0, 0])
            states.append(state[row].clone())
        self.right, self.states = torch.stack(outputs), torch.stack(states)

    def run(self, marks: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Compare; returns the outputs."""
        q, k, v = (part.to(dtype) for part in (self.q, self.k, self.v))
        held = self.before.clone()
        y, states = ops.gated_delta_rule(
            q, k, v, self.decay, self.beta, self.before, RowSpans(self.lengths, marks)
        )
        assert torch.equal(held, self.before)
        if dtype is torch.float32:
            torch.testing.assert_close(y, self.right, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(states, self.states[marks], rtol=1e-4, atol=1e-5)
        return y


def test_the_rule_is_its_definition() -> None:
    rows = Rows(1)
    q, k = (part[0].repeat_interleave(HEADS // KEY_HEADS, 0) for part in (rows.q, rows.k))
    for head in range(HEADS):
        state = rows.before[0, head] * rows.decay[0, head].exp()
        change = rows.beta[0, head] * (rows.v[0, head] - state.t() @ k[head])
        state = state + torch.outer(k[head], change)
        torch.testing.assert_close(rows.states[0, head], state)
        torch.testing.assert_close(rows.right[0, head], state.t() @ q[head])


@pytest.mark.parametrize(
    ("lengths", "marks"),
    [
        ((1, 1, 1), [0, 1, 2]),
        ((5,), [4]),
        ((1, 9, 1, 3), [0, 9, 10, 13]),
        ((2 * CHUNK + 7, 3, CHUNK, CHUNK + 1), [31, 63, 64, 70, 134, 137, 201, 266]),
        # Each token's state, as for a draft.
        ((4, 2), [0, 1, 2, 3, 4, 5]),
        # Not every row's last one.
        ((7, 6), [2, 9]),
    ],
)
def test_chunks_are_the_rule(lengths: tuple[int, ...], marks: list[int]) -> None:
    Rows(*lengths, seed=len(marks)).run(marks)
    Rows(*lengths, seed=len(marks), channels=True).run(marks)


def test_a_speed_for_each_channel_may_be_the_same() -> None:
    rows = Rows(70, 1)
    one = rows.run([69, 70])
    rows.decay = rows.decay[..., None].expand(-1, -1, KEY).contiguous()
    torch.testing.assert_close(rows.run([69, 70]), one)


def test_a_channel_that_forgets_at_once() -> None:
    """What is left of it is nothing, and no number overflows."""
    rows = Rows(CHUNK, channels=True)
    rows.decay[:, :, 0] = -1000.0
    y, states = ops.gated_delta_rule(
        rows.q, rows.k, rows.v, rows.decay, rows.beta, rows.before, RowSpans([CHUNK], [9])
    )
    assert y.isfinite().all()
    assert states.isfinite().all()


def test_any_cuts_give_the_whole() -> None:
    whole = Rows(40)
    state, done, parts = whole.before, 0, []
    for count in (1, 13, 2, 1, 23):
        cut = slice(done, done + count)
        y, state = ops.gated_delta_rule(
            *(part[cut] for part in (whole.q, whole.k, whole.v, whole.decay, whole.beta)),
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
    y, states = ops.gated_delta_rule(
        rows.q, rows.k, rows.v, rows.decay, rows.beta, rows.before, RowSpans([CHUNK], [3])
    )
    # All that is left is the token's own.
    own = rows.beta[3, 0] * torch.outer(rows.k[3, 0], rows.v[3, 0])
    torch.testing.assert_close(states[0, 0], own)
    assert y.isfinite().all()


def test_bfloat16_has_float32_states() -> None:
    rows = Rows(9, 4)
    y = rows.run([12], torch.bfloat16)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), rows.right, rtol=0.1, atol=0.1)


def test_shapes_that_do_not_fit() -> None:
    rows = Rows(3, 2)
    spans = RowSpans([3, 2], [4])
    arguments = [rows.q, rows.k, rows.v, rows.decay, rows.beta, rows.before, spans]
    wrong = {
        1: rows.k[:, :1],
        3: rows.decay.double(),
        5: rows.before.mT,
        6: RowSpans([3, 3], [4]),
    }
    for place, value in wrong.items():
        given = [*arguments]
        given[place] = value
        with pytest.raises(ValueError, match="gated_delta_rule"):
            ops.gated_delta_rule(*given)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("strong", [-30.0, -1e4])
def test_tokens_that_forget_nearly_all_cost_no_precision(strong: float, channels: bool) -> None:
    """Sums of decays are then large, and their differences small."""
    torch.manual_seed(1)
    tokens, shape = 256, (4, 16)
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, *shape), dim=-1) for _ in range(2))
    v, beta = torch.randn(tokens, *shape), torch.rand(tokens, 4)
    decay = torch.full((tokens, *shape[: 1 + channels]), -0.01)
    decay[::3] = strong
    before = torch.zeros(1, 4, 16, 16)
    found, _ = ops.gated_delta_rule(q, k, v, decay, beta, before, RowSpans([tokens], [tokens - 1]))
    each = decay if channels else decay[..., None]
    parts = (part.double()[:, None] for part in (q, k, v, each, beta))
    right = recurrent_delta_rule(*parts, before.double())[0][:, 0]
    torch.testing.assert_close(found.double(), right, rtol=0, atol=2e-6 * right.abs().max().item())
