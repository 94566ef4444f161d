"""Start-up: Horovod's ``init`` plus everything that a job needs before its first tensor."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Sequence
from typing import Any

import horovod.torch as _hvd
import numpy as np
import torch

from hvdkit.abort import install_abort
from hvdkit.errors import UsageError, WorldError
from hvdkit.log import get_logger, set_rank
from hvdkit.world import World, check_size

_world: World | None = None


def init(comm: Any = None, process_sets: Any = None, *, seed: int | None = None) -> World:
    """Start Horovod and say who this process is. May be called again: the second call changes nothing (but seeds).

    Compares the size with what the launcher declared, makes rank 0 the one that logs, lets a failing rank end the
    whole job, and pins the GPU ``local_rank`` where there is one.

    Args:
        comm, process_sets: as in ``horovod.torch.init``.
        seed: seeds Python, numpy and torch. Rank 0 gets the seed itself, so the weights it creates (and broadcasts)
            are those of one process; the others get seeds derived from it, so dropout and augmentation differ by
            rank. Without it the generators are left alone.

    Raises:
        WorldError: Horovod runs another number of processes than the launcher started.
    """
    global _world
    _refuse_loader_worker()
    if _world is None or not _hvd.is_initialized():
        _hvd.init(comm, process_sets) if process_sets is not None else _hvd.init(comm)
        rank, size = _hvd.rank(), _hvd.size()
        set_rank(rank)
        install_abort(_hvd.mpi_enabled(), rank, size)
        # With a communicator of one's own the launcher's number is not the one to expect.
        declared = check_size(size, os.environ) if comm is None else None
        _world = World(
            rank, size, _hvd.local_rank(), _hvd.local_size(), _hvd.cross_rank(), _hvd.cross_size(),
            _pin_device(), declared.launcher.name if declared else "none",
        )  # fmt: skip
    if seed is not None:
        seed_everything(seed, _world.rank)
    return _world


def world() -> World:
    """The :class:`World` that :func:`init` returned.

    Raises:
        WorldError: ``init()`` has not been called, or Horovod was shut down.
    """
    if _world is None or not _hvd.is_initialized():
        raise WorldError("hvdkit.torch is not started: call hvd.init() at the top of the script.")
    return _world


def seed_everything(seed: int, rank: int) -> None:
    """Seed Python's, numpy's and torch's generators: rank 0 with ``seed``, others with one derived for their rank."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed={seed!r} was given; a whole number of at least 0 was expected.")
    derived = seed if rank == 0 else derive_seed(seed, rank)
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived % 2**64)


def derive_seed(seed: int, *key: int) -> int:
    """A 64-bit seed for the stream ``key`` of ``seed``; different keys give independent streams."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0])


def _pin_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if _hvd.size() > 1 and not _hvd.cuda_built():
        get_logger().warning("this Horovod was built without CUDA and cannot reduce on the GPU: training on the CPU")
        return torch.device("cpu")
    local_rank, count = _hvd.local_rank(), torch.cuda.device_count()
    if local_rank >= count > 1:
        get_logger().warning("local rank %d shares one of %d GPUs: start at most one rank per GPU", local_rank, count)
    device = torch.device("cuda", local_rank % count)  # one visible GPU per process is index 0 for every local rank
    torch.cuda.set_device(device)
    return device


def _refuse_loader_worker() -> None:
    """A script without a main guard runs again in each spawned loader worker; there it must not start Horovod."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "hvd.init() runs inside a data-loading worker, which imports the script again. Put the script's code "
            'under `if __name__ == "__main__":`, or give the loader multiprocessing_context="fork".'
        )


def ranks_of(process_set: Any) -> Sequence[int]:
    """The job's ranks in a Horovod process set, in order."""
    return list(process_set.ranks) if process_set.ranks is not None else list(range(process_set.size()))
