"""Gradient tapes for custom loops: Horovod's, reducing the way hvdkit's optimizers do.

Weighted by samples where the batch comes from ``hvd.dataset``, named by variable, sparse gradients with each row once.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod

from hvdkit.errors import UsageError
from hvdkit.tf.collectives import GradientReducer, identity

# A tape is made anew for each step, its collectives must not be: equal settings share a reducer.
_reducers: dict[tuple[Any, ...], GradientReducer] = {}


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = horovod.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = horovod.global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape like ``gradtape`` whose ``gradient()`` is reduced over all ranks. Arguments as in Horovod.

    With a batch drawn from ``hvd.dataset``, Average is the mean over the samples of the global batch, in eager code
    and in ``tf.function``; with others it is the mean over ranks.
    """
    tape = horovod.DistributedGradientTape(
        gradtape,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups or num_groups or None,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    # The one function by which Horovod's tape reduces.
    if not hasattr(tape, "_allreduce_grads"):
        raise UsageError("this Horovod's gradient tape is not that of 0.28; run `hvdkit install-horovod`.")
    tape._allreduce_grads = _shared_reducer(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups or num_groups or None,
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    return tape


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = horovod.Compression.none,
    sparse_as_dense: bool = False,
    op: Any = horovod.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = horovod.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As :func:`DistributedGradientTape`, but the weights of ``local_layers`` (one or several) stay this rank's own."""
    layers = (
        []
        if local_layers is None
        else list(local_layers)
        if isinstance(local_layers, list | tuple | set)
        else [local_layers]
    )
    if not all(hasattr(layer, "trainable_weights") for layer in layers):
        raise UsageError(f"local_layers={local_layers!r} was given; a Keras layer or a list of layers was expected.")
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for layer in layers:
        for weight in layer.trainable_weights:
            tape.register_local_source(weight)
    return tape


def _shared_reducer(**settings: Any) -> GradientReducer:
    groups = settings["groups"]
    plain = tuple(tuple(identity(v) for v in g) for g in groups) if isinstance(groups, list) else groups
    key = tuple(settings[k] for k in settings if k not in ("groups", "process_set"))
    key += (plain, settings["process_set"].process_set_id)
    if key not in _reducers:
        _reducers[key] = GradientReducer("hvdkit.tape", **settings)
    return _reducers[key]
