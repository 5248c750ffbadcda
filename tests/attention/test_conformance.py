"""What every attention does, on every format of the cache: one suite for all of them.

The right answers are computed in float64 from what a format keeps of the keys and values, and the
cache reads as NaN wherever nobody wrote.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention.backends import BACKENDS, Backend
from attention.cases import Case, Shape, Step

from asyncinfer.attention import AttentionVariant

SINKS = torch.linspace(-2, 3, 6)
VARIANTS = {
    "causal": None,
    "window": AttentionVariant(window=7),
    "window of one": AttentionVariant(window=1),
    "window of a block": AttentionVariant(window=4),
    "window beyond everything": AttentionVariant(window=1000),
    "soft cap": AttentionVariant(softcap=0.5),
    "sinks": AttentionVariant(sinks=SINKS),
    "everything": AttentionVariant(window=11, softcap=2.0, sinks=SINKS),
}
#: What Triton's kernels are tried with by themselves. Its interpreter is slow.
IN_KERNELS = [("triton", name) for name in ("window of one", "soft cap", "sinks")]
#: Whole prompts, chunks and rows of one and of few query tokens, alone and together; sequences
#: shorter and much longer than a window, which come and go.
LENGTHS = [30, 11, 4, 22]
STEPS: list[Step] = [
    [(0, 0, 20), (1, 0, 3)],
    [(1, 3, 1), (0, 20, 2)],
    [(0, 22, 1), (1, 4, 1), (2, 0, 1), (3, 0, 17)],
    [(0, 23, 1), (1, 5, 1), (2, 1, 1), (3, 17, 1)],
    [(0, 24, 1), (1, 6, 1), (2, 2, 1)],
    [(0, 25, 1), (1, 7, 1), (2, 3, 1)],
    [(1, 8, 1), (0, 26, 3), (3, 18, 2)],
    [(0, 29, 1), (1, 9, 2), (3, 20, 2)],
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    chosen = BACKENDS[request.param]
    with chosen.setting():
        yield chosen


def reads(backend: Backend, kv: str) -> None:
    """Skip where the backend does not read the format."""
    if kv in backend.unread:
        pytest.skip("such a cache is refused where it attends")


@pytest.mark.parametrize(
    ("backend", "kv", "name"),
    [
        (backend, kv, name)
        for backend in BACKENDS
        for kv, name in (
            *(("plain", name) for name in VARIANTS),
            *((kv, name) for kv in ("int8", "fp8", "int4") for name in ("causal", "everything")),
        )
        if (backend, name) not in IN_KERNELS
    ],
    indirect=["backend"],
)
def test_the_right_answers(backend: Backend, kv: str, name: str) -> None:
    reads(backend, kv)
    case, variant = Case(LENGTHS, kv=kv), VARIANTS[name]
    case.run(backend, STEPS, variant)
    case.check(variant)
    if kv != "plain":
        # What the format rounds shows in what is right.
        for held, exact in zip(case.right(variant), case.right(variant, held=False), strict=True):
            assert (held - exact).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize("kv", ["plain", "int8", "int4"])
def test_values_that_are_the_keys(backend: Backend, kv: str, name: str) -> None:
    reads(backend, kv)
    case = Case(LENGTHS, Shape(num_kv_heads=1, kv_parts=1), kv=kv)
    case.run(backend, STEPS, VARIANTS[name])
    case.check(VARIANTS[name])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 64), (5, 1, 80), (14, 2, 128), (2, 1, 256)]
)
def test_heads(backend: Backend, heads: int, kv_heads: int, head_dim: int) -> None:
    case = Case([21, 9], Shape(heads, kv_heads, head_dim), block_size=16)
    case.run(backend, [[(0, 0, 16), (1, 0, 8)], [(0, 16, 1), (1, 8, 1)], [(0, 17, 4)]])
    case.check(near=2e-5)


def test_page_borders_token_by_token(backend: Backend) -> None:
    case = Case([9, 20])
    case.run(backend, [[(1, 0, 11)]])
    case.run(backend, [[(0, at, 1), (1, 11 + at, 1)] for at in range(9)])
    case.check()


def test_bfloat16(backend: Backend) -> None:
    if not backend.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    case = Case([60, 20], block_size=16, dtype=torch.bfloat16)
    case.run(backend, [[(0, 0, 49)], [(0, 49, 1), (1, 0, 19)], [(0, 50, 1), (1, 19, 1)]])
    case.run(backend, [[(0, 51, 9)]])
    case.check(near=3e-2)


def test_a_step_writes_its_tokens_and_into_its_own_blocks(backend: Backend) -> None:
    case = Case(LENGTHS)
    case.run(backend, STEPS)
    for table, k, v in zip(case.tables, case.k, case.v, strict=True):
        for at in range(len(k)):
            place = table[at // 4], slice(None), at % 4
            assert case.kv.k[1][place].equal(k[at])
            assert case.kv.v[1][place].equal(v[at])
    ours = [block for table in case.tables for block in table]
    others = [block for block in range(case.kv.num_blocks) if block not in ours]
    assert len(others) == 2
    assert case.kv.storage[:, :, others].isnan().all()
    # Of another layer, blocks that were begun may be cleared.
    assert case.kv.storage[0].nan_to_num(0.0).eq(0.0).all()


@pytest.mark.parametrize("kv", ["plain", "int8", "fp8", "int4"])
def test_what_a_window_no_longer_sees_may_be_gone(backend: Backend, kv: str) -> None:
    reads(backend, kv)
    variant = AttentionVariant(window=6)
    case, done = Case([31], kv=kv), 0
    for count in (3, 14, 1, 9, 1, 1, 1, 1):
        case.run(backend, [[(0, done, count)]], variant)
        done += count
        # Given to somebody else, whose numbers are no numbers.
        unseen = case.tables[0][: (done - 6 + 1) // 4] if done > 6 else []
        for tensor in case.kv.tensors:
            tensor[:, :, unseen] = torch.nan if tensor.is_floating_point() else 127
    case.check(variant)


@pytest.mark.parametrize("kv", ["plain", "int8", "fp8", "int4"])
def test_nan_of_an_earlier_tenant_poisons_nobody(backend: Backend, kv: str) -> None:  # fault 26
    """What lies behind a row's last token may be read, with a weight of zero."""
    reads(backend, kv)
    case = Case([14, 7], kv=kv)
    steps: list[Step] = [
        [(0, 0, 9), (1, 0, 3)],
        [(0, 9, 1), (1, 3, 1)],
        [(0, 10, 1), (1, 4, 1)],
        [(1, 5, 1), (0, 11, 2)],
        [(0, 13, 1), (1, 6, 1)],
    ]
    case.run(backend, steps)
    case.check()


def test_layers_of_one_pass_may_differ(backend: Backend) -> None:
    steps: list[Step] = [[(0, 0, 21), (1, 0, 3)], [(0, 21, 1), (1, 3, 1)], [(0, 22, 1), (1, 4, 1)]]
    rules = [None, VARIANTS["everything"]]
    case = Case([23, 5])
    kept = [[out.clone() for out in case.out] for _ in rules]
    for step in steps:
        attention = case.begin(backend, step)
        for layer, variant in enumerate(rules):
            case.out = kept[layer]
            case.attend(attention, step, variant, layer)
    for layer, variant in enumerate(rules):
        case.out = kept[layer]
        case.check(variant)
