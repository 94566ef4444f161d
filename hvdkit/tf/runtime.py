"""Start of a TensorFlow process: Horovod, launcher check, GPU, seeds, abort on failure."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

from hvdkit import log
from hvdkit.abort import install_abort
from hvdkit.arguments import whole
from hvdkit.errors import UsageError, WorldError
from hvdkit.log import get_logger
from hvdkit.world import World, check_size, declared_world

_Item = TypeVar("_Item")
_log = get_logger("hvdkit.tf")
_world: World | None = None


def init(comm: Any = None, process_sets: Any = None, *, seed: int | None = None) -> World:
    """Start Horovod and make this process a proper member of its job; calling it again returns the same World.

    Compares the number of ranks with what the launcher declared, gives each local rank its GPU (with memory growth)
    where there is one, and makes a failing rank end the job.

    Args:
        comm: as in Horovod: None for all ranks, a list of ranks, or an mpi4py communicator.
        process_sets: as in Horovod: None, a list of ``ProcessSet``, or ``"dynamic"``.
        seed: in [0, 2**32). Seeds Python, numpy, TensorFlow and Keras: rank 0 exactly as one process would be seeded,
            so that the weights that it broadcasts are those of one process; the other ranks differently, so that
            dropout and augmentation differ. None leaves all generators alone.

    Raises:
        WorldError: Horovod's size is not the one that the launcher declared.
        UsageError: a bad seed.
    """
    global _world
    seed = None if seed is None else whole("seed", seed, 0, 2**32 - 1)
    if _world is None or not horovod.is_initialized():
        horovod.init(comm, process_sets)
        _world = _make_world(whole_job=comm is None)
    if seed is not None:
        seed_generators(seed, _world.rank)
    return _world


def world() -> World:
    """The World that :func:`init` returned.

    Raises:
        WorldError: :func:`init` has not been called.
    """
    if _world is None or not horovod.is_initialized():
        raise WorldError("hvdkit is not initialised in this process; call hvd.init() first.")
    return _world


def _make_world(whole_job: bool) -> World:
    rank, size = horovod.rank(), horovod.size()
    log.set_rank(rank)
    # A communicator of some ranks is smaller than the job on purpose.
    declared = check_size(size, os.environ) if whole_job else declared_world(os.environ)
    install_abort(bool(horovod.mpi_enabled()), rank, size)
    return World(
        rank=rank,
        size=size,
        local_rank=horovod.local_rank(),
        local_size=horovod.local_size(),
        cross_rank=horovod.cross_rank(),
        cross_size=horovod.cross_size(),
        device=_pin_gpu(horovod.local_rank()),
        launcher="none" if declared is None else declared.launcher.name,
    )


def _pin_gpu(local_rank: int) -> str:
    """Show this process only the GPU of its local rank; returns the name of the device to compute on."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return "/CPU:0"
    # One visible GPU means that the launcher has given each process its own.
    mine = gpus[0] if len(gpus) == 1 else gpus[local_rank] if local_rank < len(gpus) else None
    if mine is None:
        raise WorldError(
            f"local rank {local_rank} has no GPU: this host shows {len(gpus)}. Start as many ranks "
            "per host as it has GPUs."
        )
    try:
        tf.config.set_visible_devices([mine], "GPU")
        tf.config.experimental.set_memory_growth(mine, True)
    except RuntimeError as problem:
        raise UsageError(
            f"the GPU of local rank {local_rank} cannot be chosen any more ({problem}); call hvd.init() before the "
            "first tensor, model or dataset is made."
        ) from problem
    return "/GPU:0"


def seed_for_rank(seed: int, rank: int) -> int:
    """``seed`` itself on rank 0; on the others a number in [0, 2**32) that numpy's SeedSequence derives from it."""
    if rank == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(rank,)).generate_state(1)[0])


def seed_generators(seed: int, rank: int) -> None:
    """Seed Python, numpy, TensorFlow and Keras for one rank."""
    own = seed_for_rank(seed, rank)
    random.seed(own)
    np.random.seed(own)
    tf.random.set_seed(own)
    # Keras draws its own seeds from Python's generator and from this one.
    tf.keras.utils.set_random_seed(own)


def progress(iterable: Iterable[_Item], description: str = "", total: int | None = None) -> Iterator[_Item]:
    """Iterate with a progress bar on rank 0, and without one elsewhere. Never communicates.

    ``total`` is the number of items if the iterable has no length. On no terminal the bar keeps quiet.
    """
    if log.current_rank() != 0:
        yield from iterable
        return
    from rich.progress import track  # only the rank that shows it pays for it

    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    yield from track(iterable, description=description or "working", total=total)
