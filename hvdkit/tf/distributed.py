"""``DistributedOptimizer`` with the signature of ``horovod.tensorflow``, for any kind of optimizer."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvdkit.errors import UsageError


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = horovod.Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = horovod.global_process_set,
    scale_local_gradients: bool = True,
    *,
    lr_scale: str = "none",
    base_batch: int | None = None,
    global_batch: int | None = None,
) -> Any:
    """A distributed optimizer: for Keras 3 that of :mod:`hvdkit.tf.keras`, for TensorFlow 1 style Horovod's own."""
    common: dict[str, Any] = {
        "name": name,
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "sparse_as_dense": sparse_as_dense,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "average_aggregated_gradients": average_aggregated_gradients,
        "num_groups": num_groups,
        "groups": groups,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from hvdkit.tf.keras import DistributedOptimizer as ForKeras

        return ForKeras(optimizer, **common, lr_scale=lr_scale, base_batch=base_batch, global_batch=global_batch)
    if lr_scale != "none":
        raise UsageError("lr_scale is for optimizers of Keras 3; scale the rate of a TensorFlow 1 optimizer yourself.")
    return horovod.DistributedOptimizer(optimizer, use_locking=use_locking, **common)
