"""Non-trainable weights, such as the moving averages of batch normalisation, made equal on all ranks.

Each rank's moving statistics come from its own samples; only gradients are reduced. So they are averaged before they
are used to evaluate and before they are saved: floating ones by the mean over ranks, others are rank 0's.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvdkit.tf.collectives import as_tf_variable, broadcast_variables


def average_statistics(model: Any) -> None:
    """Average the non-trainable weights of ``model`` over ranks. Collective."""
    if horovod.size() == 1:
        return
    variables = [as_tf_variable(v) for v in model.non_trainable_weights]
    floating = [v for v in variables if v.dtype.is_floating]
    if floating:
        means = horovod.grouped_allreduce([v.read_value() for v in floating], name="hvdkit.statistics")
        for variable, mean in zip(floating, means, strict=True):
            variable.assign(mean)
    rest = [v for v in variables if not v.dtype.is_floating]
    if rest:
        broadcast_variables(rest, root_rank=0)


def has_statistics(model: Any) -> bool:
    """Whether there is anything to average."""
    return any(tf.as_dtype(v.dtype).is_floating for v in model.non_trainable_weights)
