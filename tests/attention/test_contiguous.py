"""Pages kept side by side between passes, against the reference twin that reads them where they
lie."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention.batches import Row
from attention.sequences import Sequences, Shape, give_room

from asyncinfer.attention import KVCache, kv_format
from asyncinfer.attention import decode as decode_module
from asyncinfer.attention import prefill as prefill_module
from asyncinfer.attention.contiguous import ContiguousKV, ContiguousKVPool
from asyncinfer.attention.gather import Gather

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
    sequences = Sequences(Shape(), [n + room for n in lengths], contiguous=True)
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
    """Every step equals the twin; what is gathered in the second is kept, until it is outgrown."""
    sequences = Sequences(Shape(kv_parts=parts), [n + 80 for n in lengths], contiguous=True)
    for i, n in enumerate(lengths):
        sequences.step([(i, (0, n))])
    gathers.clear()
    # One sequence alone is known from its prompt, and so it has a copy from the first step on.
    times = 1 + (len(lengths) > 1)
    for step in range(80):
        check(sequences, [(i, (n + step, 1)) for i, n in enumerate(lengths)])
        if step == 32:
            assert len(gathers) == times * groups
            assert sum(gathers) == times * len(lengths)
    assert times * groups < len(gathers) <= (times + 2) * groups


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("products", [False, True])
def test_chunks_of_a_prompt_are_added(
    parts: int, products: bool, gathers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's earlier chunks are gathered once and, where its length is not known, again when it
    has outgrown its copy by half. Rows that decode beside it keep theirs."""
    monkeypatch.setattr(prefill_module, "has_faster_product", lambda _: products)
    sequences = Sequences(Shape(kv_parts=parts), [700, 120, 120], contiguous=True)
    for i in (1, 2):
        check(sequences, [(i, (0, 40))], (0, 1))
    gathers.clear()
    at = 0
    for step, count in enumerate([40, 64, 35, 70, 34, 100, 36, 90, 41, 50]):
        check(sequences, [(1, (40 + step, 1)), (2, (40 + step, 1)), (0, (at, count))], (0, 1))
        at += count
    # The two that decode: without a copy in each layer, then with one. The prompt: at 104 and 469
    # tokens. All of it was gathered nine times before.
    assert gathers.count(2) == 4
    assert gathers.count(1) == 2 * 2


@pytest.fixture
def _memory_of_nan() -> Iterator[None]:
    """Have torch fill new memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_memory_of_nan")
def test_a_prompt_of_known_length_is_gathered_once(gathers: list[int]) -> None:
    """Its copy has room for all of it. Nobody reads that before it is written."""
    sequences = Sequences(Shape(), [700], contiguous=True)
    sequences.prompt_lens = [561]
    gathers.clear()
    at = 0
    for count in [40, 64, 35, 70, 34, 100, 36, 90, 41, 51, 1, 1, 1]:
        check(sequences, [(0, (at, count))], (0, 1))
        at += count
    # One that is alone is known from its first step on. Its first tokens see nothing cached.
    assert gathers == [1, 1]


@pytest.mark.parametrize(
    ("room", "capacity"),
    [(1000 + 32, 1032), (1000 + 31, 406), (150 + 256, 406), (150 + 255, None)],
)
def test_room_for_a_whole_prompt_or_for_half_as_many_tokens_again(
    room: int, capacity: int | None
) -> None:
    pool = ContiguousKVPool(room * TOKEN, TOKEN, torch.float32)
    copy = pool.begun((0,), 100, 1, 1000)
    assert (copy and copy.capacity) == capacity


def test_a_prompt_leaves_its_room_to_rows_that_decode() -> None:
    # 10 tokens, an eighth of them and 32 more are 43; of a prompt, half of them and 256 are 271.
    pool = ContiguousKVPool((43 + 271) * TOKEN, TOKEN, torch.float32)
    groups = [(0,), (1,)]
    for _ in range(2):
        decode, chunk = pool.of(groups, [10, 10], 1, prompts=[0])
    assert decode is not None
    assert chunk is not None
    place = weakref.ref(chunk.memory)
    del chunk
    # The row that decodes has outgrown its copy, and the spare memory of that.
    decode, chunk = pool.of(groups, [44, 10], 1, prompts=[0])
    assert decode is not None
    assert chunk is None
    assert place() is None


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
    assert 20 < gathered < 2 * passes


def settled(lengths: list[int], layers: tuple[int, ...] = (0,)) -> Sequences:
    """Sequences of these lengths less two, after two steps: they have copies."""
    sequences = begun([length - 2 for length in lengths])
    for at in (2, 1):
        check(sequences, [(i, (n - at, 1)) for i, n in enumerate(lengths)], layers)
    return sequences


def test_drafts_are_added_and_wrong_ones_overwritten(gathers: list[int]) -> None:
    sequences = settled([10, 14], (0, 1))
    gathers.clear()
    # Rows with drafts beside rows without; of the first four tokens only one was right.
    check(sequences, [(0, (10, 4)), (1, (14, 1))], (0, 1))
    check(sequences, [(0, (11, 1)), (1, (15, 1))], (0, 1))
    check(sequences, [(0, (12, 2)), (1, (16, 5))], (0, 1))
    assert gathers == []
    # Tokens that the copy lacks.
    check(sequences, [(0, (15, 2)), (1, (21, 1))], (0, 1))
    assert gathers == [2, 2]


def test_what_native_code_passed_by_is_not_believed() -> None:
    """Drafts of many tokens are in a copy. Native code then takes the row for a pass, and what it
    writes in the place of wrong drafts the copy does not see."""
    sequences = begun([7])
    sequences.native = True
    check(sequences, [(0, (7, 6))])
    check(sequences, [(0, (13, 6))])
    check(sequences, [(0, (15, 1))])
    check(sequences, [(0, (16, 6))])


def test_a_pass_that_failed_halfway_is_not_believed() -> None:
    sequences = settled([10, 14], (0, 1))
    # Only the first layer gets as far as this, and the tokens are others the next time.
    check(sequences, [(0, (10, 1)), (1, (14, 1))])
    check(sequences, [(0, (10, 1)), (1, (14, 1))], (0, 1))
    check(sequences, [(0, (11, 1)), (1, (15, 1))], (0, 1))


@pytest.mark.parametrize("then", [10, 12])
def test_a_gather_that_fails_leaves_nothing_to_believe(
    then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = settled([10, 14])
    # One more token that the copy lacks.
    sequences.contiguous = False
    check(sequences, [(0, (10, 1)), (1, (14, 1))])
    sequences.contiguous = True
    inner = Gather.__call__

    def fails(self: Gather, layer: int, buffer: torch.Tensor) -> torch.Tensor:
        inner(self, layer, buffer).zero_()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Gather, "__call__", fails)
        with pytest.raises(MemoryError):
            sequences.step([(0, (11, 1)), (1, (15, 1))])
    # Neither what it held before, taken again, nor what it would hold now.
    check(sequences, [(0, (then, 1)), (1, (then + 4, 1))])


def test_tokens_that_a_pass_without_numbers_wrote_are_seen() -> None:
    sequences = settled([10, 14])
    sequences.contiguous = False
    check(sequences, [(0, (10, 1)), (1, (14, 1))])
    sequences.contiguous = True
    check(sequences, [(0, (11, 1)), (1, (15, 1))])


def test_the_same_blocks_under_another_number_are_somebody_elses(gathers: list[int]) -> None:
    sequences = settled([10])
    sequences.contiguous = False
    sequences.tables.append(sequences.tables[0])
    sequences.step([(1, (0, 10))])
    sequences.contiguous = True
    gathers.clear()
    check(sequences, [(1, (10, 1))])
    assert gathers == [1]


def test_a_block_handed_on_full_of_nan_poisons_nobody() -> None:  # fault 26
    sequences = begun([18, 3])
    for at in range(60):
        rows: Rows = [(0, (18 + at, 1)), (1, (3 + at, 1))]
        got, expected = sequences.step(rows)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_who_comes_and_goes_with_every_step_has_none(gathers: list[int]) -> None:
    sequences = begun([10, 12, 14])
    gathers.clear()
    for at in range(12):
        rows: Rows = [(i, (n + at // 2, 1)) for i, n in enumerate([10, 12, 14])]
        check(sequences, rows[:2] if at % 2 else rows)
    assert len(gathers) == 12
    assert sequences.kv.contiguous.of([(9,)], [10], 4) == [None]


TOKEN = 2 * 2 * 2 * 16  # elements, of a Shape


def filled(
    pool: ContiguousKVPool, groups: list[tuple[int, ...]], length: int
) -> list[ContiguousKV | None]:
    """The copies of groups that were there before."""
    pool.of(groups, [length] * len(groups), 1)
    return pool.of(groups, [length] * len(groups), 1)


def test_what_is_not_computed_any_more_makes_room() -> None:
    # 10 tokens, an eighth of them and 32 more are 43.
    pool = ContiguousKVPool(2 * 43 * TOKEN, TOKEN, torch.float32)
    first, second = filled(pool, [(0,), (1,)], 10)
    assert first is not None
    assert second is not None
    (kept,) = pool.of([(1,)], [10], 1)
    assert kept is second
    held = weakref.ref(first)
    place = first.memory.data_ptr()
    del first
    # In the memory that was the first one's.
    last, third = filled(pool, [(1,), (2,)], 10)
    assert last is second
    assert third is not None
    assert third.memory.data_ptr() == place
    assert held() is None
    # A larger one has no room beside another, nor is the memory kept for it.
    place_of = weakref.ref(third.memory)
    del third
    assert filled(pool, [(1,), (3,)], 11) == [second, None]
    assert place_of() is None


@pytest.mark.parametrize(("lacking", "expected"), [(1, [2, 2, 2, 2]), (0, [2, 2])])
def test_what_takes_too_much_is_gathered_every_time(
    lacking: int, expected: list[int], gathers: list[int]
) -> None:
    sequences = begun([10, 14])
    # Two rows of 16 tokens, an eighth and 32 more, in blocks of 4.
    give_room(sequences.kv, 2 * 52 * TOKEN - lacking)
    gathers.clear()
    for at in range(4):
        check(sequences, [(0, (10 + at, 1)), (1, (14 + at, 1))])
    assert gathers == expected


def test_what_is_gathered_every_time_is_gathered_in_parts(
    gathers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_module, "_GATHER_BYTES", 3 * 13 * TOKEN * 4 // 2)
    sequences = begun([10, 10, 10, 10])
    for count in ([3, 1], [4], []):
        gathers.clear()
        check(sequences, [(i, (10 + (not count), 1)) for i in range(4)])
        assert gathers == count


def test_memory_that_is_not_there_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def fails(*_: object, **__: object) -> torch.Tensor:
        nonlocal asked
        asked += 1
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    pool = ContiguousKVPool(1 << 20, TOKEN, torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fails)
        assert filled(pool, [(0,)], 10) == [None]
        assert filled(pool, [(0,)], 10) == [None]
    assert asked == 1


@pytest.mark.parametrize(("most", "copied"), [(300, True), (200, False)])
def test_a_smaller_copy_where_there_is_no_memory_for_the_whole_prompt(
    most: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later prompts have copies then, too."""
    empty, asked = torch.empty, []

    def limited(elements: int, **given: Any) -> torch.Tensor:
        asked.append(elements // TOKEN)
        if elements > most * TOKEN:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(elements, **given)

    pool = ContiguousKVPool(1 << 20, TOKEN, torch.float32)
    monkeypatch.setattr(torch, "empty", limited)
    first = pool.begun((0,), 10, 1, 1000)
    assert (first is not None) == copied
    second = pool.begun((1,), 10, 1, 1000)
    assert (second is not None) == copied
    # What failed for every size is not tried again.
    assert (len(asked) == 2) == (not copied)


def test_copies_are_dropped_where_no_memory_was_left_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody adds to them any more."""
    pool = ContiguousKVPool(1 << 20, TOKEN, torch.float32)
    assert filled(pool, [(0,)], 10) != [None]

    def fails(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fails)
        assert filled(pool, [(0,), (1,)], 10)[1] is None
    assert pool.of([], [], 4) == []
    assert pool.kept((0,), 10) is None


def test_a_format_that_rounds_is_read_from_its_pages(gathers: list[int]) -> None:
    sequences = Sequences(Shape(), [40], contiguous=True, format=kv_format("int8"))
    sequences.step([(0, (0, 10))])
    gathers.clear()
    for at in range(3):
        sequences.step([(0, (10 + at, 1))])
    assert gathers == [1, 1, 1]


def test_copies_take_a_quarter_of_what_pages_do() -> None:
    kv = KVCache.allocate(Shape(), 64, 4, torch.float32, "cpu")
    # An eighth and 32 tokens more are 64 of the cache's 256, and 65.
    assert filled(kv.contiguous, [(0,)], 30) == [None]
    assert filled(kv.contiguous, [(1,)], 29) != [None]


def test_numbers_that_are_not_known_keep_nothing(gathers: list[int]) -> None:
    sequences = begun([10])
    sequences.contiguous = False
    gathers.clear()
    for at in range(3):
        check(sequences, [(0, (10 + at, 1))])
    assert gathers == [1, 1, 1]
