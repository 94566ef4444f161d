"""What a ``fit`` on several ranks needs besides the model: resume, rates, equal ranks, one progress bar."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras

from hvdkit.arguments import whole
from hvdkit.errors import UsageError
from hvdkit.log import get_logger
from hvdkit.schedule import Schedule
from hvdkit.tf.data import active_dataset
from hvdkit.tf.optimizer import Reducing
from hvdkit.tf.runtime import world
from hvdkit.tf.start import announce, scale_learning_rate
from hvdkit.tf.statistics import average_statistics, has_statistics
from hvdkit.tf.sync import check_in_sync
from hvdkit.tf.training_state import TrainingState

_log = get_logger("hvdkit.tf")


def standard(
    folder: Any = None,
    *,
    warmup_epochs: float = 0,
    decay: str = "none",
    keep: int | None = 3,
    every_epochs: int = 1,
    check_every: int = 500,
    **schedule: Any,
) -> list[Any]:
    """The callbacks of a run: exact resume, equal start, averaged metrics, rates, drift check, one progress bar.

    Args:
        folder: where checkpoints lie; None for none. A run goes on from the newest good one.
        warmup_epochs: from the base rate to the rate that ``lr_scale`` gives.
        decay: after it, to the end of ``fit``: see :class:`hvdkit.Schedule`, whose other settings are accepted too.
        keep, every_epochs: how many checkpoints to keep, and how often to write one.
        check_every: steps between comparisons of the ranks' weights; there is one at each end of an epoch as well.
    """
    from hvdkit.tf.keras.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback

    listed: list[Any] = []
    if folder is not None:
        listed.append(Checkpoint(folder, keep=keep, every_epochs=every_epochs))
    listed += [BroadcastGlobalVariablesCallback(0), MetricAverageCallback()]
    if warmup_epochs or decay != "none" or schedule:
        listed.append(Rates(warmup_epochs=warmup_epochs, decay=decay, **schedule))
    return [*listed, DriftCheck(check_every), Rank0Progress()]


def build_from_data(model: Any, data: Any = None) -> bool:
    """Build a model that has no Input from the types of ``data``: the ``hvd.dataset`` in use, or fit's own iterator.

    False if nobody tells the types.
    """
    spec = getattr(active_dataset() if data is None else data, "element_spec", None)
    if not model.built and spec is not None:
        spec = spec[0] if isinstance(spec, tuple) else spec
        model(keras.tree.map_structure(lambda s: keras.KerasTensor(s.shape, s.dtype.name), spec))
    return bool(model.built)


def before_first_step(model: Any, action: Callable[[], None]) -> None:
    """Once ``fit`` knows its data: build ``model`` by their types and, if that succeeds, call ``action``.

    The types of data that did not come from ``hvd.dataset`` show when fit hands its iterator to the training function.
    """
    step = model.train_function

    def first_step(iterator: Any) -> Any:
        model.train_function = step
        if build_from_data(model, iterator):
            action()
        return step(iterator)

    if step is not None:
        model.train_function = first_step


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves a :class:`TrainingState` as epochs end, and goes on from the newest good one as ``fit`` begins."""

    def __init__(self, folder: Any, *, keep: int | None = 3, every_epochs: int = 1) -> None:
        super().__init__()
        self.folder, self.keep, self.every_epochs = folder, keep, whole("every_epochs", every_epochs, 1)
        self.state: TrainingState | None = None
        self._left_in_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore, and tell Keras in which epoch to begin."""
        if not build_from_data(self.model):
            raise UsageError("the model is not built, so nothing can be restored; give it an Input, or call it once.")
        data = active_dataset()
        self.state = TrainingState(self.folder, model=self.model, loader=data, keep=self.keep)
        if self.state.restore():
            self.model._initial_epoch = self.state.epoch
            # The rest of an epoch is shorter than Keras expects, and it would say so.
            if data is not None and data.plan.remaining_steps(data.position) < data.plan.steps:
                warnings.filterwarnings("ignore", message="Your input ran out of data")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save."""
        if self.state is None or (epoch + 1) % self.every_epochs:
            return
        self.state._epoch = epoch + 1
        self.state.save()

    def on_train_end(self, logs: Any = None) -> None:
        """A later ``fit`` of the same model begins where its caller says."""
        self.model._initial_epoch = 0


class Rates(keras.callbacks.Callback):  # type: ignore[misc]
    """Warm-up and decay for a distributed optimizer: sets ``base rate * Schedule.factor(step)`` before each batch."""

    def __init__(self, *, warmup_epochs: float = 0, decay: str = "none", **settings: Any) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {"warmup_epochs": warmup_epochs, "decay": decay, **settings}
        self.schedule: Schedule | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Make the schedule: scaling from the optimizer, steps per epoch and epochs from ``fit``."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, Reducing):
            raise UsageError("warm-up and decay scale the rate of an hvd.DistributedOptimizer; compile with one.")
        scale_learning_rate(optimizer)
        hvd = optimizer._hvd
        if hvd.base_lr is None or hvd.scaling is None:
            raise UsageError(
                "the optimizer's learning rate is a schedule already; give it a number, or no warm-up here."
            )
        data = active_dataset()
        batches = self.params.get("steps") if data is None else data.plan.steps
        if not batches:
            raise UsageError("the number of batches per epoch is not known; use hvd.dataset, or fit(steps_per_epoch=).")
        accumulation = hvd.scaling.accumulation
        epochs = self.settings.get("epochs") or self.params.get("epochs")
        self.schedule = Schedule(
            scaling=hvd.scaling,
            steps_per_epoch=max(1, -(-batches // accumulation)),
            **{**self.settings, "epochs": epochs},
        )
        announce(optimizer, self.schedule)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate of the coming step."""
        assert self.schedule is not None
        optimizer = self.model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        step = int(keras.ops.convert_to_numpy(optimizer.iterations))
        inner._learning_rate.assign(optimizer._hvd.base_lr * self.schedule.factor(step))


class DriftCheck(keras.callbacks.Callback):  # type: ignore[misc]
    """Stops the job when ranks no longer hold the same weights; averages moving statistics before they are used.

    Compares after the first step, every ``every`` steps, and as epochs end.
    """

    def __init__(self, every: int = 500) -> None:
        super().__init__()
        self.every = whole("every", every, 1)
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compare, if it is time."""
        self._steps += 1
        if self._steps == 1 or self._steps % self.every == 0:
            self._check()

    def on_test_begin(self, logs: Any = None) -> None:
        """Ranks evaluate one model, not each its own averages."""
        self._average()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare and average."""
        self._check()
        self._average()

    def _check(self) -> None:
        if world().size > 1:
            check_in_sync(self.model.trainable_weights)
            check_in_sync(self.model.optimizer)

    def _average(self) -> None:
        if world().size > 1 and has_statistics(self.model):
            average_statistics(self.model)


class Rank0Progress(keras.callbacks.ProgbarLogger):  # type: ignore[misc]
    """Keras' progress bar on rank 0, and silence elsewhere, whatever ``verbose`` says."""

    def set_params(self, params: dict[str, Any]) -> None:
        """Take the parameters of ``fit`` or ``evaluate``, without verbosity on other ranks than 0."""
        super().set_params(params if world().is_main else {**params, "verbose": 0})
