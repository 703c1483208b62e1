"""The order of the stream: a pure function of seed and position."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from wan_trainer.data.stream import StreamOrder, epoch_permutation

# A change of these changes the order of every run that is resumed.
GOLDEN = {
    (10, 42, 0): [0, 3, 5, 7, 2, 8, 4, 6, 9, 1],
    (10, 42, 1): [6, 3, 8, 7, 9, 5, 4, 1, 2, 0],
    (7, 0, 0): [6, 0, 2, 1, 3, 4, 5],
    (50_000, 42, 3): [26366, 10297, 42867, 47997, 27180, 1828, 27775, 25931, 33195, 15232],
}


@pytest.mark.parametrize("key", GOLDEN)
def test_golden_orders(key: tuple[int, int, int]) -> None:
    assert epoch_permutation(*key)[:10].tolist() == GOLDEN[key]


@pytest.mark.parametrize(("size", "batch_size"), [(10, 3), (10, 10), (7, 16), (1, 4), (1000, 32)])
def test_nothing_is_dropped_or_repeated_within_an_epoch(size: int, batch_size: int) -> None:
    order = StreamOrder(size, 42, shuffle=True)
    epochs = 4
    stream: list[int] = []
    for step in range(-(-epochs * size // batch_size)):
        stream.extend(order.batch(step, batch_size)[1])
    for epoch in range(epochs):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_batch_is_its_positions_whatever_the_batch_size() -> None:
    order = StreamOrder(10, 42, shuffle=True)
    stream = [order.locate(position)[1] for position in range(60)]
    for batch_size in (1, 4, 6, 15):
        for step in range(60 // batch_size):
            assert order.batch(step, batch_size)[1] == stream[step * batch_size : (step + 1) * batch_size]


def test_a_batch_belongs_to_the_epoch_of_its_first_sample() -> None:
    order = StreamOrder(10, 42, shuffle=True)
    assert [order.batch(step, 4)[0] for step in range(6)] == [0, 0, 0, 1, 1, 2]


def test_any_position_is_addressed_without_its_past() -> None:
    epoch_permutation.cache_clear()
    far = 10**9 * 50_000 + 123
    assert StreamOrder(50_000, 42, True).locate(far) == (10**9, epoch_permutation(50_000, 42, 10**9)[123])
    assert epoch_permutation.cache_info().misses == 1


def test_permutations_are_cached_across_a_step() -> None:
    epoch_permutation.cache_clear()
    order = StreamOrder(100, 1, shuffle=True)
    for step in range(10):
        order.batch(step, 32)
    assert epoch_permutation.cache_info().misses == 4


def test_manifest_order_without_shuffling() -> None:
    order = StreamOrder(5, 42, shuffle=False)
    assert [order.locate(position) for position in range(7)] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1),
    ]  # fmt: skip
    assert order.batch(1, 4) == (0, [4, 0, 1, 2])


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_permutation(50, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert epoch_permutation(50, -1, 0).tolist() != epoch_permutation(50, 1, 0).tolist()


def test_every_place_is_equally_likely() -> None:
    """Chi-squared over 4,000 permutations of 6: each of 36 cells expects 666.7 (25 degrees of freedom)."""
    counts = np.zeros((6, 6))
    for seed in range(4000):
        counts[np.arange(6), epoch_permutation(6, seed, 0)] += 1
    expected = 4000 / 6
    assert ((counts - expected) ** 2 / expected).sum() < 60  # p < 1e-4 above it


def test_large_batches_may_hold_a_sample_more_than_once() -> None:
    counts = Counter(StreamOrder(3, 0, shuffle=True).batch(0, 6)[1])
    assert counts == {0: 2, 1: 2, 2: 2}
