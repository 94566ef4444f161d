"""Metrics that are right on any number of ranks: what each rank has counted adds up to what one process would count.

All follow :class:`Metric`: states merge by sum over ranks. Averages of per-rank averages never arise, and ranks without
items add nothing. No items at all gives NaN. Metrics that are no function of sums (:func:`exact_auc`) are computed on
gathered scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.arguments import whole
from hvdkit.distributions import HistogramAUC, Quantiles, exact_auc
from hvdkit.errors import UsageError
from hvdkit.statistics import Metric, State, SumMetric, from_vector, in_sample_order, merge, to_vector

__all__ = [
    "Accuracy",
    "Confusion",
    "HistogramAUC",
    "Mean",
    "Metric",
    "Quantiles",
    "State",
    "SumMetric",
    "exact_auc",
    "from_vector",
    "in_sample_order",
    "merge",
    "to_vector",
]


class Mean(SumMetric):
    """Weighted mean: ``sum(value * weight) / sum(weight)``, in float64. NaN for no weight."""

    def __init__(self) -> None:
        super().__init__(sum=np.zeros((), np.float64), count=np.zeros((), np.float64))

    def update(self, values: npt.ArrayLike, weights: npt.ArrayLike = 1.0) -> None:
        """Add values of any shape; ``weights`` broadcasts to it: counts (a batch's mean and its size) or a 0/1 mask.

        A value of weight 0 does not count, not even a NaN.
        """
        numbers = np.asarray(values, np.float64)
        factors = np.broadcast_to(np.asarray(weights, np.float64), numbers.shape)
        self._sums["sum"] += np.sum(np.where(factors == 0, 0.0, numbers) * factors)
        self._sums["count"] += np.sum(factors)

    def compute(self) -> float:
        """The mean of everything added."""
        return _ratio(self._sums["sum"], self._sums["count"])


class Accuracy(SumMetric):
    """Part of items whose label is the prediction, or among the ``top`` best scores. NaN for no items."""

    def __init__(self, top: int = 1) -> None:
        self.top = whole("top", top, 1)
        super().__init__(right=np.zeros((), np.int64), count=np.zeros((), np.int64))

    def update(self, predictions: npt.ArrayLike, labels: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> None:
        """Add items. ``predictions``: class numbers of the shape of ``labels``, or scores with one more, last axis.

        ``mask``, of the shape of ``labels``: False leaves an item out (padding, ignored labels).
        """
        guesses, truth = np.asarray(predictions), np.asarray(labels)
        if guesses.shape == truth.shape:
            right = guesses == truth
        elif guesses.shape[:-1] == truth.shape and guesses.shape[-1] >= self.top:
            best = np.argsort(-guesses, axis=-1, kind="stable")[..., : self.top]
            right = (best == truth[..., None]).any(axis=-1)
        else:
            raise _shapes("predictions", guesses, truth)
        keep = _mask(mask, truth)
        self._sums["right"] += np.count_nonzero(right & keep)
        self._sums["count"] += np.count_nonzero(keep)

    def compute(self) -> float:
        """Right ones / all."""
        return _ratio(self._sums["right"], self._sums["count"])


class Confusion(SumMetric):
    """Counts by true (row) and predicted (column) class, and what follows from them.

    A class that is neither in the labels nor predicted has no precision, recall or F1: NaN, left out of averages.
    A class in the labels that is never predicted has precision 0, one only predicted has recall 0.
    """

    def __init__(self, classes: int) -> None:
        self.classes = whole("classes", classes, 1)
        super().__init__(counts=np.zeros((classes, classes), np.int64))

    def update(self, predictions: npt.ArrayLike, labels: npt.ArrayLike, mask: npt.ArrayLike | None = None) -> None:
        """Add items: class numbers in ``[0, classes)``, both of one shape; ``mask`` False leaves an item out."""
        guesses, truth = np.asarray(predictions), np.asarray(labels)
        if guesses.shape != truth.shape:
            raise _shapes("predictions", guesses, truth)
        keep = _mask(mask, truth)
        guesses, truth = guesses[keep], truth[keep]
        for name, values in (("predictions", guesses), ("labels", truth)):
            if values.size and (values.dtype.kind not in "iub" or values.min() < 0 or values.max() >= self.classes):
                raise UsageError(
                    f"{name} hold {np.unique(values)[:8]}; class numbers from 0 to {self.classes - 1} were expected."
                )
        flat = truth.astype(np.int64) * self.classes + guesses.astype(np.int64)
        self._sums["counts"] += np.bincount(flat, minlength=self.classes**2).reshape(self.classes, self.classes)

    def compute(self) -> npt.NDArray[np.int64]:
        """The counts: int64 of shape ``[classes, classes]``."""
        counts: npt.NDArray[np.int64] = self._sums["counts"].copy()
        return counts

    def accuracy(self) -> float:
        """Part of items on the diagonal."""
        return _ratio(np.trace(self._sums["counts"]), self._sums["counts"].sum())

    def precision(self) -> npt.NDArray[np.float64]:
        """Per class: right ones / predicted ones."""
        return self._per_class(self._sums["counts"].sum(axis=0))

    def recall(self) -> npt.NDArray[np.float64]:
        """Per class: right ones / true ones."""
        return self._per_class(self._sums["counts"].sum(axis=1))

    def f1(self) -> npt.NDArray[np.float64]:
        """Per class: the harmonic mean of precision and recall."""
        counts = self._sums["counts"]
        return self._per_class((counts.sum(axis=0) + counts.sum(axis=1)) / 2)

    def macro_f1(self) -> float:
        """The plain mean of F1 over the classes that occur."""
        scores = self.f1()
        return float(np.mean(scores[~np.isnan(scores)])) if not np.isnan(scores).all() else float("nan")

    def _per_class(self, totals: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        counts = self._sums["counts"]
        right = np.diag(counts).astype(np.float64)
        ratios = np.divide(right, totals, out=np.zeros(self.classes), where=totals > 0)
        occurs = counts.sum(axis=0) + counts.sum(axis=1) > 0
        return np.where(occurs, ratios, np.nan)


def _ratio(part: Any, whole_: Any) -> float:
    return float(part) / float(whole_) if whole_ else float("nan")


def _mask(mask: npt.ArrayLike | None, truth: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    keep = np.ones(truth.shape, bool) if mask is None else np.asarray(mask, bool)
    if keep.shape != truth.shape:
        raise _shapes("mask", keep, truth)
    return keep


def _shapes(name: str, given: npt.NDArray[Any], labels: npt.NDArray[Any]) -> UsageError:
    return UsageError(f"{name} of shape {given.shape} do not fit labels of shape {labels.shape}.")
