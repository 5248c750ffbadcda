"""Recorded calls of native code, beside calls as they are made."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from asyncinfer.kernels import onednn
from asyncinfer.kernels.dispatch import CannotRecord
from asyncinfer.kernels.native import (
    Arena,
    ChunkKV,
    RecordedCalls,
    Recording,
    add_,
    available,
    kv_write,
)
from asyncinfer.kernels.native.between import between_kernels, rms_norm, silu_mul
from asyncinfer.kernels.native.calls import empty, float_bits

pytestmark = pytest.mark.skipif(not available(), reason="no native code for this processor")


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """The first call of an operator compiles and tries it, which cannot be recorded."""
    between_kernels()


def some(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A layer of a norm, a gate and a residual: `[rows, 128]`."""
    normed = rms_norm(x, weight, 1e-5)
    assert normed is not None
    gated = silu_mul(normed.view(-1, 256))
    assert gated is not None
    return add_(gated.view(-1, 128), x[: len(x) // 2])


def recorded(
    first: torch.Tensor, layers: int, call: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[RecordedCalls, torch.Tensor]:
    recording, x = Recording(Arena(), 2), first
    with recording.begun():
        for _ in range(layers):
            x = call(x)
            recording.end_layer()
    return recording.made(), x


def test_a_replay_computes_with_what_lies_there_now() -> None:
    x, weight = some(64, 128), some(128)
    calls, found = recorded(x, 5, lambda x: layer(x, weight))
    for _ in range(3):
        x.copy_(some(64, 128))
        right = x
        for _ in range(5):
            right = layer(right, weight)
        calls.replay(2, 7)
        assert torch.equal(found, right)


def test_more_threads_than_cores_make_the_same_calls() -> None:
    """Threads lose their core at any place then."""
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(3)) * 0.05
    reordered = onednn.reorder(weight)
    product = onednn.blocked(reordered, (512, 512))
    if product is None:
        pytest.skip("oneDNN has another layout here")
    x, scale = some(4, 512), some(512)

    def normed(x: torch.Tensor) -> torch.Tensor:
        found = rms_norm(product(x), scale, 1e-5)
        assert found is not None
        return found

    recording, found = Recording(Arena(), 2 * (os.cpu_count() or 1) + 1), x
    with recording.begun():
        for _ in range(6):
            found = normed(found)
            recording.end_layer()
    calls = recording.made()
    for _ in range(40):
        x.copy_(some(4, 512))
        right = x
        for _ in range(6):
            right = normed(right)
        calls.replay(recording.most_threads, 1)
        assert torch.equal(found, right)


def test_recordings_of_fewer_rows_share_the_memory_of_more() -> None:
    arena, weight, x = Arena(), some(128), some(8, 128)
    places = set()
    for rows in range(1, 9):
        recording = Recording(arena, 2)
        recording.least_rows = 8
        with recording.begun():
            for _ in range(2):
                found = rms_norm(x[:rows], weight, 1e-5)
                assert found is not None
        assert found.shape == (rows, 128)
        places.add(found.data_ptr())
    assert len(places) == 1


def test_a_replay_in_layers_is_one_in_parts() -> None:
    x, weight = some(32, 128), some(128)
    calls, found = recorded(x, 4, lambda x: layer(x, weight))
    calls.replay(1, 1)
    right = found.clone()
    found.fill_(torch.nan)
    seen = [found.isnan().any().item() for _ in calls.replay_layers(1, 1)]
    # Layers share the memory of two, so the last one's result is there after the last one only.
    assert seen[-1] is False
    assert len(seen) == 4
    assert torch.equal(found, right)


@pytest.mark.parametrize(
    "operator",
    [
        lambda x: x + 1,
        lambda x: x.add_(1),
        lambda x: x.T.contiguous(),
        lambda x: torch.empty(3),
        lambda x: x.to(torch.float64),
        lambda x: x.T.reshape(-1),
        lambda x: torch.cat((x, x)),
    ],
)
def test_operators_that_compute_or_copy_are_refused(
    operator: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = some(4, 128)
    before = x.clone()
    with pytest.raises(CannotRecord, match="aten"):
        recorded(x, 1, operator)
    assert torch.equal(x, before)
    # Nothing is recorded any more.
    assert empty(3).untyped_storage().nbytes() == 12


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(8, 64),
        lambda x: x[:, 64:],
        lambda x: x.float(),
        lambda x: x.contiguous(),
        lambda x: x.chunk(2)[1],
        lambda x: x.flatten(),
    ],
)
def test_views_are_no_calls(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = some(4, 128)
    calls, found = recorded(x, 1, view)
    x.copy_(some(4, 128))
    calls.replay(1, 1)
    assert torch.equal(found, view(x))


def chunk_kv(copy: torch.Tensor, rows: int, tokens: int) -> ChunkKV:
    """A chunk whose keys are `copy` `[heads, capacity, 32]`."""
    return ChunkKV(rows, tokens, 0, copy.data_ptr(), copy.nbytes, copy[0].nbytes)


def test_a_replay_for_a_chunk_of_other_tokens_elsewhere() -> None:
    x, weight, copy, most = some(20, 128), some(128), some(3, 40, 32), 17
    places = torch.zeros(most * 4, dtype=torch.int64)
    recording = Recording(Arena(), 2, chunk_kv(copy, 3, 10), most)
    with recording.begun():
        normed = rms_norm(x[:13], weight, 1e-5)
        assert normed is not None
        assert kv_write(copy[1:], normed[3:].view(-1, 4, 32), places[:40])
        assert rms_norm(normed.view(-1, 32), weight[:32], 1e-5) is not None
        recording.end_layer()
    calls = recording.made()
    for tokens, capacity in ((10, 40), (4, 25), (17, 70)):
        elsewhere = torch.zeros(3, capacity, 32)
        places[: 4 * tokens] = torch.arange(4 * tokens) % capacity
        calls.replay(2, 7, chunk_kv(elsewhere, 3, tokens))
        right = rms_norm(x[: 3 + tokens], weight, 1e-5)
        assert right is not None
        expected = torch.zeros(capacity, 32)
        expected[places[: 4 * tokens]] = right[3:].reshape(-1, 32)
        assert torch.equal(elsewhere[1], expected)
        assert not elsewhere[0].any()
        assert not elsewhere[2].any()


def test_a_call_of_other_rows_than_a_chunks_is_refused() -> None:
    x, weight = some(7, 128), some(128)
    recording = Recording(Arena(), 1, chunk_kv(some(1, 4, 32), 3, 10), 20)
    with recording.begun():
        assert rms_norm(x, weight, 1e-5) is not None
    with pytest.raises(CannotRecord, match="7 of 13 rows"):
        recording.made()


def test_two_layers_memory_serves_all() -> None:
    """Each layer finds its input in the memory of the layer before."""
    arena = Arena()
    sizes = []
    for layers in (2, 9, 9):
        recording = Recording(arena, 1)
        places = set()
        with recording.begun():
            for _ in range(layers):
                places.add(empty(100_000).data_ptr())
                places.add(empty(3, 5).data_ptr())
                recording.end_layer()
        sizes.append(places)
    assert sizes[0] == sizes[1] == sizes[2]
    assert len(sizes[0]) == 4
    assert all(place % 64 == 0 for place in sizes[0])


def test_sums_and_biases() -> None:
    y, x, bias = some(5, 48), some(5, 48), some(48)
    right = y + x + bias
    kept = y
    assert add_(add_(y, x), bias) is kept
    assert torch.equal(y, right)
    # What native code does not add is added by torch.
    odd = some(3, 7)
    assert torch.equal(add_(odd.clone(), odd), odd + odd)
    halves = some(4, 64).bfloat16()
    assert torch.equal(add_(halves.clone(), halves), halves + halves)
    wide = some(4, 128)[:, ::2]
    assert torch.equal(add_(wide.clone(), wide), wide + wide)


def test_a_float_in_a_field() -> None:
    assert float_bits(1.0) == 0x3F800000
    assert float_bits(1e-5) == torch.tensor(1e-5).view(torch.int32).item()
