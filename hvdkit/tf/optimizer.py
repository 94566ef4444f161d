"""``DistributedOptimizer`` for Keras 3: the optimizer that was given, reducing its gradients in ``apply``.

Keras 3 has one door: ``fit``, ``train_on_batch``, a custom ``train_step`` and ``apply_gradients`` all end in
``optimizer.apply(gradients, variables)``. There the gradients are reduced first, so clipping, weight decay, EMA,
accumulation and the check of a loss scale all see what one process would see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as horovod
import keras
import tensorflow as tf
from keras.src import api_export
from keras.src.saving import object_registration

from hvdkit.arguments import one_of, whole
from hvdkit.errors import UsageError
from hvdkit.log import get_logger
from hvdkit.schedule import RULES
from hvdkit.tf.collectives import identity, make_reducer, predivide_needs_average, times
from hvdkit.tf.start import Distribution, scale_learning_rate, start
from hvdkit.tf.xla import keep_out_of_xla

_log = get_logger("hvdkit.tf")


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = horovod.Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = horovod.Average,
    backward_passes_per_step: int = 1,
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
    """A new optimizer like ``optimizer`` that reduces gradients over all ranks before it applies them.

    ``optimizer`` itself is not modified; its state, if it has any, is copied. Before the first update all ranks are
    checked to have the same model and settings, the reduction is proven, and rank 0's weights and optimizer state are
    broadcast. With batches of :func:`hvdkit.tf.dataset` the mean is over samples, else over ranks, as in Horovod.
    Models saved with it open in plain Keras.

    Args:
        optimizer: any optimizer of Keras 3, built-in or not; a ``LossScaleOptimizer`` goes inside, not around.
        name: of the new optimizer; by default the name of ``optimizer``.
        backward_passes_per_step, average_aggregated_gradients: become Keras' ``gradient_accumulation_steps``.
        num_groups: the old name of ``groups``.
        lr_scale: ``"none"``, ``"linear"`` or ``"sqrt"``: the learning rate of ``optimizer`` is meant for ``base_batch``
            and is scaled once to the global batch; what was done is printed on rank 0.
        base_batch: samples per update that the learning rate was chosen for.
        global_batch: samples per update over all ranks, accumulated ones included; known from ``hvd.dataset`` if used.
        others: as in Horovod.

    Raises:
        UsageError: not an optimizer of Keras 3, already distributed, an unknown rule, a setting out of range.
    """
    _check_arguments(optimizer, op, gradient_predivide_factor, groups or num_groups)
    one_of("lr_scale", lr_scale, RULES)
    if lr_scale != "none" and base_batch is None:
        raise UsageError(
            f'lr_scale="{lr_scale}" needs base_batch=, the samples per update that the rate was chosen for.'
        )
    config = optimizer.get_config()
    if name is not None:
        config["name"] = name
    passes = whole("backward_passes_per_step", backward_passes_per_step, 1)
    if passes > 1:
        config["gradient_accumulation_steps"] = passes

    def distribution(rule: str) -> Distribution:
        reducer = make_reducer(
            "optimizer",
            op=op,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups or num_groups or None,
            process_set=process_set,
            device_dense=device_dense,
            device_sparse=device_sparse,
        )
        # Horovod sums over the passes where Keras averages.
        factor = float(passes) if passes > 1 and not average_aggregated_gradients else 1.0
        return Distribution(reducer, rule, base_batch, global_batch, factor, scale_local_gradients)

    wrapped = _subclass(type(optimizer), lambda: distribution("none")).from_config(config)
    object.__setattr__(wrapped, "_hvd_state", distribution(lr_scale))
    _copy_state(optimizer, wrapped)
    if global_batch is not None or lr_scale == "none":
        scale_learning_rate(wrapped)
    return wrapped


class Reducing:
    """Mixed in before the optimizer's own class."""

    _hvd_new: Callable[[], Distribution]

    @property
    def _hvd(self) -> Distribution:
        # A copy made by from_config(get_config()) reduces as well; its rate has been scaled already.
        if "_hvd_state" not in self.__dict__:
            object.__setattr__(self, "_hvd_state", type(self)._hvd_new())
        state: Distribution = self.__dict__["_hvd_state"]
        return state

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce ``grads`` over all ranks, weighted by samples, then apply them as ever."""
        optimizer: Any = self
        grads = list(grads)
        variables = list(optimizer._trainable_variables if trainable_variables is None else trainable_variables)
        if len(grads) != len(variables) or not grads:
            return super().apply(grads, trainable_variables)  # type: ignore[misc]  # Keras explains what is wrong
        _refuse_branch()
        if not self._hvd.started:
            with tf.init_scope():
                if not optimizer.built:
                    optimizer.build(variables)
                start(optimizer, self._hvd, grads, variables)
        return super().apply(self._reduced(grads, variables), variables)  # type: ignore[misc]

    def _reduced(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        hvd = self._hvd
        shared = [i for i, v in enumerate(variables) if not hvd.is_local(v)]
        results = hvd.reducer([grads[i] for i in shared], [variables[i] for i in shared])
        size = hvd.reducer.process_set.size() if hvd.scale_local_gradients else 1
        reduced = [times(g, 1.0 / size) for g in grads]
        for i, grad in zip(shared, results, strict=True):
            reduced[i] = grad
        return [times(g, hvd.gradient_factor) for g in reduced]

    def register_local_var(self, var: Any) -> None:
        """Leave ``var`` to this rank: its gradient is not reduced (but divided by the size, as in Horovod)."""
        self._hvd.local_variables.add(identity(var))


def _refuse_branch() -> None:
    """A reduction inside a branch that ranks take by their own values would wait for ever."""
    if type(tf.compat.v1.get_default_graph()).__name__ == "CondBranchFuncGraph":
        raise UsageError(
            "DistributedOptimizer was called inside a condition, as a keras.optimizers.LossScaleOptimizer around it "
            "does (Keras adds one for the policy mixed_float16); ranks may decide differently there. Wrap the other "
            "way round: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))."
        )


def _subclass(base: type, new: Callable[[], Distribution]) -> Any:
    """A class of the same name and module, so that models saved with it open where there is no hvdkit."""
    # Keras finds its own classes by their public name.
    public = api_export.get_name_from_symbol(base)
    module = base.__module__ if public is None else public.rpartition(".")[0]
    body = {
        "__module__": module,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_hvd_new": staticmethod(new),
    }
    made = type(base.__name__, (Reducing, base), body)
    registered = object_registration.get_registered_name(base)
    if registered != base.__name__:
        object_registration.GLOBAL_CUSTOM_NAMES[made] = registered
    keep_out_of_xla(Reducing)
    return made


def _copy_state(source: Any, target: Any) -> None:
    """Slots, counter and rate of an optimizer that has been used or loaded before it was wrapped."""
    if not source.built:
        return
    target.build(list(source._trainable_variables))
    values = {v.path.partition("/")[2]: v for v in source.variables}
    for mine in target.variables:
        theirs = values.get(mine.path.partition("/")[2])
        if theirs is not None:
            mine.assign(theirs)


def _check_arguments(optimizer: Any, op: Any, predivide: float, groups: Any) -> None:
    if isinstance(optimizer, Reducing):
        raise UsageError("this optimizer is distributed already; wrap it once.")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"a {type(optimizer).__module__}.{type(optimizer).__name__} was given; an optimizer of Keras 3 "
            "(keras.optimizers) was expected."
        )
    if op not in (horovod.Average, horovod.Sum):
        raise UsageError("op must be hvd.Average or hvd.Sum for a Keras optimizer.")
    if predivide_needs_average(predivide, op):
        raise UsageError(f"gradient_predivide_factor={predivide} splits an average; use it with op=hvd.Average.")
    if not isinstance(groups, list) and groups is not None and (not isinstance(groups, int) or groups < 0):
        raise UsageError(
            f"groups={groups!r} was given; a number of groups or a list of lists of variables was expected."
        )
