"""Sharding: cost per sample, first batch, resume and memory, beside torch's, torchdata's and tf.data's ways.

Each contender runs in a process of its own, since memory is measured and two frameworks do not share a process. All
give this rank's shuffled ids in batches of 64 as Python lists (tf.data: as numpy arrays).

- ``hvdkit``: ``ShardPlan.batches``. First batch and resume are out of 100 times as many samples as the others get.
- ``torch``: ``DistributedSampler`` in a ``BatchSampler``. It builds a list of all ids.
- ``torchdata``: ``StatefulDistributedSampler`` in a ``BatchSampler`` (left out where torchdata is not installed).
- ``tf.data``: ``Dataset.range(n).shard(size, rank).shuffle(10_000).batch(64)``: a local shuffle, not one of all
  samples; out of a hundredth of the samples, since its cost per sample is two orders higher.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.runner import finish, in_new_process, interleave, options, timed

BATCH = 64
Make = Callable[[int, int, int], Iterator[Any]]  # (length, size, first step) -> batches of rank 0


def hvdkit_batches(length: int, size: int, step: int) -> Iterator[Any]:
    from hvdkit.sharding import ShardPlan

    plan = ShardPlan(length=length, size=size, rank=0, batch_per_rank=BATCH, seed=1)
    return (ids.tolist() for ids in plan.batches(plan.position(0, step)))


def torch_batches(length: int, size: int, step: int) -> Iterator[Any]:
    from torch.utils.data import BatchSampler, DistributedSampler

    sampler: Any = DistributedSampler(range(length), size, 0, seed=1)  # type: ignore[arg-type]
    return itertools.islice(BatchSampler(sampler, BATCH, drop_last=False), step, None)


def torchdata_batches(length: int, size: int, step: int) -> Iterator[Any]:
    samplers = importlib.import_module("torchdata.stateful_dataloader.sampler")
    sampler = samplers.StatefulDistributedSampler(range(length), size, 0, seed=1)
    sampler.load_state_dict({"yielded": step * BATCH})
    return iter(samplers.BatchSampler(sampler, BATCH, drop_last=False))


def tf_batches(length: int, size: int, step: int) -> Iterator[Any]:
    import tensorflow as tf

    data = tf.data.Dataset.range(length).shard(size, 0).shuffle(10_000, seed=1).batch(BATCH)
    batches: Iterator[Any] = data.skip(step).as_numpy_iterator()
    return batches


@dataclass(frozen=True)
class Way:
    """A contender: the package it needs, its batches, and by how much its lengths differ from the stated one."""

    package: str
    make: Make
    epoch_part: float = 1.0
    start_part: float = 1.0


CONTENDERS = {
    "hvdkit": Way("numpy", hvdkit_batches, start_part=100),
    "torch": Way("torch", torch_batches),
    "torchdata": Way("torchdata", torchdata_batches),
    "tf.data": Way("tensorflow", tf_batches, epoch_part=0.01, start_part=0.01),
}


def worker(name: str, length: int) -> dict[str, float]:
    """All figures of one contender, in this process."""
    way = CONTENDERS[name]
    _drain(way.make(1000, 1, 0))  # imports and first-call costs belong to neither time nor memory
    start, middle = int(length * way.start_part), int(length * way.start_part) // 8 // BATCH // 2
    before = _peak_mib()
    figures = {"first batch, ms": 1e3 * timed(lambda: next(way.make(start, 8, 0)))}
    figures["extra memory for it, MiB"] = _peak_mib() - before
    figures["resume in mid-epoch, ms"] = 1e3 * timed(lambda: next(way.make(start, 8, middle)))
    for size in (1, 8):
        samples = int(length * way.epoch_part)
        epoch = partial(way.make, samples, size, 0)
        figures[f"epoch on {size} rank(s), ns/sample of the rank"] = (
            1e9 * size / samples * timed(partial(_time_of, epoch))
        )
    return figures


def _time_of(epoch: Callable[[], Iterable[Any]]) -> None:
    _drain(epoch())


def _drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # Linux counts in KiB


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        sys.stdout.write(json.dumps(worker(sys.argv[2], int(sys.argv[3]))) + "\n")
        return
    given = options("Sharding of a shuffled epoch").parse_args()
    length = 10**5 if given.quick else 10**7
    present = [name for name, way in CONTENDERS.items() if importlib.util.find_spec(way.package)]
    if len(present) < len(CONTENDERS):
        sys.stdout.write(f"left out, not installed: {', '.join(CONTENDERS.keys() - set(present))}\n")
    runs = {name: in_new_process("bench.bench_sharding", "--worker", name, str(length)) for name in present}
    results = interleave(runs, repeats=given.repeats, warmup=given.warmup)
    baseline = "torch" if "torch" in present else "hvdkit"
    finish(f"sharding, {length:g} samples, batches of {BATCH}", results, baseline, given.json)


if __name__ == "__main__":
    main()
