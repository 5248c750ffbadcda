"""The tokens of the slots, and the way of arrays to a device."""

from __future__ import annotations

import numpy as np
import torch

from asyncinfer.sampling import TokenHistory, upload
from asyncinfer.sampling.transfer import _packed

CPU = torch.device("cpu")


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def test_tokens_are_read_where_they_were_written_also_after_growing() -> None:
    history = TokenHistory(3, CPU)
    history.join(0, range(100, 110))
    history.join(2, range(700))
    assert history.capacity >= 700
    assert history.on_host(history.places(ints(2, 0), ints(699, 9))).tolist() == [699, 109]
    history.write(ints(0, 2), ints(10, 5000), torch.tensor([7, 8]))
    assert history.capacity >= 5001
    got = history.read(ints(0, 0, 2, 2, 0), ints(0, 9, 699, 5000, 10))
    assert got.tolist() == [100, 109, 699, 8, 7]
    assert got.dtype == torch.int64
    assert history.on_host(history.places(ints(2, 0), ints(5000, 10))).tolist() == [8, 7]
    history.join(0, [5])
    assert history.read(ints(0), ints(0)).tolist() == [5]


def test_a_window_of_each_slot() -> None:
    history = TokenHistory(2, CPU)
    history.join(0, range(10, 20))
    history.join(1, range(30, 40))
    tokens, valid = history.window(ints(0, 1, 1), ints(2, 9, 4), ints(5, 10, 4))
    assert tokens[0].tolist() == [12, 13, 14]
    assert tokens[1].tolist() == [39, 39, 39]
    assert valid.tolist() == [[True] * 3, [True, False, False], [False] * 3]


def test_an_empty_window_at_the_end_of_the_last_slot() -> None:
    history = TokenHistory(1, CPU)
    end = history.capacity
    history.join(0, [3] * end)
    tokens, valid = history.window(ints(0, 0), ints(end, 0), ints(end, 2))
    assert tokens.shape == (2, 2)
    assert valid.tolist() == [[False, False], [True, True]]


def test_arrays_travel_packed_with_shape_and_type() -> None:
    arrays = [
        np.arange(6, dtype=np.int64).reshape(2, 3),
        np.array([True, False, True]),
        np.array([], np.int32),
        np.array([[1.5], [2.5]], np.float32),
        np.arange(12, dtype=np.float64).reshape(3, 4)[:, ::2],
    ]
    for tensor, plain, array in zip(
        _packed(CPU, arrays, pin=False), upload(CPU, *arrays), arrays, strict=True
    ):
        assert tensor.dtype == plain.dtype
        assert tensor.shape == array.shape
        assert torch.equal(tensor, plain)


def test_a_history_of_a_given_capacity_keeps_its_place() -> None:
    history = TokenHistory(2, CPU, capacity=300)
    place = history.flat.data_ptr()
    history.join(1, range(300))
    history.write(np.array([0]), np.array([299]), torch.tensor([7]))
    assert history.flat.data_ptr() == place
    assert history.flat.shape == (600,)
    places = history.places(np.array([0, 1]), np.array([299, 298]))
    assert history.at(torch.from_numpy(places)).tolist() == [7, 298]
