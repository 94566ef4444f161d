"""The learning rate as a function of the optimizer step, as a Keras schedule."""

from __future__ import annotations

from typing import Any

import keras

from hvdkit.errors import UsageError
from hvdkit.log import get_logger
from hvdkit.schedule import Scaling, Schedule

_log = get_logger("hvdkit.tf")


@keras.saving.register_keras_serializable(package="hvdkit")
class LRSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """Scaling, warm-up from the base rate to the scaled one, and decay; give it to an optimizer as its learning rate.

    ``hvdkit.torch.LRSchedule`` computes the same factors. The optimizer's own step is all the state there is, so a
    resumed run goes on at the same rate. Keras counts each batch as a step under gradient accumulation.

    Args:
        base_lr: the rate chosen for ``base_batch``.
        loader: an ``hvd.dataset``, which knows the global batch and the steps per epoch; or state
        global_batch, steps_per_epoch: samples per step over all ranks, steps per epoch.
        lr_scale: ``"none"``, ``"linear"`` or ``"sqrt"``.
        base_batch: samples per step that ``base_lr`` was chosen for.
        settings: ``warmup_epochs``, ``decay``, ``epochs`` and others of :class:`hvdkit.Schedule`.

    Raises:
        UsageError: a number is missing or out of range.
    """

    def __init__(
        self,
        base_lr: float,
        loader: Any = None,
        *,
        lr_scale: str = "none",
        base_batch: int | None = None,
        global_batch: int | None = None,
        steps_per_epoch: int | None = None,
        **settings: Any,
    ) -> None:
        if loader is not None:
            global_batch, steps_per_epoch = loader.plan.global_batch, loader.plan.steps
        if steps_per_epoch is None:
            raise UsageError("LRSchedule needs steps_per_epoch=, or the hvd.dataset that knows them.")
        scaling = Scaling(lr_scale, base_batch, global_batch)
        self.base_lr = float(base_lr)
        self.schedule = Schedule(scaling=scaling, steps_per_epoch=steps_per_epoch, **settings)
        _log.info("%s", self.schedule.describe(self.base_lr))

    def __call__(self, step: Any) -> Any:
        """The rate for the step with 0-based index ``step``: a float32 tensor of its shape."""
        return keras.ops.cast(self.base_lr * self.schedule.factor(step, xp=keras.ops), "float32")

    def get_config(self) -> dict[str, Any]:
        """Plain values from which :meth:`from_config` makes an equal schedule."""
        return {"base_lr": self.base_lr, "schedule": self.schedule.state()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LRSchedule:
        """The schedule whose :meth:`get_config` this is."""
        settings = {k: v for k, v in config["schedule"].items() if k != "scaling"}
        scaling = config["schedule"]["scaling"]
        return cls(
            config["base_lr"],
            lr_scale=scaling["rule"],
            base_batch=scaling["base_batch"],
            global_batch=scaling["global_batch"],
            **settings,
        )
