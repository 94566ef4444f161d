"""``LRSchedule``: the learning rate as a function of the optimizer step, as a torch scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdkit.errors import CheckpointError, UsageError
from hvdkit.log import get_logger
from hvdkit.schedule import Scaling, Schedule
from hvdkit.torch.data import DataLoader
from hvdkit.torch.optimizer import Distributed
from hvdkit.torch.rates import base_rate


class LRSchedule(torch.optim.lr_scheduler.LRScheduler):
    """Scaling, warm-up from the base rate to the scaled one, then decay; call ``step()`` after each optimizer step.

    The rate of a group at step k is its own base rate times one factor, so groups keep their ratios, and a resumed run
    has the same rate as a fresh one. ``last_epoch`` (torch's name) counts optimizer steps.

    Args:
        optimizer: its scaling (``lr_scale``) is taken over.
        loader: an hvdkit loader, for the batches per epoch and the global batch; or give ``steps_per_epoch``.
        steps_per_epoch: optimizer steps per epoch.
        warmup_epochs, decay, epochs, settings: see :class:`hvdkit.Schedule` (``milestones``, ``gamma``, ``power``,
            ``end_factor``, ``warmup_from``).

    Raises:
        UsageError: neither or both of loader and steps_per_epoch, or a setting out of range.
    """

    def __init__(
        self,
        optimizer: Any,
        loader: DataLoader | None = None,
        *,
        steps_per_epoch: int | None = None,
        warmup_epochs: float = 0.0,
        decay: str = "none",
        epochs: float | None = None,
        **settings: Any,
    ) -> None:
        if (loader is None) == (steps_per_epoch is None):
            raise UsageError("give LRSchedule either a loader or steps_per_epoch=, the optimizer steps in an epoch.")
        scaling, passes = Scaling(), 1
        if isinstance(optimizer, Distributed):
            scaling, passes = _scaling_of(optimizer, loader), optimizer.backward_passes_per_step
        if loader is not None:
            steps_per_epoch = -(-len(loader) // passes)
        self.schedule = Schedule(
            scaling=scaling, steps_per_epoch=steps_per_epoch,  # type: ignore[arg-type]
            warmup_epochs=warmup_epochs, decay=decay, epochs=epochs, **settings,
        )  # fmt: skip
        for group in optimizer.param_groups:
            group["initial_lr"] = base_rate(group)
        get_logger().info("%s", self.schedule.describe(base_rate(optimizer.param_groups[0])))
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rate of each group at the present step."""
        factor = self.schedule.factor(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """The step, the base rates and the settings, as plain values."""
        base_lrs = [float(rate) for rate in self.base_lrs]
        return {"step": self.last_epoch, "base_lrs": base_lrs, "schedule": self.schedule.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on at the saved step, with the saved base rates and the present settings.

        If an epoch has another number of steps now (another global batch), the same part of training is taken as done.

        Raises:
            CheckpointError: the state is of an optimizer with another number of groups.
        """
        saved = state_dict["base_lrs"]
        if len(saved) != len(self.optimizer.param_groups):
            raise CheckpointError(
                f"the saved schedule has {len(saved)} groups, the optimizer {len(self.optimizer.param_groups)}."
            )
        before = state_dict["schedule"]["steps_per_epoch"]
        self.last_epoch = round(state_dict["step"] * self.schedule.steps_per_epoch / before)
        self.base_lrs = list(saved)
        for group, base, rate in zip(self.optimizer.param_groups, saved, self.get_lr(), strict=True):
            group["initial_lr"] = base
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _scaling_of(optimizer: Distributed, loader: DataLoader | None) -> Scaling:
    rates = optimizer._distribution.rates
    if loader is not None:
        return rates.resolve(loader.global_batch, quiet=True)
    if rates.scaling is None:
        raise UsageError(
            f"lr_scale={rates.rule!r} needs the global batch: give LRSchedule the loader, or DistributedOptimizer "
            "loader= or global_batch=."
        )
    return rates.scaling
