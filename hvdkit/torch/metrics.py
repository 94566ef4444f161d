"""Metrics over all ranks: sums are added, then divided."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import horovod.torch as _hvd
import torch
from horovod.torch.mpi_ops import global_process_set

from hvdkit.errors import UsageError
from hvdkit.metrics import Metric, from_vector, to_vector
from hvdkit.torch.sync import require_equal


def reduce_metrics(metrics: Any, *, process_set: Any = global_process_set) -> Any:
    """The value of each metric over all ranks, the same on all of them; all ranks must call this.

    The metrics themselves keep this rank's sums. One exchange for all of them; counts stay exact up to 2**53.

    Args:
        metrics: a metric of ``hvdkit.metrics`` (or any with ``state``, ``load`` and ``compute``), a (sum, count) pair,
            or a dict of these.

    Returns:
        The value, or a dict of values.

    Raises:
        UsageError: something else was given; a mean without its count cannot be reduced.
        OutOfSyncError: ranks reduce different metrics; on every rank.
    """
    if not isinstance(metrics, Mapping):
        return reduce_metrics({"metric": metrics}, process_set=process_set)["metric"]
    states = {name: _state(name, metric) for name, metric in metrics.items()}
    facts = [(f"metric {n!r}", f"{type(metrics[n]).__name__} of {_shapes(s)}") for n, s in states.items()]
    require_equal(facts, "reduce_metrics", process_set=process_set)
    vector = torch.from_numpy(to_vector(states.values()))
    total = _hvd.allreduce(vector, name="hvdkit.metrics", op=_hvd.Sum, process_set=process_set)
    sums = from_vector(total.numpy(), states.values())
    return {name: _value(metric, s) for (name, metric), s in zip(metrics.items(), sums, strict=True)}


def _state(name: str, metric: Any) -> Mapping[str, Any]:
    if isinstance(metric, Metric):
        return metric.state()
    if isinstance(metric, tuple) and len(metric) == 2:
        return {"sum": float(metric[0]), "count": float(metric[1])}
    raise UsageError(
        f"metric {name!r} is a {type(metric).__name__}; a metric of hvdkit.metrics or a (sum, count) pair was expected."
    )


def _value(metric: Any, sums: Mapping[str, Any]) -> Any:
    if isinstance(metric, tuple):
        return float(sums["sum"]) / float(sums["count"]) if sums["count"] else float("nan")
    whole = copy.copy(metric)
    whole.load(sums)
    return whole.compute()


def _shapes(state: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {getattr(value, 'shape', ())}" for key, value in sorted(state.items()))
