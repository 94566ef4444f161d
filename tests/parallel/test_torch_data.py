"""``DataLoader``: every sample once per epoch at any number of ranks, in one order, and exact resume."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import hvdkit.torch as hvd
from hvdkit.errors import OutOfSyncError, UsageError
from hvdkit.sharding import ShardPlan
from hvdkit.torch import batch
from hvdkit.torch.batch import Batch

hvd.init()
SIZE, RANK = hvd.size(), hvd.rank()
several = pytest.mark.skipif(SIZE == 1, reason="one process has the same data as itself")


class Numbers(torch.utils.data.Dataset[int]):
    """Sample i is i; remembers what was loaded in this process."""

    def __init__(self, length: int) -> None:
        self.length, self.loaded = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class Draws(Numbers):
    """Sample i is what augmentation would draw for it, and who drew it."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, info.id, random.random(), float(np.random.random()), float(torch.rand(()))


def epoch_of(loader: hvd.DataLoader, steps: int | None = None) -> list[list[int]]:
    """Per step, the real samples of this rank."""
    seen = []
    for step, ids in enumerate(loader):
        assert loader.batch is batch.current()
        assert len(ids) == loader.batch.count or (loader.batch.count == 0 and len(ids) == 2)
        seen.append(ids.tolist()[: loader.batch.count])
        if step + 1 == steps:
            break
    return seen


def flat(lists: Any) -> list[Any]:
    return list(chain.from_iterable(lists))


def joined(seen: list[list[int]]) -> list[list[int]]:
    """Per step, the global batch: the ranks' parts one after the other."""
    return [flat(parts) for parts in zip(*hvd.gather_objects(seen), strict=True)]


@pytest.mark.parametrize(("length", "size"), [(20, 4), (23, 5), (7, 3), (2, 5), (1, 4), (0, 3)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_c3_epochs_are_the_plans_at_any_number_of_ranks(length: int, size: int, shuffle: bool) -> None:
    loader = hvd.DataLoader(Numbers(length), global_batch=size, seed=4, shuffle=shuffle)
    plan = ShardPlan(length=length, size=1, rank=0, global_batch=size, seed=4, shuffle=shuffle)
    for epoch in range(3):
        assert loader.epoch == (epoch if length else 0)
        assert joined(epoch_of(loader)) == [plan.ids(epoch, step).tolist() for step in range(plan.steps)]
    assert len(loader) == plan.steps
    assert batch.current() is None


def test_short_last_batch_weighs_by_samples() -> None:
    loader = hvd.DataLoader(Numbers(4 * SIZE + 1), batch_per_rank=4, shuffle=False)
    batches = [loader.batch for _ in loader]
    assert [b.count for b in batches] == [4, int(RANK == 0)]
    assert [b.weight for b in batches] == [1.0, float(SIZE * (RANK == 0))]
    assert loader.global_batch == 4 * SIZE


@pytest.mark.parametrize("length", [0, 1, 3, 10])
def test_c1_c2_evaluation_shows_each_sample_once(length: int) -> None:
    loader = hvd.DataLoader(Numbers(length), global_batch=4, train=False)
    for _ in range(2):
        batches = [ids.tolist() for ids in loader]
        assert len(batches) == len(loader)
        every = hvd.gather_objects(flat(batches))
        assert sorted(flat(every)) == list(range(length))
    assert batch.current() is None


@pytest.mark.parametrize("tail", ["pad", "drop"])
def test_tails(tail: str) -> None:
    loader = hvd.DataLoader(Numbers(4 * SIZE + 1), batch_per_rank=4, tail=tail)
    counts = Counter(flat(flat(hvd.gather_objects(epoch_of(loader)))))
    assert sum(counts.values()) == (8 if tail == "pad" else 4) * SIZE
    assert loader.epoch == 1


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_c6_resume_mid_epoch(stop: int) -> None:
    """20 samples, global batch 4: stop at any step of any epoch; the rest comes as if nothing had happened."""
    whole = hvd.DataLoader(Numbers(20), global_batch=4, seed=1)
    expected = epoch_of(whole) + epoch_of(whole)
    first = hvd.DataLoader(Numbers(20), global_batch=4, seed=1)
    before = (
        epoch_of(first, stop)
        if stop < 5
        else epoch_of(first) + epoch_of(first, stop - 5)
        if stop > 5
        else epoch_of(first)
    )
    data = Numbers(20)
    second = hvd.DataLoader(data, global_batch=4, seed=1)
    second.load_state_dict(first.state_dict())
    after = epoch_of(second)
    if stop < 5:
        assert len(after) == 5 - stop
        after += epoch_of(second)
    assert before + after == expected
    assert Counter(i for b in after for i in b) <= Counter(data.loaded)
    assert len(data.loaded) <= sum(max(2, len(b)) for b in after)  # what is skipped is not loaded


def test_c6_resume_on_another_number_of_ranks() -> None:
    """The position means the same whatever the size: here of a run of 3 ranks, two steps in."""
    plan = ShardPlan(length=23, size=3, rank=0, global_batch=5, seed=2)
    position = plan.position(epoch=1, step=2)
    loader = hvd.DataLoader(Numbers(23), global_batch=5, seed=2)
    loader.load_state_dict({"position": position, **plan.state()})
    assert joined(epoch_of(loader)) == [
        ShardPlan(length=23, size=1, rank=0, global_batch=5, seed=2).ids(1, step).tolist() for step in (2, 3, 4)
    ]


def test_state_of_other_data_is_refused() -> None:
    state = hvd.DataLoader(Numbers(20), global_batch=4, seed=1).state_dict()
    for arguments, message in [({"length": 21}, "length=20.*length=21"), ({"seed": 2}, "seed=1.*seed=2")]:
        other = hvd.DataLoader(Numbers(arguments.pop("length", 20)), global_batch=4, **{"seed": 1, **arguments})
        with pytest.raises(UsageError, match=message):
            other.load_state_dict(state)
    with pytest.raises(UsageError):
        hvd.DataLoader(Numbers(20), global_batch=4, seed=1).load_state_dict({})


def test_break_goes_on_with_the_next_batch() -> None:
    loader = hvd.DataLoader(Numbers(20), global_batch=4)
    first = epoch_of(loader, 2)
    assert sorted(flat(joined(first + epoch_of(loader)))) == list(range(20))
    loader.set_epoch(3)
    assert loader.epoch == 3 and loader.position == 60


def test_c3_workers_draw_differently_and_position_ignores_prefetch() -> None:
    loader = hvd.DataLoader(
        Draws(24 * SIZE), batch_per_rank=4, seed=1, num_workers=2, persistent_workers=True, prefetch_factor=3,
        multiprocessing_context="fork",  # quick to start; this file calls init() on import, as a worker must not
    )  # fmt: skip
    draws, workers = [], set()
    for _ in range(2):
        for step, rows in enumerate(loader):
            assert loader.position == loader.plan.position(len(draws) // 6, step + 1)
            draws.append(tuple(float(column[0]) for column in rows[2:]))
            workers.update(rows[1].tolist())
    assert workers == {0, 1}
    every = [d for rank in hvd.gather_objects(draws) for d in rank]
    assert len(every) == 12 * SIZE
    for column in range(3):  # Python, numpy, torch
        assert len({d[column] for d in every}) == 12 * SIZE


def test_workers_start_after_mpi() -> None:
    loader = hvd.DataLoader(list(range(8 * SIZE)), batch_per_rank=4, num_workers=1)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"
    assert sorted(flat(joined(epoch_of(loader)))) == list(range(8 * SIZE))


@several
def test_data_of_different_length_is_found_before_the_first_step() -> None:
    loader = hvd.DataLoader(Numbers(20 + (RANK == SIZE - 1)), batch_per_rank=4)
    with pytest.raises(OutOfSyncError, match=r"length of the data set is .*: 20; rank \d: 21"):
        next(iter(loader))


@several
def test_other_seed_is_found_before_the_first_step() -> None:
    with pytest.raises(OutOfSyncError, match="seed is"):
        next(iter(hvd.DataLoader(Numbers(20), batch_per_rank=4, seed=RANK)))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "arguments", "message"),
    [
        (Numbers(5), {}, "neither global_batch nor batch_per_rank"),
        (Numbers(5), {"batch_per_rank": 0}, "batch_per_rank=0"),
        (Numbers(5), {"batch_per_rank": 1, "global_batch": 1}, "give one"),
        (Numbers(5), {"batch_per_rank": 1, "batch_size": 3}, "batch_size=3"),
        (Numbers(5), {"batch_per_rank": 1, "sampler": []}, "sampler"),
        (Numbers(5), {"batch_per_rank": 1, "tail": "pad", "train": False}, "exactly once"),
        (Endless(), {"batch_per_rank": 1}, "Endless"),
        (5, {"batch_per_rank": 1}, "int was given"),
    ],
)
def test_bad_arguments(dataset: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hvd.DataLoader(dataset, **arguments)


def test_batch_weights_add_up_to_the_size() -> None:
    for counts in ([3, 2, 2], [1, 0, 0, 0], [5]):
        weights = [Batch(counts, rank, 9).weight for rank in range(len(counts))]
        assert sum(weights) == pytest.approx(len(counts))
    assert Batch([0, 0], 0, 4).weight == 0.0
