"""Horovod's Keras callbacks under their names, working on Keras 3, and ``standard``: all that a run needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as horovod
import keras

from hvdkit.errors import UsageError
from hvdkit.log import get_logger
from hvdkit.schedule import momentum_correction as momentum_factor
from hvdkit.tf.collectives import identity
from hvdkit.tf.keras import averaging
from hvdkit.tf.keras.running import (
    Checkpoint,
    DriftCheck,
    Rank0Progress,
    Rates,
    before_first_step,
    build_from_data,
    standard,
)
from hvdkit.tf.optimizer import Reducing
from hvdkit.tf.start import broadcast_state

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "Checkpoint",
    "DriftCheck",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "Rank0Progress",
    "Rates",
    "standard",
]

_log = get_logger("hvdkit.tf")


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives all ranks the root's weights and optimizer state before the first batch.

    The optimizer's slots are built first, so what a loaded optimizer remembers is broadcast too. The random states of
    dropout layers and the like stay each rank's own.

    Args:
        root_rank: the rank whose values all get.
        device: accepted as in Horovod; variables stay where they are.
        local_variables: a variable or several that are not broadcast.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        self._local: set[int] = set()
        if local_variables is not None:
            is_one = hasattr(local_variables, "shape")
            for variable in [local_variables] if is_one else local_variables:
                self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leave ``var`` out."""
        if not hasattr(var, "assign"):
            raise UsageError(f"{var!r} was given as a local variable; a variable was expected.")
        self._local.add(identity(var))

    def on_train_begin(self, logs: Any = None) -> None:
        """Build what is not built yet, from the types of the data, then broadcast."""
        if self.broadcast_done:
            return
        if build_from_data(self.model):
            self._broadcast()
        else:
            before_first_step(self.model, self._broadcast)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """For a model that could not be built before it saw data."""
        if not self.broadcast_done:
            _log.warning(
                "the model was not built before its first batch, so it is broadcast after it; build it earlier."
            )
            self._broadcast()

    def _broadcast(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        if isinstance(optimizer, Reducing):
            optimizer._hvd.kept_variables |= self._local
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        shared = [v for v in self.model.weights if identity(v) not in self._local]
        broadcast_state(shared, optimizer, self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes the logs of each epoch and evaluation those over all ranks: the sums are reduced, then divided.

    All callbacks see them, whichever stands first, and on all ranks they are the same. Losses and metrics of Keras are
    averaged over samples; what a custom ``train_step`` returns besides, over ranks. Every rank must use this callback.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._installed = False
        self._training = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Start averaging."""
        self._training = True
        self._installed = averaging.install(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        """Stop averaging."""
        self._training = False
        self._stop()

    def on_test_begin(self, logs: Any = None) -> None:
        """Start averaging, for an evaluation by itself."""
        if not self._training:
            self._installed = averaging.install(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        """Stop averaging, after an evaluation by itself."""
        if not self._training:
            self._stop()

    def _stop(self) -> None:
        if self._installed:
            averaging.uninstall(self.model)
        self._installed = False


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier`` in the epochs ``[start_epoch, end_epoch)``.

    Args:
        initial_lr: the rate that the multiplier is applied to.
        multiplier: a function of the epoch, or a number c for ``c ** (epoch - start_epoch)``.
        start_epoch, end_epoch: from 0; None for no end.
        staircase: True sets it as an epoch begins, for a whole epoch number; False before each batch, for the fraction
            ``epoch + batch / steps_per_epoch``.
        momentum_correction: multiply momentum buffers that hold the old rate by new / old rate (Goyal et al. 2017,
            section 3).
        steps_per_epoch: known from ``fit`` unless the data has no length.

    Raises:
        UsageError: ``initial_lr`` is None, or the optimizer's rate is a schedule.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise UsageError("initial_lr=None was given; the learning rate at the start of training was expected.")
        self.initial_lr, self.start_epoch, self.end_epoch = float(initial_lr), start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.current_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out the steps per epoch."""
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise UsageError(f"{type(self).__name__} needs steps_per_epoch=: the data has no length.")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the rate, if it is this callback's turn."""
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if self.staircase and batch == 0:
            self._set(self.current_epoch)
        elif not self.staircase:
            self._set(self.current_epoch + batch / (self.steps_per_epoch or 1))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the rate as ``lr``."""
        if logs is not None:
            logs["lr"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        set_rate(self.model.optimizer, self.initial_lr * self.multiplier(epoch), self.momentum_correction)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Warms up from ``initial_lr / hvd.size()`` to ``initial_lr``, which is the scaled rate (Goyal et al. 2017).

    The rate at the fractional epoch e is ``initial_lr / size * (e * (size - 1) / warmup_epochs + 1)``.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One step more, as in Horovod: round numbers at the ends of epochs.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            size: int = horovod.size()
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=int(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the rate, and say so when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and self.end_epoch is not None and epoch == self.end_epoch - 1:
            rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
            _log.info("epoch %d: the warm-up has ended at a learning rate of %g", epoch + 1, rate)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """``ModelCheckpoint(save_best_only=True)`` whose ``filepath`` is set later, as in Horovod."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        # Keras checks the ending of a name that is not known yet.
        super().__init__(
            "best.weights.h5" if save_weights_only else "best.keras",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None


def set_rate(optimizer: Any, rate: float, correct_momentum: bool) -> None:
    """Set the learning rate; with ``correct_momentum`` scale the buffers that hold the old one."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    variable = inner._learning_rate
    if not isinstance(variable, keras.Variable):
        raise UsageError(
            "the optimizer's learning rate is a schedule or a function, which no callback can set; give the "
            "optimizer a number, or do without the callback."
        )
    old = float(variable.numpy())
    variable.assign(rate)
    # Keras' SGD and RMSprop keep rate * gradient in the buffer; Adam and its like keep plain gradients.
    if correct_momentum and bool(getattr(inner, "momentum", False)) and inner.built and rate != old:
        factor = momentum_factor(old, rate)
        for buffer in getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or []:
            if buffer is not None:
                buffer.assign(buffer * factor)
