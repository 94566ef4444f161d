"""What happens once, before a distributed optimizer's first update.

Equal models and settings or an error; the learning rate scaled; the reduction proven; rank 0's values everywhere. All
of it runs while the first step is being traced, before anything of that step is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as horovod
import keras
import tensorflow as tf

from hvdkit.errors import OutOfSyncError, UsageError
from hvdkit.log import get_logger
from hvdkit.schedule import Scaling, Schedule
from hvdkit.tf.collectives import GradientReducer, as_tf_variable, batch_share, broadcast_variables, identity
from hvdkit.tf.data import active_dataset
from hvdkit.tf.sync import check_settings, check_signature, gradient_signature

_log = get_logger("hvdkit.tf")


@dataclass
class Distribution:
    """What a distributed optimizer knows beyond the optimizer: how to reduce and to scale, and whether it has started.

    ``gradient_factor`` multiplies every reduced gradient; ``scaling`` and ``base_lr`` are None until they are applied.
    """

    reducer: GradientReducer
    rule: str
    base_batch: int | None
    global_batch: int | None
    gradient_factor: float = 1.0
    scale_local_gradients: bool = True
    local_variables: set[int] = field(default_factory=set)
    kept_variables: set[int] = field(default_factory=set)  # reduced, but not broadcast
    checked: bool = False
    started: bool = False
    scaling: Scaling | None = None
    base_lr: float | None = None
    announced: bool = False

    def is_local(self, variable: Any) -> bool:
        """Whether ``variable`` was registered as this rank's own."""
        return identity(variable) in self.local_variables


def start(optimizer: Any, hvd: Distribution, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Check, scale, prove, broadcast. Collective; ``grads`` may be those of a graph under construction.

    A model that is built in that graph has no values yet. TensorFlow then gives it some and traces the function again,
    and that trace runs. What needs values waits for it; what makes variables is allowed in the first trace only.
    """
    process_set = hvd.reducer.process_set
    # Ranks outside the set take no part, so what follows is only for the set of all ranks.
    is_shared = process_set.process_set_id == 0 and process_set.size() > 1
    shared = [(g, v) for g, v in zip(grads, variables, strict=True) if not hvd.is_local(v)]
    if not hvd.checked:
        scale_learning_rate(optimizer)
        announce(optimizer)
        if is_shared:
            _check_settings(optimizer)
            check_signature(gradient_signature([g for g, _ in shared], [v for _, v in shared]))
            prove_reduction(hvd.reducer)
        hvd.checked = True
    if not all(_has_value(v) for v in variables):
        return
    if is_shared:
        owned = [v for _, v in shared if identity(v) not in hvd.kept_variables]
        broadcast_state(owned, optimizer, root_rank=0)
    hvd.started = True


def _has_value(variable: Any) -> bool:
    return bool(as_tf_variable(variable).is_initialized())


def broadcast_state(variables: Sequence[Any], optimizer: Any, root_rank: int) -> None:
    """Give every rank the root's values of ``variables`` and of the optimizer's slots, counters and rate."""
    owned = list(variables) + ([] if optimizer is None else list(optimizer.variables))
    if owned and horovod.size() > 1:
        broadcast_variables(owned, root_rank)


def prove_reduction(reducer: GradientReducer) -> None:
    """Reduce a gradient whose result is known, the way the optimizer's own are reduced.

    Raises:
        OutOfSyncError: the result is not the mean (or sum) over ranks.
    """
    rank, size = horovod.rank(), horovod.size()
    share = batch_share()
    before = share.numpy()
    share.assign(1.0)
    probe = tf.Variable(tf.zeros(3), trainable=False, name="hvdkit_probe")
    result = reducer([tf.fill([3], float(rank + 1))], [probe])[0].numpy()
    share.assign(before)
    expected = (size + 1) / 2 * (size if reducer.op == horovod.Sum else 1)
    # Compression to 16 bits keeps three digits.
    if not abs(result - expected).max() <= 1e-2 * expected:
        raise OutOfSyncError(
            f"the self-test of the reduction failed on rank {rank}: gradients of 1 to {size} gave {result.tolist()} "
            f"instead of {expected:g}. Training would not be that of one process; check Horovod with `hvdkit doctor`."
        )


def scale_learning_rate(optimizer: Any) -> None:
    """Apply the scaling rule once, as soon as the global batch is known.

    Raises:
        UsageError: the rule needs the global batch and nobody tells it, or the rate is a schedule.
    """
    hvd: Distribution = optimizer._hvd
    if hvd.scaling is not None:
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    accumulation = inner.gradient_accumulation_steps or 1
    data = active_dataset()
    batch = hvd.global_batch if data is None or hvd.global_batch else data.plan.global_batch * accumulation
    rate = inner._learning_rate
    if hvd.rule != "none" and batch is None:
        raise UsageError(
            f'lr_scale="{hvd.rule}" needs the global batch, and no hvd.dataset is in use; give DistributedOptimizer '
            "global_batch= (samples per update over all ranks), or make the batches with hvd.dataset."
        )
    if hvd.rule != "none" and not isinstance(rate, keras.Variable):
        raise UsageError(
            f'lr_scale="{hvd.rule}" was given with a learning rate that is a schedule or a function; scale inside it: '
            "hvd.LRSchedule takes lr_scale, base_batch and global_batch as well."
        )
    hvd.scaling = Scaling(hvd.rule, hvd.base_batch, batch, accumulation)
    hvd.base_lr = float(rate.numpy()) if isinstance(rate, keras.Variable) else None
    if hvd.rule != "none" and hvd.base_lr is not None:
        rate.assign(hvd.base_lr * hvd.scaling.factor)


def announce(optimizer: Any, schedule: Schedule | None = None) -> None:
    """Say once, on rank 0, what the learning rate is made of."""
    hvd: Distribution = optimizer._hvd
    if hvd.announced or hvd.scaling is None or hvd.base_lr is None:
        return
    hvd.announced = True
    if hvd.rule != "none" or schedule is not None or hvd.scaling.global_batch is not None:
        _log.info("%s", hvd.scaling.describe(hvd.base_lr) if schedule is None else schedule.describe(hvd.base_lr))


def _check_settings(optimizer: Any) -> None:
    """Settings that must be equal before tensors are: the first that differs is shown with each rank's value."""
    data = active_dataset()
    rate = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
    settings = {
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "optimizer": type(optimizer).__name__,
        "learning rate": float(rate.numpy()) if isinstance(rate, keras.Variable) else "schedule",
        "data": None if data is None else data.plan.state(),
    }
    check_settings(settings)
