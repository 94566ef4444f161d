"""The shuffle: a permutation for every n, the same everywhere, and as irregular as a random one.

All seeds are fixed, so the statistical tests cannot fail by chance; their limits are 4.5 standard deviations.
"""

from __future__ import annotations

import hashlib
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import UsageError
from hvdkit.permutation import Permutation, _Feistel

LIMIT = 4.5
LARGE = 2**16 + 1  # the first length that goes through the network

GOLDEN = {
    (10, 0, 0): [8, 4, 0, 1],
    (10, 1, 0): [1, 2, 3, 9],
    (65536, 1, 0): [12229, 2567, 17805, 52805],
    (65537, 1, 0): [52825, 40374, 9532, 38809],
    (10**6, 0, 1): [780258, 881864, 278828, 216200],
    (10**9, 2**64 - 1, 5): [600726827, 194748338, 489813584, 958920829],
    (2**40, 0, 0): [422522695423, 393360690435, 55991723497, 183469866490],
    (2**62, 1, 0): [2941155823744369461, 4540604524626888573, 1031025761633207996, 4419721112143517634],
}


@pytest.mark.parametrize(("arguments", "expected"), GOLDEN.items(), ids=str)
def test_golden_values_are_equal_on_every_platform(arguments, expected):
    n = arguments[0]
    assert Permutation(*arguments)([0, n // 3, n // 2, n - 1]).tolist() == expected


@pytest.mark.parametrize(
    ("n", "digest"),
    [(1000, "cfa71dbf087f5251"), (100_003, "35a59be1796b74af")],
)
def test_whole_orders_have_golden_digests(n, digest):
    order = Permutation(n, 7, 3)(np.arange(n)).astype("<i8")
    assert hashlib.sha256(order.tobytes()).hexdigest()[:16] == digest


@settings(max_examples=150, deadline=None)
@given(n=st.integers(0, 200_000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**64 - 1))
def test_every_item_comes_once(n, seed, epoch):
    order = Permutation(n, seed, epoch)(np.arange(n))
    assert order.dtype == np.int64
    assert np.array_equal(np.bincount(order, minlength=n), np.ones(n))


@pytest.mark.parametrize(
    "n", [1, 2, 3, 4, 5, 16, 17, 99, 100, 101, 2**15, 2**17 - 1, 2**17, 2**17 + 1, 316**2, 316**2 + 1]
)
def test_the_network_permutes_at_every_length(n):
    network = _Feistel.of(n, tuple(range(1, 9)))
    assert sorted(network.walk(np.arange(n, dtype=np.uint64)).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [LARGE, 10**6, 2**30])
def test_tables_and_computed_rounds_agree(n):
    with_tables = _Feistel.of(n, tuple(range(11, 19)))
    computed = _Feistel(n, with_tables.a, with_tables.b, with_tables.keys, None)
    places = np.linspace(0, n - 1, 5000).astype(np.uint64)
    assert with_tables.tables is not None
    assert np.array_equal(with_tables.walk(places), computed.walk(places))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2**62), seed=st.integers(0, 2**64 - 1), data=st.data())
def test_random_access_is_consistent_at_any_length(n, seed, data):
    start = data.draw(st.integers(0, n - 1))
    places = np.arange(start, min(n, start + 300), dtype=np.int64)
    permutation = Permutation(n, seed, 4)
    items = permutation(places)
    assert items.min() >= 0 and items.max() < n
    assert len(set(items.tolist())) == len(items)
    assert np.array_equal(permutation(places[::-1]), items[::-1])
    assert permutation(int(places[0])) == items[0]
    assert np.array_equal(permutation(places.reshape(1, -1)), items.reshape(1, -1))


def test_small_lengths_reach_every_order_equally_often():
    orders = dict.fromkeys(itertools.permutations(range(4)), 0)
    for epoch in range(4800):
        orders[tuple(Permutation(4, 3, epoch)(np.arange(4)).tolist())] += 1
    assert _chi_square_z(np.array(list(orders.values())), 23) < LIMIT


@pytest.mark.parametrize("n", [2**16, LARGE, 100_003, 2**18])
def test_positions_neighbours_seeds_and_epochs_look_independent(n):
    order = Permutation(n, 5, 2)(np.arange(n))
    others = {
        "position": (np.arange(n), order),
        "neighbour": (order[:-1], order[1:]),
        "sixteen on": (order[:-16], order[16:]),
        "next seed": (order, Permutation(n, 6, 2)(np.arange(n))),
        "next epoch": (order, Permutation(n, 5, 3)(np.arange(n))),
        "seed and epoch exchanged": (order, Permutation(n, 2, 5)(np.arange(n))),
        "next length": (order, Permutation(n + 1, 5, 2)(np.arange(n))),
    }
    for name, (x, y) in others.items():
        bins = 32
        table = np.bincount((x * bins // (n + 1)) * bins + y * bins // (n + 1), minlength=bins * bins)
        assert abs(_chi_square_z(table, (bins - 1) ** 2)) < LIMIT, name


def test_low_bits_are_as_irregular_as_high_ones():
    n = 2**18
    order = Permutation(n, 1, 1)(np.arange(n))
    for bits in (np.arange(n) & 31, (np.arange(n) >> 9) & 31):
        table = np.bincount(bits * 32 + (order & 31), minlength=1024)
        assert abs(_chi_square_z(table, 31 * 31)) < LIMIT


def test_fixed_points_and_common_places_are_as_rare_as_chance():
    n, epochs = LARGE, 150
    orders = [Permutation(n, 9, epoch)(np.arange(n)) for epoch in range(epochs)]
    fixed = sum(int(np.count_nonzero(order == np.arange(n))) for order in orders)
    common = sum(int(np.count_nonzero(one == two)) for one, two in itertools.pairwise(orders))
    for count in (fixed, common):  # each is a sum of `epochs` Poisson variables of mean 1
        assert abs(count - epochs) < LIMIT * epochs**0.5


def test_runs_up_are_as_frequent_as_in_a_random_order():
    n = 200_000
    order = Permutation(n, 4, 0)(np.arange(n))
    ascents = np.count_nonzero(order[1:] > order[:-1])  # Eulerian: mean (n-1)/2, variance (n+1)/12
    assert abs(ascents - (n - 1) / 2) < LIMIT * ((n + 1) / 12) ** 0.5


@pytest.mark.parametrize("n", [2**10, 10**6, 2**62])
def test_the_first_item_is_uniform_over_seeds(n):
    firsts = np.array([int(Permutation(n, seed, 0)(0)) for seed in range(1000)])
    assert abs(_chi_square_z(np.bincount(firsts // (n // 20), minlength=20)[:20], 19)) < LIMIT


def test_the_largest_length_is_spread_evenly():
    n = 2**62
    items = Permutation(n, 1, 0)(np.arange(50_000) + n // 3)
    assert abs(_chi_square_z(np.bincount(items // (n // 256), minlength=256), 255)) < LIMIT
    assert abs(_chi_square_z(np.bincount(items & 255, minlength=256), 255)) < LIMIT


def test_memory_does_not_grow_with_the_length():
    tracemalloc.start()
    Permutation(10**9, 123, 456)(np.arange(64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


@pytest.mark.parametrize("n", [-1, 2**62 + 1, 1.0, "5", None, True, np.float64(3), np.bool_(True)])
def test_bad_lengths_are_refused_with_the_value(n):
    with pytest.raises(UsageError, match=r"n=.* was given; a whole number from 0 to"):
        Permutation(n)


@pytest.mark.parametrize(
    ("name", "value"), [("seed", -1), ("seed", 2**64), ("seed", 1.5), ("epoch", -1), ("epoch", False)]
)
def test_bad_seeds_and_epochs_are_refused(name, value):
    with pytest.raises(UsageError, match=f"{name}="):
        Permutation(10, **{name: value})


@pytest.mark.parametrize("indices", [[-1], [10], [0, 99], [0.5], ["a"], [True]])
def test_indices_outside_are_refused(indices):
    with pytest.raises(UsageError, match="expected"):
        Permutation(10)(indices)


def test_no_indices_give_no_items():
    assert Permutation(0)([]).tolist() == []
    assert Permutation(10)(np.empty((0, 3), int)).shape == (0, 3)


def _chi_square_z(counts, degrees):
    """The chi-square statistic against equal counts, in standard deviations from its mean."""
    expected = counts.sum() / counts.size
    return (((counts - expected) ** 2 / expected).sum() - degrees) / (2 * degrees) ** 0.5
