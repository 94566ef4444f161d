"""Drop-in for ``horovod.tensorflow``: every public name of it, the wrong ones made right, and ``HVDKIT_NAMES``.

The names that hvdkit adds are the same as in ``hvdkit.torch`` (``dataset`` stands for its ``DataLoader``).
"""

from __future__ import annotations

import tensorflow as _tf

from hvdkit.build_stamp import require_build
from hvdkit.tf.backend import require_tensorflow_keras

require_tensorflow_keras()
require_build("tensorflow", _tf.__version__)

import importlib  # noqa: E402
from typing import Any  # noqa: E402

from horovod.tensorflow import (  # noqa: E402
    Adasum,
    Average,
    Compression,
    LocalGradientAggregationHelper,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    ccl_built,
    check_extension,
    check_num_rank_power_of_2,
    compression,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    elastic,
    functions,
    global_process_set,
    gloo_built,
    gloo_enabled,
    gpu_available,
    gradient_aggregation,
    gradient_aggregation_eager,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    handle_average_backwards_compatibility,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_ops,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    reducescatter,
    refs_to_vars,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    size_op,
    split_list,
    start_timeline,
    stop_timeline,
    sync_batch_norm,
    util,
    vars_to_refs,
)

from hvdkit.log import print_on_rank0  # noqa: E402
from hvdkit.tf.batch_norm import SyncBatchNormalization  # noqa: E402
from hvdkit.tf.collectives import broadcast_variables  # noqa: E402
from hvdkit.tf.data import dataset  # noqa: E402
from hvdkit.tf.metrics import reduce_metrics  # noqa: E402
from hvdkit.tf.runtime import init, progress, world  # noqa: E402
from hvdkit.tf.sync import check_in_sync  # noqa: E402
from hvdkit.tf.tape import DistributedGradientTape, PartialDistributedGradientTape  # noqa: E402
from hvdkit.world import World  # noqa: E402

HVDKIT_NAMES = (
    "LRSchedule",
    "TrainingState",
    "World",
    "check_in_sync",
    "dataset",
    "print_on_rank0",
    "progress",
    "reduce_metrics",
    "world",
)
"""What hvdkit adds to Horovod's names."""

# These need Keras 3; a loop without Keras does not.
_LAZY = {
    "DistributedOptimizer": "hvdkit.tf.distributed",
    "LRSchedule": "hvdkit.tf.schedule",
    "TrainingState": "hvdkit.tf.training_state",
    "keras": "",
}

__all__ = [
    "HVDKIT_NAMES",
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LRSchedule",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "TrainingState",
    "World",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "check_in_sync",
    "check_num_rank_power_of_2",
    "compression",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "dataset",
    "ddl_built",
    "elastic",
    "functions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "gradient_aggregation",
    "gradient_aggregation_eager",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "keras",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "print_on_rank0",
    "process_set_included_op",
    "progress",
    "rank",
    "rank_op",
    "reduce_metrics",
    "reducescatter",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "split_list",
    "start_timeline",
    "stop_timeline",
    "sync_batch_norm",
    "util",
    "vars_to_refs",
    "world",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hvdkit.tf' has no attribute {name!r}")
    if name == "keras":
        return importlib.import_module("hvdkit.tf.keras")
    return getattr(importlib.import_module(_LAZY[name]), name)
