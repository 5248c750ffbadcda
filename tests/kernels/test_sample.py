"""The draw against its twin, the sampling room's own chain and the closed form; as machine code."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from kernels.compiled import recorded
from kernels.targets import Target
from scipy import stats

from asyncinfer.kernels import ops, reference, triton
from asyncinfer.kernels.noise import draw_race, mix_tokens, row_keys, seed_bits
from asyncinfer.kernels.triton import sample_cut
from asyncinfer.sampling.filters import keep_likely

#: The package has the function under the module's name.
sample_module = import_module("asyncinfer.kernels.triton.sample")
#: Size of the vocabulary, and the logits' standard deviation; 0 is integers, which tie.
LOGITS = [
    *((vocab, 3.0) for vocab in (1, 2, 17, 1000, 4096 + 3)),
    *((vocab, 0.0) for vocab in (17, 1000, 4096 + 3)),
    (1000, 300.0),
]
#: Temperature, top-k, top-p, min-p: row `r` of a test asks for `ASKED[r % len(ASKED)]`.
ASKED = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.3, 7, 1.0, 0.0),
    (1.0, 10_000, 1.0, 0.0),
    (0.8, 0, 0.9, 0.0),
    (2.0, 0, 0.01, 0.0),
    (1.0, 0, 0.999, 0.0),
    (1.5, 0, 1.0, 0.05),
    (1.0, 0, 1.0, 1.0),
    (0.9, 40, 0.95, 0.02),
    (3.0, 5, 0.5, 0.3),
    (1e-3, 3, 0.8, 0.1),
    (0.0, 5, 0.5, 0.5),
]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """So many tokens at most are copied: small vocabularies take the way of large ones."""
    monkeypatch.setattr(sample_cut, "_CANDIDATES", 512)
    return 512


class Options:
    """Seeds, positions and what the rows ask for."""

    def __init__(self, target: Target, rows: int) -> None:
        numbers = np.random.default_rng(rows)
        self.seeds = numbers.integers(0, 2**64, rows, np.uint64)
        self.positions = numbers.integers(0, 10_000, rows)
        asked = np.array([ASKED[row % len(ASKED)] for row in range(rows)]).T

        def there(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values).to(target.device, dtype)

        mixed = np.array([seed_bits(int(seed)) for seed in self.seeds])
        self.keys = (
            there(mixed.view(np.int64), torch.int64),
            there(self.positions, torch.int32),
            there(asked[0], torch.float32),
        )
        self.filters = {
            "top_k": there(asked[1], torch.int32),
            "top_p": there(asked[2], torch.float32),
            "min_p": there(asked[3], torch.float32),
        }


def chain(logits: torch.Tensor, options: Options) -> torch.Tensor:
    """What the sampling room's own operators draw."""
    values, temperature = logits.float().cpu(), options.keys[2].cpu()
    peak, best = values.max(dim=-1)
    scores = ((values - peak[:, None]) / temperature[:, None]).clamp_(min=-80)
    weights = scores.exp()
    top_k, top_p, min_p = (option.cpu().double().numpy() for option in options.filters.values())
    # What a request asks for is float64 there.
    top_p = np.array([ASKED[row % len(ASKED)][2] for row in range(len(top_p))])
    min_p = np.array([ASKED[row % len(ASKED)][3] for row in range(len(min_p))])
    keep_likely(scores, weights, top_k.astype(np.int64), top_p, min_p)
    keys = torch.from_numpy(row_keys(options.seeds, options.positions))
    drawn = draw_race(weights, mix_tokens(logits.shape[1]), keys)
    return torch.where(temperature > 0, drawn, best)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("vocab", "spread"), LOGITS)
def test_every_path_draws_the_same(target: Target, vocab: int, spread: float) -> None:
    rows = len(ASKED)
    logits = target.randn(rows, vocab) * spread
    if not spread:
        logits = torch.randint(-3, 3, (rows, vocab), device=target.device).to(target.dtype)
    options = Options(target, rows)
    before = logits.clone()
    for module in (triton, reference, ops):
        tokens, peak, logprobs = module.sample(logits, *options.keys, **options.filters)
        assert torch.equal(tokens.cpu(), chain(logits, options))
        assert torch.equal(peak, logits.float().amax(-1))
        exact = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before)


#: Spread of the logits (0: integers, which tie), top-k, top-p; and whether the tokens in the
#: interval that holds the cut are few enough to be copied.
CUTS = [
    (3.0, 40, 1.0, True),
    (3.0, 40, 0.9, True),
    (0.3, 0, 0.7, True),  # the later tallies narrow it
    (0.3, 2000, 1.0, True),
    (0.3, 2000, 0.5, False),  # top-p's share is of all that top-k keeps
    (0.0, 1500, 1.0, False),
    (0.0, 0, 0.6, False),
    (3.0, 0, 1.0, None),
]


def test_cuts_among_copies_and_in_rows(
    target: Target, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = 4099
    states: list[torch.Tensor] = []

    def kept(*arguments: Any) -> torch.Tensor:
        state = cut_state(*arguments)
        assert state is not None
        states.append(state)
        return state

    cut_state = sample_cut.cut_state
    monkeypatch.setattr(sample_module, "cut_state", kept)
    spreads, top_k, top_p, copied = zip(*CUTS, strict=True)
    rows = len(CUTS)
    # The same on each device: how many tokens lie about a cut depends on it.
    noise = torch.randn(rows, vocab).to(target.device, target.dtype)
    spread = torch.tensor(spreads, device=target.device)[:, None]
    logits = torch.where(spread > 0, noise.float() * spread, (noise > 0).float()).to(target.dtype)
    options = Options(target, rows)
    keys = (*options.keys[:2], torch.full_like(options.keys[2], 0.9))
    filters = {
        "top_k": torch.tensor(top_k, dtype=torch.int32, device=target.device),
        "top_p": torch.tensor(top_p, device=target.device),
    }
    for _ in range(3):
        drawn = triton.sample(logits, *keys, **filters)
        assert torch.equal(drawn[0], reference.sample(logits, *keys, **filters)[0])
        keys[1].add_(1)
    inside = states[-1][:, 5].tolist()
    for found, expected in zip(inside, copied, strict=True):
        assert expected is None or (found <= few) == expected


@pytest.mark.parametrize("asked", ["top_k", "top_p", "min_p", None])
def test_a_filter_that_is_not_given_keeps_all(target: Target, asked: str | None) -> None:
    logits = target.randn(9, 1000) * 2
    options = Options(target, 9)
    given = {asked: options.filters[asked]} if asked is not None else {}
    drawn = triton.sample(logits, *options.keys, **given)
    for one, other in zip(drawn, reference.sample(logits, *options.keys, **given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_without_a_temperature_all_rows_are_greedy(target: Target) -> None:
    logits = target.randn(5, 4099)
    for module in (triton, ops):
        tokens, peak, _ = module.sample(logits)
        # Of equals the first.
        assert tokens.tolist() == logits.float().cpu().numpy().argmax(-1).tolist()
        assert torch.equal(peak, logits.float().amax(-1))


def test_rows_that_lie_apart(target: Target) -> None:
    wide = target.randn(15, 1100) * 3
    options = Options(target, 15)
    one = triton.sample(wide[:, :1003], *options.keys, **options.filters)
    other = triton.sample(wide[:, :1003].contiguous(), *options.keys, **options.filters)
    assert all(map(torch.equal, one[:2], other[:2]))
    # A GPU's threads share a row by how it lies in memory, and each adds up what it has.
    torch.testing.assert_close(one[2], other[2], rtol=1e-6, atol=1e-6)
    assert all(not part.numel() for part in triton.sample(wide[:0], *(k[:0] for k in options.keys)))


@pytest.mark.usefixtures("few")
def test_a_row_is_drawn_alike_in_any_batch(target: Target) -> None:
    logits = target.randn(15, 2500) * 3
    options = Options(target, 15)
    together = triton.sample(logits, *options.keys, **options.filters)
    for row in range(15):
        own = slice(row, row + 1)
        filters = {name: option[own] for name, option in options.filters.items()}
        alone = triton.sample(logits[own], *(key[own] for key in options.keys), **filters)
        assert all(torch.equal(one[own], other) for one, other in zip(together, alone, strict=True))


@pytest.mark.usefixtures("few")
def test_what_is_not_finite_is_told_and_harms_no_other_row(target: Target) -> None:
    rows = 3 * 5
    logits = target.randn(rows, 2500)
    options = Options(target, rows)
    well = triton.sample(logits, *options.keys, **options.filters)
    spoilt = logits.clone()
    spoilt[1::5, 2049] = math.nan
    spoilt[2::5, 7] = math.inf
    spoilt[3::5] = -math.inf
    spoilt[4::5, 40:] = -math.inf  # barred, which is no harm
    for module in (triton, reference):
        tokens, peak, _ = module.sample(spoilt, *options.keys, **options.filters)
        assert ((tokens >= 0) & (tokens < 2500)).all()
        assert peak[1::5].isnan().all()
        assert (peak[2::5] == math.inf).all()
        assert (peak[3::5] == -math.inf).all()
        assert (tokens[4::5] < 40).all()
        assert torch.equal(tokens[::5], well[0][::5])
        assert torch.equal(peak[::5], well[1][::5])
    narrow = spoilt[4::5, :40].contiguous()
    fifths = {name: option[4::5].contiguous() for name, option in options.filters.items()}
    keys = tuple(key[4::5].contiguous() for key in options.keys)
    assert torch.equal(triton.sample(narrow, *keys, **fifths)[0], tokens[4::5])


def test_what_division_makes_equal_is_kept_together(target: Target) -> None:
    """Distances next to each other just below 2, of which 1.9 makes fewer quotients."""
    step = torch.finfo(target.dtype).eps
    below = 2 - step * torch.arange(1, 64, device=target.device)
    quotients = (below.float() / 1.9).unique()
    assert len(quotients) < 50 or target.dtype is not torch.float32
    rows = 20
    row = torch.cat((torch.zeros(1, device=target.device), -below)).to(target.dtype)
    logits = row[torch.randperm(64)].expand(rows, 64).contiguous()
    options = Options(target, rows)
    keys = (*options.keys[:2], torch.full_like(options.keys[2], 1.9))
    top_k = torch.arange(2, rows + 2, device=target.device, dtype=torch.int32)
    for _ in range(3):
        one = triton.sample(logits, *keys, top_k=top_k)[0]
        assert torch.equal(one, reference.sample(logits, *keys, top_k=top_k)[0])
        keys[1].add_(1)


@pytest.mark.parametrize("asked", [ASKED[2], (1.5, 8, 0.8, 0.1)], ids=str)
def test_draws_follow_the_closed_form(target: Target, asked: tuple[float, ...]) -> None:
    """Chi-square over positions, of the kernel on its own. On a GPU it can be sharp."""
    if target.device == "cpu" and target.dtype is not torch.float32:
        pytest.skip("the interpreter takes its time; a dtype does not change the draw")
    rows = 120 if target.device == "cpu" else 200_000
    vocab = 11
    row = torch.from_numpy(np.round(np.random.default_rng(7).normal(size=vocab) * 2, 1))
    logits = row.to(target.device, target.dtype).expand(rows, vocab)
    temperature, top_k, top_p, min_p = (
        torch.full((rows,), value, dtype=torch.float32, device=target.device) for value in asked
    )
    seeds = torch.full((rows,), 99, dtype=torch.int64, device=target.device)
    positions = torch.arange(rows, device=target.device)
    filters = {"top_k": top_k.int(), "top_p": top_p, "min_p": min_p}
    tokens = triton.sample(logits, seeds, positions, temperature, **filters)[0]
    weights = (logits[0].double().cpu() / asked[0]).exp().numpy()
    order = weights.copy()
    if asked[1]:
        weights[order < np.sort(order)[::-1][int(asked[1]) - 1]] = 0
    ranked = np.sort(weights)[::-1]
    reached = int((np.cumsum(ranked) < asked[2] * ranked.sum()).sum())
    weights[order < ranked[min(reached, vocab - 1)]] = 0
    weights[order < asked[3] * order.max()] = 0
    expected = weights / weights.sum() * rows
    seen = np.bincount(tokens.cpu().numpy(), minlength=vocab)
    assert not seen[expected == 0].any(), "a token was drawn that the filters cut"
    rare = expected < 8
    seen = np.append(seen[~rare], seen[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    there = expected > 0
    assert there.sum() > 2
    assert stats.chisquare(seen[there], expected[there]).pvalue > 1e-4


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.zeros(2, 5)
    seeds, positions, temperature = torch.zeros(2).long(), torch.zeros(2).long(), torch.ones(2)
    for wrong in (
        (logits[0], seeds, positions, temperature),
        (logits.long(), seeds, positions, temperature),
        (logits, seeds.int(), positions, temperature),
        (logits, seeds, positions[:1], temperature),
        (logits, None, positions, temperature),
        (logits, seeds, positions, temperature.double()),
    ):
        with pytest.raises(ValueError, match="kernel sample"):
            ops.sample(*wrong)
    with pytest.raises(ValueError, match="kernel sample"):
        ops.sample(logits, seeds, positions, temperature, top_k=seeds)
    with pytest.raises(ValueError, match="kernel sample"):
        ops.sample(logits, top_p=temperature)


def test_compiled() -> None:
    def option(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    real = option(torch.float32, 3)
    keys = (option(torch.int64, 3), option(torch.int64, 3), real)
    filters = {"top_k": option(torch.int32, 3), "top_p": real, "min_p": real}
    with recorded() as launches:
        triton.sample(option(torch.bfloat16, 3, 151_936), *keys, **filters)
    names = ["_survey", "tally", "tally", "tally", "_copy", "_cut", "_draw", "_settle"]
    assert [launch.name for launch in launches] == names
    for launch in launches:
        code = launch.compile(90)
        assert code.spills == 0
        assert code.fits
        if launch.name in ("_survey", "tally", "_draw"):
            assert code.count("LDG.E.128") >= 1
        if launch.name == "_cut":
            # Copied into shared memory while the turn before is computed.
            assert code.count("LDGSTS.E.BYPASS.128") >= 1
            assert code.shared <= 96 << 10
