"""Metrics over all ranks: their sums are added up, then divided; no average of averages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdkit.errors import OutOfSyncError, UsageError
from hvdkit.log import get_logger
from hvdkit.metrics import Metric, merge
from hvdkit.tf.sync import exchange

_log = get_logger("hvdkit.tf")
_warned: set[str] = set()


def reduce_metrics(metrics: Any) -> Any:
    """What one process would have measured on the samples of all ranks. Collective; the metrics are left as they are.

    Args:
        metrics: one metric or a list or dict of them. A metric is one of :mod:`hvdkit.metrics`, a (sum, count) pair, or
            one of Keras with additive state (all built-in ones; give your own class ``hvdkit_additive = True`` to say
            that it is so).

    Returns:
        Values in the same form: what ``compute()`` (or ``result()``, as a float or an array) gives on the sums.

    Raises:
        UsageError: something is no metric, or is one whose state does not add up.
        OutOfSyncError: ranks passed different metrics.
    """
    names, listed = _listed(metrics)
    states = [_state(metric) for metric in listed]
    everywhere = exchange([(type(m).__name__, s) for m, s in zip(listed, states, strict=True)])
    kinds = [[kind for kind, _ in one] for one in everywhere]
    if any(k != kinds[0] for k in kinds):
        raise OutOfSyncError(f"ranks reduce different metrics: {kinds}; all must pass the same ones in the same order.")
    values = [_on_sums(m, [one[i][1] for one in everywhere]) for i, m in enumerate(listed)]
    if names is not None:
        return dict(zip(names, values, strict=True))
    return values if isinstance(metrics, list | tuple) and not _is_pair(metrics) else values[0]


def is_additive(metric: Any) -> bool:
    """Whether the variables of a Keras metric add up over ranks."""
    if hasattr(metric, "hvdkit_additive"):
        return bool(metric.hvdkit_additive)
    own = type(metric).__mro__[0].__module__.partition(".")[0]
    mean = tf.keras.metrics.Mean
    # A subclass of Mean that only changes what is averaged keeps Mean's state.
    return own in ("keras", "tf_keras") or (isinstance(metric, mean) and type(metric).result is mean.result)


def keras_state(metric: Any) -> list[Any]:
    """Values of a Keras metric's variables, sums in float64 or int64."""
    return [_wide(np.asarray(v.numpy())) for v in metric.variables]


def result_of_sums(metric: Any, states: Sequence[Sequence[Any]]) -> Any:
    """``metric.result()`` on the sum of ``states``; the metric's own state is put back."""
    before = [v.numpy() for v in metric.variables]
    try:
        for variable, *parts in zip(metric.variables, *states, strict=True):
            variable.assign(np.sum(parts, axis=0).astype(variable.numpy().dtype))
        return metric.result()
    finally:
        for variable, value in zip(metric.variables, before, strict=True):
            variable.assign(value)


def _listed(metrics: Any) -> tuple[list[str] | None, list[Any]]:
    if isinstance(metrics, dict):
        return list(metrics), list(metrics.values())
    if isinstance(metrics, Iterable) and not _is_pair(metrics):
        return None, list(metrics)
    return None, [metrics]


def _is_pair(value: Any) -> bool:
    """A (sum, count) of plain numbers."""
    return (
        isinstance(value, tuple) and len(value) == 2 and all(np.ndim(part) == 0 and np.isreal(part) for part in value)
    )


def _is_keras(metric: Any) -> bool:
    return hasattr(metric, "variables") and hasattr(metric, "result")


def _state(metric: Any) -> Any:
    if _is_keras(metric):
        if not is_additive(metric):
            raise UsageError(
                f"the state of {type(metric).__name__} is not known to add up over ranks; if its variables are sums "
                "and counts, set hvdkit_additive = True in the class, else gather the scores with hvd.allgather_object."
            )
        return keras_state(metric)
    if isinstance(metric, Metric):
        return dict(metric.state())
    if _is_pair(metric):
        return (float(metric[0]), float(metric[1]))
    raise UsageError(
        f"a {type(metric).__name__} was given; a metric of hvdkit.metrics or of Keras, or a (sum, count) pair, "
        "was expected."
    )


def _on_sums(metric: Any, states: list[Any]) -> Any:
    if _is_keras(metric):
        return tf.nest.map_structure(_plain, result_of_sums(metric, states))
    if _is_pair(metric):
        total, count = (sum(part) for part in zip(*states, strict=True))
        return total / count if count else float("nan")
    mine = metric.state()
    try:
        metric.load(merge(states))
        return metric.compute()
    finally:
        metric.load(mine)


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array


def _wide(array: Any) -> Any:
    return array.astype(np.int64 if array.dtype.kind in "iub" else np.float64)
