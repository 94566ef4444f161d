"""hvd.dataset: each sample once, epochs that advance, resume, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import horovod.tensorflow as horovod
import numpy as np
import pytest
import tensorflow as tf

import hvdkit.tf as hvd
from hvdkit import ShardPlan
from hvdkit.errors import UsageError
from hvdkit.tf.collectives import batch_share


@pytest.fixture(scope="module", autouse=True)
def world() -> Any:
    return hvd.init()


def numbers(n: int, **settings: Any) -> Any:
    return hvd.dataset(np.arange(n), **settings)


def seen(batches: Any) -> list[list[int]]:
    return [x.numpy().tolist() for x in batches]


def flat(lists: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


def everywhere(mine: list[int]) -> list[int]:
    return sorted(flat(horovod.allgather_object(mine, name="seen")))


@pytest.mark.parametrize("n", [1, 7, 10, 23])
def test_c1_evaluation_sees_each_sample_once(n: int) -> None:
    for settings in ({"batch_per_rank": 2}, {"global_batch": 3}):
        data = numbers(n, train=False, **settings)
        for _ in range(2):
            batches = seen(data)
            assert len(batches) == len(data) and all(batches)
            assert everywhere(flat(batches)) == list(range(n))


@pytest.mark.parametrize("n", [7, 10, 23])
def test_c3_training_epochs_differ_and_are_complete(n: int) -> None:
    data = numbers(n, global_batch=4, seed=3)
    plan = ShardPlan(length=n, size=1, rank=0, global_batch=4, seed=3)
    orders = []
    for epoch in range(3):
        shares, batches = [], []
        assert data.epoch == epoch
        for x in data:
            shares.append(float(batch_share()))
            batches.append(x.numpy().tolist())
        assert len(batches) == len(data) == plan.steps
        real = [b for b, share in zip(batches, shares, strict=True) if share > 0]
        assert everywhere(flat(real)) == list(range(n))
        for step, share in enumerate(shares):
            counts = data.plan.counts(step)
            assert share == pytest.approx(counts[hvd.rank()] * hvd.size() / counts.sum())
        orders.append(flat(batches))
    assert data.position == 3 * n
    assert len({tuple(o) for o in orders}) > 1
    assert float(batch_share()) == 1.0  # nothing is in hand any more


def test_the_order_does_not_depend_on_the_ranks() -> None:
    plan = ShardPlan(length=10, size=1, rank=0, global_batch=4, seed=3)
    for step, x in enumerate(numbers(10, global_batch=4, seed=3)):
        mine = x.numpy().tolist() if float(batch_share()) else []
        assert flat(horovod.allgather_object(mine, name="order")) == plan.ids(0, step).tolist()


@pytest.mark.parametrize("stop", [0, 1, 2, 3])
def test_c6_resume_mid_epoch(stop: int) -> None:
    settings: dict[str, Any] = {"batch_per_rank": 2, "seed": 5}
    whole = numbers(20, **settings)
    expected = [seen(whole) for _ in range(3)]
    data = numbers(20, **settings)
    seen(data)
    part = []
    if stop:
        for x in data:
            part.append(x.numpy().tolist())
            if len(part) == stop:
                break
    state = data.state_dict()
    resumed = numbers(20, **settings)
    resumed.load_state_dict(state)
    rest = seen(resumed) if len(part) < len(data) else []
    assert part + rest == expected[1]
    assert seen(resumed) == expected[2]


def test_an_iteration_left_early_begins_again() -> None:
    data = numbers(20, batch_per_rank=2, seed=5)
    first = next(iter(data)).numpy().tolist()
    again = seen(data)
    assert again[0] == first and len(again) == len(data)
    one = numbers(4, global_batch=4, seed=5)  # an epoch of one step: a look at it is no epoch
    next(iter(one))
    assert one.epoch == 1 and len(seen(one)) == 1 and one.epoch == 1


def test_position_in_a_graph() -> None:
    data = numbers(20, batch_per_rank=2)
    iterator = iter(data)
    draw = tf.function(lambda it: it.get_next())
    draw(iterator)
    draw(iterator)
    assert data.position == 2 * data.global_batch or data.position == 20


def test_filler_weighs_nothing() -> None:
    """Global batches of 2, then a last one of 1: from two ranks on, some have nothing in it."""
    data = hvd.dataset(np.float32([1, 2, np.nan]), global_batch=2, shuffle=False) if hvd.size() > 2 else None
    data = data or hvd.dataset(np.float32([np.inf, 2, 3]), global_batch=2, shuffle=False)
    v = tf.Variable(1.0)
    results = []
    for x in data:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(x * v)
        results.append(float(hvd.DistributedGradientTape(tape).gradient(loss, [v])[0]))
    # On one and two ranks the filler is the infinite sample 0; it must not enter the last mean.
    assert (results[-1] == 3.0) if hvd.size() <= 2 else np.isnan(results[-1])


@pytest.mark.parametrize("method", ["repeat", "shuffle", "batch", "take", "shard", "unbatch", "filter"])
def test_what_would_lose_the_plan_is_refused(method: str) -> None:
    data = numbers(20, batch_per_rank=2)
    with pytest.raises(UsageError, match=rf"{method}\(\) was called on a training dataset"):
        getattr(data, method)(1)


def test_nested_arrays_and_evaluation_methods() -> None:
    data = hvd.dataset({"a": np.arange(6), "b": np.ones((6, 2))}, np.arange(6), batch_per_rank=1, train=False)
    for x, y in data.take(1):
        assert set(x) == {"a", "b"} and x["b"].shape[1:] == (2,) and x["a"].numpy().tolist() == y.numpy().tolist()


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="x has 3 samples and y has 2"):
        hvd.dataset(np.zeros(3), np.zeros(2), batch_per_rank=1)
    with pytest.raises(UsageError, match="single number"):
        hvd.dataset(np.float32(3), batch_per_rank=1)
    with pytest.raises(UsageError, match="give one"):
        hvd.dataset(np.zeros(3))
    with pytest.raises(UsageError, match="'exact'"):
        hvd.dataset(np.zeros(3), batch_per_rank=1, tail="exactly")
    with pytest.raises(UsageError, match="length=4"):
        numbers(3, batch_per_rank=1).load_state_dict(numbers(4, batch_per_rank=1).state_dict())
