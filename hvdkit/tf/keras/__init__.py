"""Drop-in for ``horovod.tensorflow.keras`` on Keras 3: every public name of it, the wrong ones made right.

Adds ``HVDKIT_NAMES``, the same as :mod:`hvdkit.tf`.
"""

from __future__ import annotations

from hvdkit.tf.backend import require_keras_3, require_tensorflow_keras

require_tensorflow_keras()
require_keras_3()

from horovod.tensorflow.keras import (  # noqa: E402
    Average,
    Compression,
    ProcessSet,
    Sum,
    add_process_set,
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    elastic,
    global_process_set,
    gloo_built,
    gloo_enabled,
    is_initialized,
    is_version_greater_equal_than,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

from hvdkit.tf import (  # noqa: E402
    HVDKIT_NAMES,
    World,
    check_in_sync,
    dataset,
    init,
    print_on_rank0,
    progress,
    reduce_metrics,
    world,
)
from hvdkit.tf.keras import callbacks  # noqa: E402
from hvdkit.tf.keras.models import load_model  # noqa: E402
from hvdkit.tf.optimizer import DistributedOptimizer  # noqa: E402
from hvdkit.tf.schedule import LRSchedule  # noqa: E402
from hvdkit.tf.training_state import TrainingState  # noqa: E402

__all__ = [
    "HVDKIT_NAMES",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "LRSchedule",
    "ProcessSet",
    "Sum",
    "TrainingState",
    "World",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "check_in_sync",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "dataset",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_initialized",
    "is_version_greater_equal_than",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "print_on_rank0",
    "progress",
    "rank",
    "reduce_metrics",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "world",
]
