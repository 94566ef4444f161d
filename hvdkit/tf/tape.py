"""Gradient tapes for custom loops, reducing the way hvdkit's optimizers do.

Weighted by samples where the batch comes from ``hvd.dataset``, named by variable, sparse gradients with each row once.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvdkit.errors import UsageError
from hvdkit.tf.collectives import GradientReducer, identity, predivide_needs_average, times
from hvdkit.tf.data import active_dataset
from hvdkit.tf.sync import check_settings, check_signature, gradient_signature

# A tape is made anew for each step, its collectives must not be: equal settings share a reducer.
_checked: set[tuple[Any, ...]] = set()
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
    if predivide_needs_average(gradient_predivide_factor, op):
        raise UsageError(
            f"gradient_predivide_factor={gradient_predivide_factor} splits an average; use it with op=hvd.Average."
        )
    reducer = _shared_reducer(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups or num_groups or None,
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    kind = type(gradtape)
    if issubclass(kind, _ReducingTape):
        raise UsageError("this tape is distributed already; wrap it once.")
    tape: Any = object.__new__(type(kind.__name__, (_ReducingTape, kind), {}))
    # The new tape goes on with the recording of the old one.
    tape.__dict__.update(gradtape.__dict__, _reducer=reducer, _local_sources=set(), _scale_local=scale_local_gradients)
    return tape


class _ReducingTape:
    """Mixed in before the tape's own class."""

    _reducer: GradientReducer
    _local_sources: set[int]
    _scale_local: bool

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **others: Any
    ) -> Any:
        """As ``tf.GradientTape.gradient``, reduced over ranks; ``use_generic_names`` is Horovod's and not needed."""
        grads = super().gradient(target, sources, output_gradients, **others)  # type: ignore[misc]
        flat, variables = _flat(sources, grads), tf.nest.flatten(sources)
        shared = [i for i, v in enumerate(variables) if identity(v) not in self._local_sources]
        _check_once(self._reducer, [flat[i] for i in shared], [variables[i] for i in shared])
        size = self._reducer.process_set.size() if self._scale_local else 1
        reduced = [times(g, 1.0 / size) for g in flat]
        for i, grad in zip(
            shared, self._reducer([flat[i] for i in shared], [variables[i] for i in shared]), strict=True
        ):
            reduced[i] = grad
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of ``source`` to this rank: not reduced (but divided by the size, as in Horovod)."""
        self._local_sources.add(identity(source))

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """(source, gradient) pairs of the registered local sources, and those of the others."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        local = [pair for pair in pairs if identity(pair[0]) in self._local_sources]
        return local, [pair for pair in pairs if identity(pair[0]) not in self._local_sources]


def _check_once(reducer: GradientReducer, grads: list[Any], variables: list[Any]) -> None:
    """Before these gradients are reduced for the first time: ranks must have the same ones, and the same data."""
    if reducer.process_set.process_set_id != 0 or reducer.process_set.size() == 1:
        return
    signature = gradient_signature(grads, variables)
    if tuple(signature) not in _checked:
        data = active_dataset()
        with tf.init_scope():
            check_settings({"TensorFlow": tf.__version__, "data": None if data is None else data.plan.state()})
            check_signature(signature)
        _checked.add(tuple(signature))


def _flat(sources: Any, grads: Any) -> list[Any]:
    """Gradients in the order of ``tf.nest.flatten(sources)``; None and IndexedSlices are leaves."""
    if grads is None or not tf.nest.is_nested(sources):
        return [grads]
    keys = sources if isinstance(sources, dict) else None
    if keys is not None:
        return [leaf for key in sorted(keys) for leaf in _flat(keys[key], grads[key])]
    return [leaf for source, grad in zip(sources, grads, strict=True) for leaf in _flat(source, grad)]


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
