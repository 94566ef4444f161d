"""Learning-rate scaling rules, warm-up and decay: a pure function from the optimizer step to a factor.

The rate at step k is ``base_lr * Schedule.factor(k)``. The unit is the optimizer step, not the sample, the batch or
the process, so nothing but the step needs saving and a resumed run goes on at the same rate.

Sources: P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677, sections 2.1
(linear scaling), 2.2 (gradual warm-up) and 3 (momentum correction); square-root scaling: A. Krizhevsky, "One weird
trick for parallelizing convolutional neural networks", arXiv:1404.5997, section 5; cosine decay: I. Loshchilov,
F. Hutter, "SGDR", arXiv:1608.03983, equation 5 without restarts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from hvdkit.arguments import one_of, real, whole
from hvdkit.errors import UsageError

RULES = ("none", "linear", "sqrt")
DECAYS = ("none", "step", "cosine", "polynomial", "exponential")


@dataclass(frozen=True)
class Scaling:
    """How the learning rate follows the global batch.

    Args:
        rule: ``"none"`` (factor 1), ``"linear"`` (global / base) or ``"sqrt"`` (its square root).
        base_batch: samples per step that the base rate was chosen for.
        global_batch: samples per optimizer step over all ranks, accumulated batches included.
        accumulation: how many batches make one step; only shown, since ``global_batch`` includes it.

    Raises:
        UsageError: an unknown rule, a batch that is missing (the rules other than none need both) or not above 0.
    """

    rule: str = "none"
    base_batch: int | None = None
    global_batch: int | None = None
    accumulation: int = 1

    def __post_init__(self) -> None:
        one_of("rule", self.rule, RULES)
        whole("accumulation", self.accumulation, 1)
        for name in ("base_batch", "global_batch"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole(name, value, 1))
            elif self.rule != "none":
                raise UsageError(
                    f"rule={self.rule!r} was given without {name}; it scales by global batch / base batch."
                )

    @property
    def factor(self) -> float:
        """The scaled rate divided by the base rate."""
        if self.rule == "none" or self.base_batch is None or self.global_batch is None:
            return 1.0
        ratio = self.global_batch / self.base_batch
        return ratio if self.rule == "linear" else math.sqrt(ratio)

    def describe(self, base_lr: float) -> str:
        """What was scaled, e.g. ``lr 0.1 x 4 (linear: global batch 256 / base 64)``."""
        batches = f": global batch {self.global_batch}" if self.global_batch is not None else ""
        if batches and self.rule != "none":
            batches += f" / base {self.base_batch}"
        if batches and self.accumulation > 1:
            batches += f", accumulated over {self.accumulation}"
        return f"lr {base_lr:g} x {self.factor:g} ({self.rule}{batches})"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Scaling, then warm-up, then decay. Lengths are in epochs; ``steps_per_epoch`` turns them into optimizer steps.

    Args:
        scaling: gives the factor that warm-up ends at.
        steps_per_epoch: optimizer steps per epoch (with accumulation: batches / accumulation, rounded up).
        warmup_epochs: length of the linear warm-up, rounded to whole steps; 0 for none.
        warmup_from: the factor at step 0 of a warm-up; 1 is the base rate (Goyal et al.).
        decay: ``"none"``; ``"step"``: times ``gamma`` at each of ``milestones``; ``"cosine"`` or ``"polynomial"``
            (of ``power``): from the end of warm-up to ``end_factor`` at ``epochs``; ``"exponential"``: times ``gamma``
            per epoch after warm-up, smoothly.
        epochs: total length, warm-up included; needed by cosine and polynomial. Later steps stay at ``end_factor``.
        milestones: epochs at which the rate drops, counted from the start of training, ascending.
        gamma: default 0.1 for step; exponential needs it stated.
        power: of polynomial decay; 1 (the default) is linear.
        end_factor: what cosine and polynomial end at, as a part of the scaled rate; default 0.

    Raises:
        UsageError: a number out of range, a setting that the decay needs and lacks, or one that it would ignore.
    """

    scaling: Scaling = field(default_factory=Scaling)
    steps_per_epoch: int
    warmup_epochs: float = 0.0
    warmup_from: float = 1.0
    decay: str = "none"
    epochs: float | None = None
    milestones: tuple[float, ...] = ()
    gamma: float | None = None
    power: float | None = None
    end_factor: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps_per_epoch", whole("steps_per_epoch", self.steps_per_epoch, 1))
        object.__setattr__(self, "milestones", tuple(self.milestones))
        one_of("decay", self.decay, DECAYS)
        real("warmup_epochs", self.warmup_epochs, 0)
        real("warmup_from", self.warmup_from, 0)
        _check_decay(self)

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps of the warm-up; step ``warmup_steps`` is the first at the full scaled rate."""
        return self._steps(self.warmup_epochs)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole training, or None where ``epochs`` is not given."""
        return None if self.epochs is None else self._steps(self.epochs)

    def factor(self, step: Any, xp: Any = np) -> Any:
        """The multiplier of the base learning rate for the optimizer step with 0-based index ``step``.

        A Python number gives a float, an array an array of float64, and with ``xp=keras.ops`` a tensor a tensor
        of float64 of the same shape.
        """
        at = np.asarray(step, np.float64) if xp is np else xp.cast(step, "float64")
        result = self.scaling.factor * self._decayed(at, xp)
        if self.warmup_steps:
            progress = at / self.warmup_steps
            rising = self.warmup_from + (self.scaling.factor - self.warmup_from) * progress
            result = xp.where(at < self.warmup_steps, rising, result)
        return float(result) if xp is np and np.ndim(step) == 0 else result

    def describe(self, base_lr: float) -> str:
        """The scaling and the lengths: ``lr 0.1 x 4 (linear: global batch 256 / base 64), warm-up 5 epochs``."""
        text = self.scaling.describe(base_lr)
        if self.warmup_steps:
            text += f", warm-up {self.warmup_epochs:g} epoch{'' if self.warmup_epochs == 1 else 's'}"
        if self.decay != "none":
            text += f", {self.decay} decay" + (f" over {self.epochs:g} epochs" if self.epochs is not None else "")
        return text

    def state(self) -> dict[str, Any]:
        """Every setting as plain values; :meth:`from_state` makes an equal schedule of it."""
        settings = {f.name: getattr(self, f.name) for f in fields(self)}
        scaling = {f.name: getattr(self.scaling, f.name) for f in fields(self.scaling)}
        return settings | {"scaling": scaling, "milestones": list(self.milestones)}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Schedule:
        """The schedule whose :meth:`state` this is."""
        return Schedule(**{**state, "scaling": Scaling(**state["scaling"])})

    def _steps(self, epochs: float) -> int:
        return round(epochs * self.steps_per_epoch)

    def _decayed(self, at: Any, xp: Any) -> Any:
        """The part of the scaled rate that decay leaves, for ``at`` >= warm-up (before it, any finite value)."""
        past = xp.maximum(at - self.warmup_steps, 0.0)
        if self.decay == "step":
            factor = at * 0.0 + 1.0
            for milestone in self.milestones:
                factor = xp.where(at < self._steps(milestone), factor, factor * _given(self.gamma, 0.1))
            return factor
        if self.decay == "exponential":
            return xp.exp(past * (math.log(_given(self.gamma, 1.0)) / self.steps_per_epoch))
        if self.decay == "none" or self.total_steps is None:
            return at * 0.0 + 1.0
        left = 1.0 - xp.minimum(past / (self.total_steps - self.warmup_steps), 1.0)
        is_cosine = self.decay == "cosine"
        shape = 0.5 - 0.5 * xp.cos(math.pi * left) if is_cosine else xp.power(left, _given(self.power, 1.0))
        end = _given(self.end_factor, 0.0)
        return end + (1.0 - end) * shape


def momentum_correction(old_rate: float, new_rate: float) -> float:
    """What to multiply momentum buffers by when the rate changes (Goyal et al., section 3): new rate / old rate.

    Only for the form ``v = m * v + rate * gradient; w -= v`` (their equation 10; Keras' and TensorFlow's SGD), whose
    buffer holds the old rate. PyTorch's SGD is of the form ``u = m * u + gradient; w -= rate * u`` (equation 9) and
    needs no correction. An old rate of 0 gives 1: nothing entered the buffer at that rate.
    """
    real("old_rate", old_rate, 0)
    real("new_rate", new_rate, 0)
    return new_rate / old_rate if old_rate > 0 else 1.0


_USED_BY = {
    "milestones": ("step",),
    "gamma": ("step", "exponential"),
    "power": ("polynomial",),
    "end_factor": ("cosine", "polynomial"),
}


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _check_decay(schedule: Schedule) -> None:
    """Refuse what the chosen decay lacks and what it would ignore; then check the numbers."""
    decay = schedule.decay
    for name, decays in _USED_BY.items():
        if getattr(schedule, name) not in (None, ()) and decay not in decays:
            raise UsageError(
                f"{name}={getattr(schedule, name)!r} was given with decay={decay!r}; only {decays} use it."
            )
    needs = {"cosine": "epochs", "polynomial": "epochs", "step": "milestones", "exponential": "gamma"}.get(decay)
    if needs and getattr(schedule, needs) in (None, ()):
        raise UsageError(f"decay={decay!r} was given without {needs}; give it.")
    if schedule.gamma is not None:
        real("gamma", schedule.gamma, 0, above=True)
    real("power", _given(schedule.power, 1.0), 0, above=True)
    real("end_factor", _given(schedule.end_factor, 0.0), 0)
    _check_lengths(schedule)


def _check_lengths(schedule: Schedule) -> None:
    if schedule.epochs is not None:
        real("epochs", schedule.epochs, 0, above=True)
        if schedule.decay in ("cosine", "polynomial") and schedule._steps(schedule.epochs) <= schedule.warmup_steps:
            raise UsageError(
                f"epochs={schedule.epochs:g} leaves nothing after warmup_epochs={schedule.warmup_epochs:g}."
            )
    before = schedule.warmup_epochs
    for milestone in schedule.milestones:
        if real("milestones", milestone, 0) < before:
            raise UsageError(
                f"milestones={schedule.milestones} and warmup_epochs={schedule.warmup_epochs:g} were given; "
                "milestones must ascend and lie after the warm-up."
            )
        before = milestone
