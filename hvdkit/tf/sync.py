"""Ranks compared and made equal: objects exchanged, signatures and digests checked, variables broadcast.

All functions here are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

from hvdkit.errors import HvdkitError, OutOfSyncError, UsageError
from hvdkit.tf.collectives import gradient_kind, plain_name
from hvdkit.tf.runtime import world

T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """One named array that ranks must agree on. ``kind``: "weight", "non-trainable weight" or "optimizer state"."""

    kind: str
    name: str
    value: Any

    @property
    def signature(self) -> tuple[str, str, tuple[int, ...], str]:
        return (self.kind, plain_name(self.value), tuple(self.value.shape), tf.as_dtype(self.value.dtype).name)

    def digest(self) -> bytes:
        """BLAKE2 of the bytes; NaNs of equal bits are equal, +0 and -0 are not."""
        array = np.ascontiguousarray(_to_numpy(self.value))
        return hashlib.blake2b(array.tobytes(), digest_size=16).digest()


def exchange(item: Any) -> list[Any]:
    """``item`` of every rank, in rank order."""
    if world().size == 1:
        return [item]
    return list(horovod.allgather_object(item, name="hvdkit.exchange"))


def from_rank0(item: Any, root_rank: int = 0) -> Any:
    """Rank 0's ``item``, on every rank."""
    if world().size == 1:
        return item
    return horovod.broadcast_object(item, root_rank, name="hvdkit.broadcast")


def check_in_sync(target: Any) -> None:
    """Raise on every rank if ranks do not hold equal tensors, naming the first that differs and the ranks.

    Names, shapes and dtypes are compared first, then a digest of every tensor. Random states of dropout layers and
    the like differ by rank on purpose and are left out, and so are metrics.

    Args:
        target: a Keras model (its weights, and its optimizer if compiled), an optimizer, a ``tf.Module``, or variables.

    Raises:
        OutOfSyncError: on all ranks alike.
        UsageError: the target holds no variables and is none of the above.
    """
    tensors = tensors_of(target)
    check_signature([t.signature for t in tensors])
    digests = [t.digest() for t in tensors]
    whole = hashlib.blake2b(b"".join(digests), digest_size=16).digest()
    # One short message tells whether there is anything to find.
    if len(set(exchange(whole))) > 1:
        _raise_first_difference(tensors, exchange(digests))


def check_signature(mine: Sequence[tuple[Any, ...]], subject: str = "tensor") -> None:
    """Compare what ranks are about to work on: the n-th entry (kind, name, shape, dtype) must be equal everywhere.

    Raises:
        OutOfSyncError: names the first difference with both values and their ranks.
    """
    everywhere = exchange([tuple(entry) for entry in mine])
    longest = max(len(entries) for entries in everywhere)
    for i in range(longest):
        entries = [rank_entries[i] if i < len(rank_entries) else None for rank_entries in everywhere]
        if len(set(entries)) > 1:
            raise OutOfSyncError(
                f"{subject} {i} differs between ranks: {_by_rank(entries, _describe)}. {_FIX_SIGNATURE}"
            )


def check_settings(mine: dict[str, Any]) -> None:
    """Compare named settings before tensors are compared.

    Raises:
        OutOfSyncError: the first that differs, with each rank's value.
    """
    everywhere = exchange({name: repr(value) for name, value in mine.items()})
    for name in mine:
        values = [other.get(name, "nothing") for other in everywhere]
        if len(set(values)) > 1:
            raise OutOfSyncError(
                f"{name} differs between ranks: {_by_rank(values, str)}. Start one script with the same settings."
            )


def gradient_signature(grads: Sequence[Any], variables: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What ranks are about to reduce: name, shape and dtype of each variable, and the kind of its gradient."""
    signatures = [t.signature for t in tensors_of(list(variables))]
    return [(*s, gradient_kind(g)) for s, g in zip(signatures, grads, strict=True)]


_FIX_SIGNATURE = (
    "All ranks must build the same model: take numbers such as the count of classes from all of the data, not from "
    "one rank's part, and use one dtype policy."
)


def tensors_of(target: Any) -> list[Tensor]:
    """What of ``target`` must be equal on all ranks, in a stable order."""
    if _is_model(target):
        optimizer = getattr(target, "optimizer", None)
        return _of_model(target) + (_of_optimizer(optimizer) if optimizer is not None else [])
    if _is_optimizer(target):
        return _of_optimizer(target)
    if isinstance(target, tf.Module):
        return _of_variables(target.variables)
    if isinstance(target, Iterable) and not isinstance(target, str | bytes | dict):
        return _of_variables(target)
    raise UsageError(
        f"{type(target).__name__} was given; a Keras model, an optimizer, a tf.Module or a list of variables was "
        "expected."
    )


def _of_model(model: Any) -> list[Tensor]:
    # `weights` has neither metrics nor seed generators, which are a rank's own.
    trainable = {id(v) for v in model.trainable_weights}
    return [Tensor("weight" if id(v) in trainable else "non-trainable weight", _name(v), v) for v in model.weights]


def _of_optimizer(optimizer: Any) -> list[Tensor]:
    variables = optimizer.variables
    return [Tensor("optimizer state", _name(v), v) for v in (variables() if callable(variables) else variables)]


def _of_variables(variables: Iterable[Any]) -> list[Tensor]:
    listed = list(variables)
    for v in listed:
        if not hasattr(v, "shape") or not hasattr(v, "dtype"):
            raise UsageError(f"{v!r} was given among the variables; a variable or a tensor was expected.")
    return [Tensor("weight" if getattr(v, "trainable", True) else "non-trainable weight", _name(v), v) for v in listed]


def _raise_first_difference(tensors: list[Tensor], digests: list[list[bytes]]) -> None:
    for i, tensor in enumerate(tensors):
        column = [rank_digests[i] for rank_digests in digests]
        if len(set(column)) > 1:
            others = sum(len({d[j] for d in digests}) > 1 for j in range(i + 1, len(tensors)))
            raise OutOfSyncError(
                f"{tensor.kind} {tensor.name!r} differs between ranks: {_by_rank(column, lambda d: d.hex()[:8])} "
                f"({others} more of {len(tensors)} tensors differ). Ranks have left step: was every variable "
                "broadcast at the start, and every update made from reduced gradients?"
            )
    raise OutOfSyncError(
        "digests of the whole differ between ranks, but no single tensor does: a rank changed meanwhile."
    )


def _by_rank(values: Sequence[Any], describe: Any) -> str:
    """``values`` with the ranks that hold each, e.g. ``ranks 0, 2: a; rank 1: b``."""
    holders: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {describe(value)}"
        for value, ranks in holders.items()
    )


def _describe(entry: tuple[Any, ...] | None) -> str:
    return "nothing" if entry is None else " ".join(str(part) for part in entry)


def _name(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor")


def _to_numpy(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def _is_model(target: Any) -> bool:
    return hasattr(target, "trainable_weights") and hasattr(target, "weights")


def _is_optimizer(target: Any) -> bool:
    return hasattr(target, "apply_gradients") and hasattr(target, "variables")


def on_rank0(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 only and give its result, made of plain values, to all.

    Raises:
        HvdkitError, OSError: raised there, on every rank.
    """
    outcome: Any = None
    if world().rank == 0:
        try:
            outcome = (action(), None)
        except (HvdkitError, OSError) as error:
            outcome = (None, error)
    outcome = from_rank0(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result
