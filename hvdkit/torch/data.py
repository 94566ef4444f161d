"""``DataLoader``: torch's loader over the plan of global batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from horovod.torch.mpi_ops import global_process_set
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hvdkit.arguments import whole
from hvdkit.errors import UsageError
from hvdkit.sharding import ShardPlan
from hvdkit.torch.batch import Batch, set_current
from hvdkit.torch.runtime import derive_seed, world
from hvdkit.torch.sync import require_equal

# What the plan decides; torch's loader must not be told otherwise.
_PLANNED = {
    "batch_size": "batch_per_rank= or global_batch=",
    "sampler": "shuffle= and seed=",
    "batch_sampler": "shuffle=, seed= and the batch",
    "drop_last": 'tail="drop"',
    "generator": "seed=",
}


class DataLoader:
    """Batches of map-style data: each sample once per epoch over all ranks, in an order that does not depend on them.

    A ``for`` loop runs from the loader's position to the end of the epoch; the next one runs through the next epoch,
    in another order. After ``break`` the next loop goes on with the following batch. Where a rank's part of a short
    last batch is empty, it gets two filler samples, whose gradient does not count (:attr:`batch` tells).

    With ``train=False`` each loop shows every sample once over all ranks, without fillers: ranks whose part of the last
    batch is empty end one batch earlier, so a loop body must not communicate; reduce metrics after the loop.

    Args:
        dataset: with ``__len__`` and ``__getitem__``; of the same length on all ranks.
        batch_per_rank, global_batch: samples per step, on each rank or over all ranks; give one.
        shuffle: a new order per epoch; default: as ``train``.
        seed: of the order, equal on all ranks, and of the loader workers' random numbers, which differ by rank,
            worker and batch. Without workers the data set draws from this process's generators.
        tail: what happens to a short last batch: ``"exact"``, ``"pad"`` or ``"drop"``, see :class:`hvdkit.ShardPlan`.
        train: False for evaluation.
        process_set: the ranks that share the data; default: all.
        options: for torch's loader (``num_workers``, ``pin_memory``, ``collate_fn``, ...). Workers are started by
            ``forkserver`` unless ``multiprocessing_context`` says otherwise: a process forked while MPI runs can hang.

    Raises:
        UsageError: an option that the plan decides, data without a length, a batch or seed out of range.
        OutOfSyncError: at the first loop, on every rank: ranks have data of different lengths or other settings.
    """

    def __init__(
        self,
        dataset: Any,
        batch_per_rank: int | None = None,
        *,
        global_batch: int | None = None,
        shuffle: bool | None = None,
        seed: int = 0,
        tail: str = "exact",
        train: bool = True,
        process_set: Any = global_process_set,
        **options: Any,
    ) -> None:
        world()  # says what to do if init() was forgotten
        _check_options(dataset, options)
        if not train and tail != "exact":
            raise UsageError(f"tail={tail!r} was given with train=False; evaluation uses each sample exactly once.")
        self.plan = ShardPlan(
            length=len(dataset), size=process_set.size(), rank=process_set.rank(), seed=seed, tail=tail,
            global_batch=global_batch, batch_per_rank=batch_per_rank,  # type: ignore[arg-type]
            shuffle=train if shuffle is None else shuffle,
        )  # fmt: skip
        self.dataset = dataset
        self.train = train
        self.position = 0  # samples handed out since the start of training, over all ranks
        self.batch: Batch | None = None  # the one handed out last
        self._process_set, self._is_checked = process_set, False
        self._sampler = _PlanSampler(self.plan, train)
        if options.get("num_workers"):
            options.setdefault("multiprocessing_context", "forkserver")
        # Its own generator: each loop draws from it, which would shift the numbers of a resumed run.
        own = torch.Generator()
        self._loader: TorchLoader[Any] = TorchLoader(
            _Seeded(dataset), batch_sampler=self._sampler, generator=own, **options
        )

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.plan.global_batch

    @property
    def count(self) -> int:
        """This rank's samples in the batch handed out last: what a mean over it weighs; 0 for fillers."""
        return 0 if self.batch is None else self.batch.count

    @property
    def epoch(self) -> int:
        """The epoch, from 0, that the next batch belongs to."""
        return self.plan.locate(self.position)[0]

    def __len__(self) -> int:
        """Batches per full epoch; in training the same on all ranks."""
        return self.plan.steps if self.train else sum(1 for _ in iter(self._sampler))

    def __iter__(self) -> Iterator[Any]:
        self._check_ranks()
        return self._training() if self.train else iter(self._loader)

    def __getattr__(self, name: str) -> Any:
        """What torch's loader knows: ``num_workers``, ``collate_fn``, ``pin_memory``, ..."""
        if name.startswith("_"):  # also while this object is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. Not needed in a training loop: epochs advance by themselves."""
        self.position = self.plan.position(whole("epoch", epoch))

    def state_dict(self) -> dict[str, Any]:
        """The position and what it means. Counts what was handed out, not what workers have loaded ahead."""
        return {"position": self.position, **self.plan.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the very next sample, on any number of ranks.

        Raises:
            UsageError: the state is of other data, another order or another batch; with both values.
        """
        self.plan.check_state(state)
        self.position = whole("position", state.get("position"))

    def _training(self) -> Iterator[Any]:
        position = self.position
        self._sampler.start = position
        steps = self.plan.remaining_steps(position)
        for step, data in enumerate(self._loader, 1):
            counts = self.plan.counts_at(position).tolist()
            self.batch = Batch(counts, self.plan.rank, self.plan.global_batch, is_last=step == steps)
            self.position = position = self.plan.advance(position)
            set_current(self.batch)
            yield data
        self.batch = None
        set_current(None)

    def _check_ranks(self) -> None:
        if not self._is_checked and self.plan.size > 1:
            facts = [("the length of the data set", str(self.plan.length))]
            facts += [(name, str(value)) for name, value in self.plan.state().items() if name != "length"]
            require_equal([*facts, ("train", str(self.train))], "the data loader", process_set=self._process_set)
        self._is_checked = True


class Ids(list[int]):
    """The samples of one batch, with the seed that a loader worker takes before it loads them."""

    seed: int = 0


class _PlanSampler:
    """A batch sampler: this rank's ids from ``start`` to the end of its epoch."""

    def __init__(self, plan: ShardPlan, train: bool) -> None:
        self.plan, self.train, self.start = plan, train, 0

    def __len__(self) -> int:
        return self.plan.remaining_steps(self.start)

    def __iter__(self) -> Iterator[Ids]:
        position = self.start
        for ids in self.plan.batches(position):
            batch = Ids(ids.tolist() or (self._filler() if self.train else ()))
            batch.seed = derive_seed(self.plan.seed, self.plan.rank, position)
            position = self.plan.advance(position)
            if batch:
                yield batch

    def _filler(self) -> Sequence[int]:
        # two, since batch normalisation refuses to train on one
        return (0, min(1, self.plan.length - 1))


class _Seeded(Dataset[Any]):
    """The user's data set; in a loader worker each batch first seeds the generators that augmentation draws from."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, ids: Ids) -> Any:
        if get_worker_info() is not None:
            random.seed(ids.seed)
            np.random.seed(ids.seed % 2**32)
            torch.manual_seed(ids.seed)
        many = getattr(self.dataset, "__getitems__", None)
        return many(ids) if many is not None else [self.dataset[i] for i in ids]


def _check_options(dataset: Any, options: Mapping[str, Any]) -> None:
    for name, instead in _PLANNED.items():
        if name in options:
            raise UsageError(
                f"{name}={options[name]!r} was given; the plan of global batches decides it: use {instead}."
            )
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"a data set of type {type(dataset).__name__} was given; one with __len__ and __getitem__ was expected."
        )
