"""The scaling of an optimizer's base rates by the global batch: applied once, and remembered in the optimizer."""

from __future__ import annotations

from typing import Any

import torch

from hvdkit.arguments import one_of, whole
from hvdkit.errors import UsageError
from hvdkit.log import get_logger
from hvdkit.schedule import RULES, Scaling

KEY = "lr_scaling"  # in each parameter group, so that it is saved and loaded with the optimizer's own state


class RateScaling:
    """``lr_scale`` and ``base_batch`` of one optimizer. The factor is applied as soon as the global batch is known.

    Each group keeps its base rate and the factor applied to it, so a state saved under another global batch is
    brought to this one, and nothing is scaled twice.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: str, base_batch: int | None, accumulation: int) -> None:
        self.rule = one_of("lr_scale", rule, RULES)
        self.base_batch = base_batch if base_batch is None else whole("base_batch", base_batch, 1)
        if rule != "none" and base_batch is None:
            raise UsageError(
                f"lr_scale={rule!r} was given without base_batch, the global batch that lr was chosen for."
            )
        self.accumulation = accumulation
        self.scaling: Scaling | None = Scaling() if rule == "none" else None
        self._optimizer = optimizer

    def resolve(self, loader_batch: int, *, quiet: bool = False) -> Scaling:
        """Apply the rule to ``loader_batch`` samples per backward pass over all ranks, if that is not done yet."""
        if self.scaling is None:
            global_batch = loader_batch * self.accumulation
            self.scaling = Scaling(self.rule, self.base_batch, global_batch, self.accumulation)
            for group in self._optimizer.param_groups:
                self._scale(group, self.scaling.factor)
            if not quiet:
                first = self._optimizer.param_groups[0]
                get_logger().info("%s", self.scaling.describe(base_rate(first)))
        return self.scaling

    def reapply(self) -> None:
        """After a state was loaded: bring its rates, scaled for the batch it was saved under, to this one."""
        if self.scaling is not None and self.rule != "none":
            for group in self._optimizer.param_groups:
                self._scale(group, self.scaling.factor)

    def _scale(self, group: dict[str, Any], factor: float) -> None:
        earlier = group.get(KEY)
        if earlier is None and "initial_lr" in group:
            raise UsageError(
                "a learning-rate scheduler was made before the rates were scaled, so it would undo the scaling. Give "
                "DistributedOptimizer the loader= or global_batch=, and make the scheduler after it."
            )
        if earlier is None:
            group[KEY] = {"base_lr": float(group["lr"]), "factor": factor}
            _multiply(group, "lr", factor)
        elif earlier["factor"] != factor:
            for key in ("lr", "initial_lr"):
                _multiply(group, key, factor / earlier["factor"])
            group[KEY] = earlier | {"factor": factor}


def base_rate(group: dict[str, Any]) -> float:
    """The group's learning rate before scaling."""
    return float(group[KEY]["base_lr"] if KEY in group else group.get("initial_lr", group["lr"]))


def _multiply(group: dict[str, Any], key: str, factor: float) -> None:
    if isinstance(group.get(key), torch.Tensor):
        group[key].mul_(factor)
    elif key in group:
        group[key] *= factor
