"""Lists of files split over ranks and loader workers, each record exactly once per epoch.

For files whose records can be numbered, ``hvdkit.records`` with a :class:`~hvdkit.sharding.ShardPlan` is the better
way: exact batches, a shuffle of everything, resume on any number of ranks. What is here is for files that can only be
read from front to back.
"""

from __future__ import annotations

import glob
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from hvdkit.arguments import one_of, whole
from hvdkit.errors import UsageError
from hvdkit.permutation import Permutation

Record = TypeVar("Record")
SPLITS = ("auto", "file", "record")


def list_files(patterns: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """The files of some paths and glob patterns, sorted: what a directory lists first differs by host.

    Raises:
        UsageError: a path or pattern without a file, or a file that comes twice.
    """
    given = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    found: list[str] = []
    for pattern in [os.fspath(path) for path in given]:
        matches = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)  # noqa: PTH207  Path.glob refuses absolute patterns
        if not matches:
            raise UsageError(f"{pattern!r} was given; no file of that name is here, and it matches none as a pattern.")
        found += matches
    _refuse_repeats(found)
    return sorted(found)


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """Which share of the records a loader worker of a rank reads. A share is a (rank, worker) pair.

    Args:
        files: the same list on all ranks; it is sorted here, so its order does not matter.
        size, rank: number of ranks, and this one.
        workers, worker: loader workers per rank, and this one; 1 and 0 where the rank reads by itself.
        shuffle, seed: a new order of files for each epoch (for records see :func:`shuffled`).
        split: ``"file"``: every share reads files of its own, share s those at s, s + shares, … of the order, so counts
            differ as files do. ``"record"``: every share reads all files and keeps every ``shares``-th record, so
            counts differ by at most one. ``"auto"``: by file if there is at least one for each share.

    Raises:
        UsageError: a number out of range, no files, a file that comes twice.
    """

    files: Sequence[str]
    size: int
    rank: int
    workers: int = 1
    worker: int = 0
    shuffle: bool = True
    seed: int = 0
    split: str = "auto"

    def __post_init__(self) -> None:
        size, workers = whole("size", self.size, 1), whole("workers", self.workers, 1)
        whole("rank", self.rank, 0, size - 1)
        whole("worker", self.worker, 0, workers - 1)
        whole("seed", self.seed, 0, 2**64 - 1)
        _refuse_repeats(self.files)
        if not self.files:
            raise UsageError("an empty list of files was given; at least one was expected.")
        object.__setattr__(self, "files", tuple(sorted(self.files)))
        if one_of("split", self.split, SPLITS) == "auto":
            object.__setattr__(self, "split", "file" if len(self.files) >= self.shares else "record")

    @property
    def shares(self) -> int:
        """Ranks times workers."""
        return self.size * self.workers

    @property
    def share(self) -> int:
        """This one, in ``[0, shares)``: the workers of a rank follow each other."""
        return self.rank * self.workers + self.worker

    def order(self, epoch: int) -> list[str]:
        """All files in the order of ``epoch``; it depends on the seed, the epoch and the list only."""
        places = np.arange(len(self.files))
        return [self.files[i] for i in (Permutation(len(places), self.seed, epoch)(places) if self.shuffle else places)]

    def mine(self, epoch: int) -> list[str]:
        """The files that this share reads in ``epoch``."""
        order = self.order(epoch)
        return order[self.share :: self.shares] if self.split == "file" else order

    def records(self, epoch: int, read: Callable[[str], Iterable[Record]], start: int = 0) -> Iterator[Record]:
        """This share's records of ``epoch``; ``read`` gives those of one file in a fixed order.

        Args:
            start: records of the epoch that all shares together have passed; the next ones follow, also on another
                number of shares. Only for ``split="record"``: by file there is no common order.
        """
        start = whole("start", start)
        if start and self.split == "file":
            raise UsageError(
                f"start={start} was given; only split='record' can start inside an epoch (or use ShardPlan)."
            )
        stream = itertools.chain.from_iterable(map(read, self.mine(epoch)))
        return stream if self.split == "file" else itertools.islice(stream, start + self.share, None, self.shares)


def shuffled(
    records: Iterable[Record], buffer: int, *, seed: int = 0, epoch: int = 0, share: int = 0
) -> Iterator[Record]:
    """``records`` in an order mixed over ``buffer`` of them; each comes once. Holds at most ``buffer`` records.

    A record leaves the full buffer with equal chance for each in it, so it can come early by at most ``buffer``
    places. The order depends on (seed, epoch, share, buffer) only.
    """
    buffer = whole("buffer", buffer, 1)
    # random.random() of a given seed is fixed by Python's documentation, unlike its other methods
    draw = random.Random(f"{whole('seed', seed)} {whole('epoch', epoch)} {whole('share', share)}").random
    held: list[Record] = []
    for record in records:
        held.append(record)
        if len(held) == buffer:
            yield _take(held, draw())
    while held:
        yield _take(held, draw())


def _take(held: list[Record], chance: float) -> Record:
    place = int(chance * len(held))
    held[place], held[-1] = held[-1], held[place]
    return held.pop()


def _refuse_repeats(files: Sequence[str]) -> None:
    repeated = sorted({name for name in files if files.count(name) > 1}) if len(set(files)) < len(files) else []
    if repeated:
        raise UsageError(
            f"{repeated[0]!r} comes {files.count(repeated[0])} times in the list of files; once was expected."
        )
