"""Pages kept side by side between passes, against the reference twin that reads them where they
lie."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from attention.batches import Row
from attention.sequences import Sequences, Shape

from asyncinfer.attention import KVCache, kv_format
from asyncinfer.attention.gather import Gather
from asyncinfer.attention.mirror import Mirrors

Rows = list[tuple[int, Row]]


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each gather from now on."""
    seen: list[int] = []
    inner = Gather.__call__

    def counted(self: Gather, layer: int, buffer: torch.Tensor) -> torch.Tensor:
        seen.append(self.shape[1])
        return inner(self, layer, buffer)

    monkeypatch.setattr(Gather, "__call__", counted)
    return seen


def check(sequences: Sequences, rows: Rows, layers: tuple[int, ...] = (0,)) -> None:
    """A pass that gets as far as these layers."""
    attention = sequences.attention(rows)
    for layer in layers:
        got, expected = sequences.attend(attention, rows, layer)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def begun(lengths: list[int], room: int = 100) -> Sequences:
    """Sequences of these lengths in both layers, with room to grow."""
    sequences = Sequences(Shape(), [n + room for n in lengths], mirrored=True)
    check(sequences, [(i, (0, n)) for i, n in enumerate(lengths)], (0, 1))
    return sequences


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [([7], 1), ([9, 9, 9], 1), ([12, 5, 30, 8], 1), ([590, 6, 7, 600, 5, 585], 2)],
)
@pytest.mark.parametrize("parts", [1, 2])
def test_only_new_tokens_are_added(
    lengths: list[int], groups: int, parts: int, gathers: list[int]
) -> None:
    """Every step equals the twin; pages are gathered once for each group, until they outgrow it."""
    sequences = Sequences(Shape(kv_parts=parts), [n + 80 for n in lengths], mirrored=True)
    for i, n in enumerate(lengths):
        sequences.step([(i, (0, n))])
    gathers.clear()
    for step in range(80):
        check(sequences, [(i, (n + step, 1)) for i, n in enumerate(lengths)])
        if step == 31:
            assert len(gathers) == groups
            assert sum(gathers) == len(lengths)
    assert groups < len(gathers) <= 3 * groups


def test_random_lives(gathers: list[int]) -> None:
    """Rows come, go, stand still and take several tokens at once, and passes fail after the first
    layer; both layers always equal the twin."""
    seed = 20_261_122
    print(f"seed {seed}")
    draw = random.Random(seed)
    lengths = [20, 31, 5, 44, 9, 26]
    sequences, gathered = begun(lengths, room=200), 0
    at, passes = list(lengths), 0
    running = [0, 1, 2]
    while max(at) < 190:
        if draw.random() < 0.1:
            draw.shuffle(running)
        if draw.random() < 0.1:
            running = draw.sample(range(6), draw.randint(1, 6))
        single: Rows = [(i, (at[i], 1)) for i in running]
        longer: Rows = []
        others = [i for i in range(6) if i not in running]
        if others and draw.random() < 0.1:
            i = draw.choice(others)
            longer = [(i, (at[i], draw.randint(2, 6)))]
        gathers.clear()
        if draw.random() < 0.1:  # the step is taken again
            check(sequences, single + longer)
            continue
        check(sequences, single + longer, (0, 1))
        passes += 1
        gathered += len([rows for rows in gathers if not longer])
        for i, (_, count) in single + longer:
            at[i] += count
    assert 20 < gathered < passes


def test_a_pass_that_failed_halfway_is_not_believed() -> None:
    sequences = begun([10, 14])
    rows: Rows = [(0, (10, 1)), (1, (14, 1))]
    check(sequences, rows, (0, 1))
    # Only the first layer gets as far as this, and the tokens are others the next time.
    check(sequences, [(0, (11, 1)), (1, (15, 1))])
    check(sequences, [(0, (11, 1)), (1, (15, 1))], (0, 1))
    check(sequences, [(0, (12, 1)), (1, (16, 1))], (0, 1))


def test_a_gather_that_fails_leaves_nothing_to_believe(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = begun([10, 14])
    check(sequences, [(0, (10, 1)), (1, (14, 1))])
    inner = Gather.__call__

    def fails(self: Gather, layer: int, buffer: torch.Tensor) -> torch.Tensor:
        inner(self, layer, buffer).zero_()
        raise MemoryError

    sequences.step([(0, (11, 2))])
    with monkeypatch.context() as patch:
        patch.setattr(Gather, "__call__", fails)
        with pytest.raises(MemoryError):
            sequences.step([(0, (13, 1)), (1, (15, 1))])
    check(sequences, [(0, (13, 1)), (1, (15, 1))])


def test_tokens_that_a_pass_without_numbers_wrote_are_seen() -> None:
    sequences = begun([10, 14])
    check(sequences, [(0, (10, 1)), (1, (14, 1))])
    sequences.mirrored = False
    check(sequences, [(0, (11, 1)), (1, (15, 1))])
    sequences.mirrored = True
    check(sequences, [(0, (12, 1)), (1, (16, 1))])


def test_a_number_stands_for_a_sequence_wherever_its_blocks_are(gathers: list[int]) -> None:
    """The same blocks under another number are somebody else's."""
    sequences = begun([10])
    check(sequences, [(0, (10, 1))])
    sequences.tables.append(sequences.tables[0])
    sequences.step([(1, (0, 11))])
    gathers.clear()
    check(sequences, [(1, (11, 1))])
    assert gathers == [1]


def test_a_block_handed_on_full_of_nan_poisons_nobody() -> None:  # fault 26
    sequences = begun([18, 3])
    for at in range(60):
        rows: Rows = [(0, (18 + at, 1)), (1, (3 + at, 1))]
        got, expected = sequences.step(rows)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_what_is_not_computed_any_more_is_let_go() -> None:
    sequences = begun([10, 200])
    check(sequences, [(0, (10, 1)), (1, (200, 1))])
    mirrors = sequences.kv.mirrors.of([(0,), (1,)], [11, 201], 1, 4)
    assert mirrors is not None
    held = [weakref.ref(mirror) for mirror in mirrors]
    del mirrors
    check(sequences, [(1, (201, 1))])
    gc.collect()
    assert [mirror() is None for mirror in held] == [True, False]
    sequences.step([(0, (11, 8))])
    gc.collect()
    assert held[1]() is None


def test_what_takes_too_much_is_gathered_every_time(gathers: list[int]) -> None:
    sequences = begun([10, 14])
    gathers.clear()
    shape = sequences.shape
    token_bytes = 2 * 2 * shape.num_kv_heads * shape.head_dim * 4
    # Two rows of 15 tokens and an eighth and 32 more, in blocks of 4.
    taken = 2 * 48 * token_bytes
    for room, expected in ((taken - 1, [2, 2, 2]), (taken, [2])):
        gathers.clear()
        sequences.kv.mirrors = Mirrors(room)
        for at in range(3):
            check(sequences, [(0, (10 + at, 1)), (1, (14 + at, 1))])
        assert gathers == expected


def test_a_format_that_rounds_is_read_from_its_pages(gathers: list[int]) -> None:
    sequences = Sequences(Shape(), [40], mirrored=True, format=kv_format("int8"))
    sequences.step([(0, (0, 10))])
    gathers.clear()
    for at in range(3):
        sequences.step([(0, (10 + at, 1))])
    assert gathers == [1, 1, 1]


def test_mirrors_take_a_quarter_of_what_pages_do() -> None:
    kv = KVCache.allocate(Shape(), 64, 4, torch.float32, "cpu")
    token_bytes = kv.storage.nbytes // (64 * 4)
    # An eighth and 32 tokens more are 64 of the cache's 256, and 65.
    assert kv.mirrors.of([(0,)], [29], token_bytes, 1) is not None
    assert kv.mirrors.of([(1,)], [30], token_bytes, 1) is None


def test_numbers_that_are_not_known_keep_nothing(gathers: list[int]) -> None:
    sequences = begun([10])
    sequences.mirrored = False
    gathers.clear()
    for at in range(3):
        check(sequences, [(0, (10 + at, 1))])
    assert gathers == [1, 1, 1]
