"""Metrics averaged where Keras computes them, so that every callback sees the same values wherever it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdkit.log import get_logger
from hvdkit.tf.metrics import is_additive, keras_state
from hvdkit.tf.sync import exchange

_log = get_logger("hvdkit.tf")
_HOOK = "_get_metrics_result_or_logs"
_warned: set[str] = set()


def install(model: Any) -> bool:
    """From now on the logs of ``fit`` and ``evaluate`` are those over all ranks; False if they are already."""
    if _HOOK in model.__dict__:
        return False
    original = getattr(model, _HOOK)
    # Past Keras' own __setattr__, which would track it.
    object.__setattr__(model, _HOOK, lambda logs: averaged(model, original, logs))
    return True


def uninstall(model: Any) -> None:
    """Back to this rank's own logs: an ``evaluate`` on one rank alone must not wait for the others."""
    model.__dict__.pop(_HOOK, None)


def averaged(model: Any, original: Callable[[Any], Any], logs: Any) -> dict[str, float]:
    """The logs over all ranks' samples. Collective, whatever this rank has seen: it may have had no batch at all."""
    metrics = leaf_metrics(model) if logs else []
    states = [keras_state(m) for m in metrics]
    local = _floats(original(logs)) if logs else {}
    everywhere = [item for item in exchange((states, local)) if item[1]]
    result: dict[str, float] = {}
    if logs:
        result = {k: float(np.mean([log[k] for _, log in everywhere if k in log])) for k in local}
        exact = set(logs) == set(model.get_metrics_result())
        means = [m.name for m in metrics if not is_additive(m)] if exact else list(result)
        sums = [[s[i] for s, _ in everywhere] for i in range(len(metrics))]
        pooled = _floats(_on_sums(metrics, sums, lambda: original(logs)))
        result.update({k: v for k, v in pooled.items() if not _is_of(k, means)})
        _warn({k for k in result if _is_of(k, means)})
    # The ranks that have something agree on it, and tell those that have not.
    return next((log for log in exchange(result) if log), {})


def leaf_metrics(model: Any) -> list[Any]:
    """The metrics of a model, those given to ``compile`` singly."""
    leaves: list[Any] = []
    for metric in model.metrics:
        leaves += list(metric.metrics) if hasattr(metric, "metrics") else [metric]
    return leaves


def _on_sums(metrics: list[Any], sums: list[list[Any]], compute: Callable[[], Any]) -> Any:
    """``compute()`` while the metrics hold the sums over ranks; then they get their own state back."""
    before = [[v.numpy() for v in m.variables] for m in metrics]
    try:
        for metric, states in zip(metrics, sums, strict=True):
            if is_additive(metric):
                for variable, *parts in zip(metric.variables, *states, strict=True):
                    variable.assign(np.sum(parts, axis=0).astype(variable.numpy().dtype))
        return compute()
    finally:
        for metric, values in zip(metrics, before, strict=True):
            for variable, value in zip(metric.variables, values, strict=True):
                variable.assign(value)


def _is_of(key: str, names: list[str]) -> bool:
    # With several outputs Keras puts the output's name first.
    return any(key == name or key.endswith(f"_{name}") for name in names)


def _floats(logs: Any) -> dict[str, float]:
    return {name: float(np.asarray(value)) for name, value in logs.items() if np.ndim(np.asarray(value)) == 0}


def _warn(names: set[str]) -> None:
    for name in sorted(names - _warned):
        _warned.add(name)
        _log.info("%s is the plain mean over ranks; a metric whose state adds up is averaged over samples.", name)
