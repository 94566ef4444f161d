"""Metrics of score distributions: the area under the ROC curve and quantiles, exact or from mergeable histograms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.arguments import real, whole
from hvdkit.errors import UsageError
from hvdkit.statistics import SumMetric


def exact_auc(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Area under the ROC curve of all scores at hand: gather them from the ranks first. NaN if one class is absent.

    It is the chance that a positive item scores above a negative one, ties counting half (the Mann-Whitney statistic;
    J. Hanley, B. McNeil, Radiology 143, 1982).
    """
    values, positive = _pairs(scores, labels)
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    above = np.bincount(place, weights=positive, minlength=len(counts))
    return _area(above, counts - above)


class HistogramAUC(SumMetric):
    """Area under the ROC curve from histograms of the scores of both classes, which merge by sum.

    Scores that share a bin count as ties, so the value is off by at most half of the pairs in one bin: :meth:`error`
    tells by how much. ``bins`` of equal width on ``[low, high]``; scores outside are refused.
    """

    def __init__(self, bins: int = 4096, low: float = 0.0, high: float = 1.0) -> None:
        self.bins, self.low, self.high = whole("bins", bins, 1), real("low", low), real("high", high)
        if self.low >= self.high:
            raise UsageError(f"low={low!r} and high={high!r} were given; low must be below high.")
        super().__init__(positive=np.zeros(bins, np.int64), negative=np.zeros(bins, np.int64))

    def update(self, scores: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Add scores in ``[low, high]`` with labels 0 or 1, of one shape."""
        values, positive = _pairs(scores, labels)
        if values.size and (values.min() < self.low or values.max() > self.high):
            raise UsageError(
                f"scores from {values.min():g} to {values.max():g} were given; expected {self.low:g} to {self.high:g}. "
                "Map them there (softmax, sigmoid) or give low= and high=."
            )
        place = np.minimum((values - self.low) / (self.high - self.low) * self.bins, self.bins - 1).astype(np.int64)
        self._sums["positive"] += np.bincount(place[positive], minlength=self.bins)
        self._sums["negative"] += np.bincount(place[~positive], minlength=self.bins)

    def compute(self) -> float:
        """The area; NaN if one class is absent."""
        return _area(self._sums["positive"], self._sums["negative"])

    def error(self) -> float:
        """The most by which :meth:`compute` can differ from the exact area; NaN if one class is absent."""
        positive, negative = (self._sums[name].astype(np.float64) for name in ("positive", "negative"))
        pairs = positive.sum() * negative.sum()
        return float(np.sum(positive * negative) / 2 / pairs) if pairs else math.nan


class Quantiles(SumMetric):
    """Quantiles to a relative accuracy, from counts in geometric buckets, which merge by sum.

    DDSketch (C. Masson, J. Rim, H. Lee, PVLDB 12, 2019) with a fixed range: a value x of magnitude in
    ``[smallest, largest]`` falls into bucket ``ceil(log_g |x|)``, ``g = (1 + accuracy) / (1 - accuracy)``, and is given
    back within ``accuracy * |x|``. Smaller magnitudes count as 0, larger ones as ``largest``.
    """

    def __init__(self, accuracy: float = 0.01, smallest: float = 1e-9, largest: float = 1e9) -> None:
        self.accuracy = real("accuracy", accuracy, 1e-4, 0.5)
        if not 0 < real("smallest", smallest) < real("largest", largest):
            raise UsageError(
                f"smallest={smallest!r} and largest={largest!r} were given; 0 < smallest < largest was expected."
            )
        self._log_g = math.log((1 + accuracy) / (1 - accuracy))
        self._first = math.ceil(math.log(smallest) / self._log_g)
        self._side = math.ceil(math.log(largest) / self._log_g) - self._first + 1
        super().__init__(counts=np.zeros(2 * self._side + 1, np.int64))  # negative ones backwards, zero, positive ones

    def update(self, values: npt.ArrayLike) -> None:
        """Add values of any shape.

        Raises:
            UsageError: a value is NaN.
        """
        numbers = np.asarray(values, np.float64).reshape(-1)
        if np.isnan(numbers).any():
            raise UsageError(
                f"{np.count_nonzero(np.isnan(numbers))} of {numbers.size} values are NaN and have no place in an order."
            )
        with np.errstate(divide="ignore"):  # log(0) is -inf, which the clip below makes "zero"
            bucket = np.ceil(np.log(np.abs(numbers)) / self._log_g) - self._first + 1
        place = self._side + np.sign(numbers) * np.clip(bucket, 0, self._side)
        self._sums["counts"] += np.bincount(place.astype(np.int64), minlength=2 * self._side + 1)

    def compute(self, quantiles: npt.ArrayLike = 0.5) -> npt.NDArray[np.float64]:
        """The values at ``quantiles`` in [0, 1], of their shape; NaN where nothing was added.

        Quantile q of n values is the one at place ``floor(q * (n - 1))`` in ascending order (no interpolation).
        """
        wanted = np.asarray(quantiles, np.float64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() <= 1):
            raise UsageError(f"quantiles={quantiles!r} were given; numbers from 0 to 1 were expected.")
        counts = self._sums["counts"]
        total = int(counts.sum())
        if total == 0:
            return np.full(wanted.shape, np.nan)
        place = np.searchsorted(np.cumsum(counts), np.floor(wanted * (total - 1)), side="right")
        return self._value(place)

    def _value(self, place: Any) -> npt.NDArray[np.float64]:
        """The middle of a bucket in the sense that both its ends are within the accuracy."""
        signed = place - self._side
        magnitude = np.exp((np.abs(signed) - 1 + self._first) * self._log_g) * (1 - self.accuracy)
        return np.where(signed == 0, 0.0, np.sign(signed) * magnitude)


def _pairs(scores: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    values, truth = np.asarray(scores, np.float64), np.asarray(labels)
    if values.shape != truth.shape:
        raise UsageError(f"scores of shape {values.shape} do not fit labels of shape {truth.shape}.")
    if np.isnan(values).any():
        raise UsageError(
            f"{np.count_nonzero(np.isnan(values))} of {values.size} scores are NaN and have no place in an order."
        )
    if not np.isin(truth, (0, 1)).all():
        raise UsageError(f"labels hold {np.unique(truth)[:8]}; 0 and 1 were expected.")
    return values.reshape(-1), truth.reshape(-1).astype(bool)


def _area(positive: npt.NDArray[Any], negative: npt.NDArray[Any]) -> float:
    """Pairs in the right order / all pairs, from counts by ascending score; ties are half right."""
    up, down = positive.astype(np.float64), negative.astype(np.float64)
    pairs = up.sum() * down.sum()
    below = np.cumsum(down) - down
    return float(np.sum(up * (below + down / 2)) / pairs) if pairs else math.nan
