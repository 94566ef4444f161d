"""The protocol of mergeable statistics, and how the states of several metrics travel as one vector.

A state is a dict of float64 or int64 arrays of fixed shapes that merges by **sum** over ranks, so a reduction is one
allreduce of :func:`to_vector` and then :func:`from_vector`, ``load`` and ``compute``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hvdkit.errors import UsageError

State = dict[str, npt.NDArray[Any]]


@runtime_checkable
class Metric(Protocol):
    """What an adapter needs of a metric; the arguments of ``update`` are each metric's own."""

    def state(self) -> State:
        """Copies of the sums, ready to be added to those of other ranks."""

    def load(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Take over sums, usually those over all ranks."""

    def compute(self) -> Any:
        """The value for the sums at hand."""


class SumMetric:
    """Base of the metrics: keeps named arrays of sums in ``self._sums``."""

    def __init__(self, **sums: npt.NDArray[Any]) -> None:
        self._sums: State = sums

    def state(self) -> State:
        """Copies of the sums, ready to be added to those of other ranks."""
        return {name: array.copy() for name, array in self._sums.items()}

    def load(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Take over sums of the same names and shapes.

        Raises:
            UsageError: names or shapes differ (a metric with other settings), with both.
        """
        loaded = {name: np.asarray(array) for name, array in state.items()}
        given = {name: array.shape for name, array in loaded.items()}
        expected = {name: array.shape for name, array in self._sums.items()}
        if given != expected:
            raise UsageError(f"{type(self).__name__} was given the state {given}; {expected} was expected.")
        self._sums = {name: loaded[name].astype(array.dtype) for name, array in self._sums.items()}

    def reset(self) -> None:
        """Start anew."""
        self._sums = {name: np.zeros_like(array) for name, array in self._sums.items()}


def to_vector(states: Iterable[Mapping[str, npt.ArrayLike]]) -> npt.NDArray[np.float64]:
    """All sums of some states in one float64 vector, for one allreduce; counts stay exact up to 2**53."""
    parts = [np.asarray(state[name], np.float64).reshape(-1) for state in states for name in sorted(state)]
    return np.concatenate([np.empty(0), *parts])


def from_vector(vector: npt.ArrayLike, like: Iterable[Mapping[str, npt.ArrayLike]]) -> list[State]:
    """The states again, with names, shapes and dtypes of ``like``.

    Raises:
        UsageError: the vector is of another length than ``like`` needs.
    """
    numbers, start, states = np.asarray(vector, np.float64).reshape(-1), 0, list[State]()
    for model in like:
        states.append({})
        for name in sorted(model):
            array = np.asarray(model[name])
            part = numbers[start : start + array.size]
            if part.size == array.size:
                states[-1][name] = part.reshape(array.shape).astype(array.dtype)
            start += array.size
    if start != numbers.size:
        raise UsageError(f"a vector of {numbers.size} numbers was given; the states need {start}.")
    return states


def merge(states: Iterable[Mapping[str, npt.ArrayLike]]) -> State:
    """The sum of the states of one metric on several ranks: what the allreduce computes."""
    total: State = {}
    for state in states:
        total = {name: np.asarray(array) + total.get(name, 0) for name, array in state.items()}
    return total


def in_sample_order(ids: npt.ArrayLike, rows: npt.ArrayLike) -> npt.NDArray[Any]:
    """Rows gathered rank by rank, put into the order of their sample ids.

    Raises:
        UsageError: the numbers of ids and rows differ, or an id comes twice (a padded evaluation counts samples twice).
    """
    numbers, values = np.asarray(ids), np.asarray(rows)
    if numbers.ndim != 1 or len(numbers) != len(values):
        raise UsageError(
            f"ids of shape {numbers.shape} and rows of shape {values.shape} were given; one id per row was expected."
        )
    order = np.argsort(numbers, kind="stable")
    repeated = numbers[order][1:][np.diff(numbers[order]) == 0]
    if repeated.size:
        raise UsageError(
            f"the sample ids {np.unique(repeated)[:8].tolist()} come more than once; evaluate with tail='exact'."
        )
    return values[order]
