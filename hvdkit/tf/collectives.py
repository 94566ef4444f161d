"""Gradients reduced over ranks: weighted by samples, under names that come from the variables.

The mean over a global batch is ``sum_r(count_r * g_r) / total`` where ``g_r`` is the mean over rank r's part. With
``share_r = count_r * size / total`` that is Horovod's Average of ``share_r * g_r``; for equal parts the share is 1.
The share of the batch that was drawn last stands in a variable that the iterator of :func:`hvdkit.tf.dataset` sets as
it hands the batch out, in eager code and in graphs alike, so it belongs to this batch whatever is prefetched.
"""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvdkit.errors import UsageError

_share: tf.Variable | None = None
_broadcasts: dict[tuple[Any, ...], Callable[..., list[Any]]] = {}
_numbers = itertools.count()
_calls_in_graph: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def batch_share() -> tf.Variable:
    """The scalar float32 variable ``count * size / total`` of the batch drawn last; 1 where no plan is known."""
    global _share
    if _share is None:
        with tf.init_scope(), tf.device("/CPU:0"):
            _share = tf.Variable(1.0, trainable=False, dtype=tf.float32, name="hvdkit_batch_share")
    return _share


class GradientReducer:
    """Reduces a list of gradients (dense, ``IndexedSlices`` or None) over the ranks of a process set.

    Args:
        prefix: starts the names of the collectives; unique per optimizer or tape, equal on all ranks.
        op: Horovod's Average, Sum or, for tapes, Adasum. Sum is ``size`` times the mean over the global batch.
        others: as in Horovod's ``DistributedOptimizer``.
    """

    def __init__(
        self,
        prefix: str,
        *,
        op: Any = horovod.Average,
        compression: Any = horovod.Compression.none,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        groups: Any = None,
        process_set: Any = horovod.global_process_set,
        device_dense: str = "",
        device_sparse: str = "",
    ) -> None:
        self.prefix, self.op, self.process_set = prefix, op, process_set
        self._compression, self._sparse_as_dense, self._groups = compression, sparse_as_dense, groups
        self._device_dense, self._device_sparse = device_dense, device_sparse
        predivide = gradient_predivide_factor if op == horovod.Average else 1.0
        self._scale = {"prescale_factor": 1.0 / predivide, "postscale_factor": predivide}
        # Shares count samples over all ranks; in a part of them, or for Adasum, they have no meaning.
        self._weighted = op in (horovod.Average, horovod.Sum) and process_set.process_set_id == 0
        self._functions: dict[tuple[str, ...], Callable[..., list[Any]]] = {}

    def __call__(self, grads: Sequence[Any], variables: Sequence[Any], use_generic_names: bool = False) -> list[Any]:
        """The reduced gradients, None where None was given. ``use_generic_names`` is Horovod's, and not needed here."""
        if not self.process_set.included() or self.process_set.size() == 1:
            # Rows that come twice are summed, as they are on several ranks: some of Keras' optimizers need it.
            return [_each_row_once(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        present = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        if not present:
            return list(grads)
        names = tuple(f"{self.prefix}.{i}.{variable_name(v)}" for i, (_, v) in enumerate(present))
        groups = self._group_of(names, [v for _, v in present])
        given = [g for g, _ in present]
        reduced = iter(self._in_graph(given, names, groups))
        return [None if g is None else next(reduced) for g in grads]

    def _in_graph(self, grads: list[Any], names: tuple[str, ...], groups: list[list[int]]) -> list[Any]:
        if not tf.executing_eagerly():
            return self._reduce(grads, names, groups)
        # In eager mode one collective would wait for the other; a function sends them off together.
        if names not in self._functions:
            self._functions[names] = tf.function(
                lambda tensors: self._reduce(tensors, names, groups), reduce_retracing=True, autograph=False
            )
        return list(self._functions[names](grads))

    def _reduce(self, grads: list[Any], names: tuple[str, ...], groups: list[list[int]]) -> list[Any]:
        names = _unique_in_graph(names)
        share = batch_share().read_value() if self._weighted else None
        if self._sparse_as_dense:
            grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
        reduced: list[Any] = [None] * len(grads)
        for indices in groups:
            dense = [i for i in indices if not isinstance(grads[i], tf.IndexedSlices)]
            results = self._reduce_dense([_weigh(grads[i], share) for i in dense], [names[i] for i in dense])
            for i, result in zip(dense, results, strict=True):
                reduced[i] = result
            for i in indices:
                if isinstance(grads[i], tf.IndexedSlices):
                    reduced[i] = self._reduce_sparse(grads[i], share, names[i])
        return reduced

    def _reduce_dense(self, grads: list[Any], names: list[str]) -> list[Any]:
        settings: dict[str, Any] = {
            "op": self.op,
            "compression": self._compression,
            "process_set": self.process_set,
            "device_dense": self._device_dense,
            "ignore_name_scope": True,
            **self._scale,
        }
        if len(grads) < 2:
            return [horovod.allreduce(g, name=n, **settings) for g, n in zip(grads, names, strict=True)]
        return list(horovod.grouped_allreduce(grads, name=names[0], **settings))

    def _reduce_sparse(self, grad: tf.IndexedSlices, share: Any, name: str) -> tf.IndexedSlices:
        """Rows of all ranks together, each index once: a rank without rows sends none, and duplicates are summed."""
        if self.op not in (horovod.Average, horovod.Sum):
            raise UsageError(
                "a sparse gradient cannot be reduced with Adasum; give sparse_as_dense=True or op=hvd.Average."
            )
        with tf.device(self._device_sparse):
            settings: dict[str, Any] = {"process_set": self.process_set, "ignore_name_scope": True}
            values = horovod.allgather(_weigh(grad.values, share), name=f"{name}.values", **settings)
            indices = horovod.allgather(grad.indices, name=f"{name}.indices", **settings)
            if self.op == horovod.Average:
                values = values / tf.cast(self.process_set.size(), values.dtype)
        return _each_row_once(tf.IndexedSlices(values, indices, dense_shape=grad.dense_shape))

    def _group_of(self, names: tuple[str, ...], variables: list[Any]) -> list[list[int]]:
        """Positions that travel as one: each by itself, in ``groups`` even parts, or by the lists of variables."""
        everything = list(range(len(names)))
        if not self._groups:
            return [[i] for i in everything]
        if isinstance(self._groups, int):
            count = min(self._groups, len(names))
            bounds = [len(names) * k // count for k in range(count + 1)]
            return [everything[a:b] for a, b in itertools.pairwise(bounds)]
        place = {identity(v): i for i, v in enumerate(variables)}
        grouped = [[place[identity(v)] for v in group if identity(v) in place] for group in self._groups]
        rest = set(everything).difference(*grouped)
        return [group for group in grouped if group] + [[i] for i in sorted(rest)]


def make_reducer(kind: str, **settings: Any) -> GradientReducer:
    """A reducer with a prefix of its own: numbered in the order of their making, which is the same on all ranks."""
    return GradientReducer(f"hvdkit.{kind}{next(_numbers)}", **settings)


def reduce_mean(tensor: Any, share: Any, name: str) -> Any:
    """The mean of a dense tensor over all ranks, this rank's weighted by ``share``."""
    unique = _unique_in_graph((name,))[0]
    return horovod.allreduce(_weigh(tensor, share), op=horovod.Average, name=unique, ignore_name_scope=True)


def predivide_needs_average(factor: float, op: Any) -> bool:
    """Whether a ``gradient_predivide_factor`` was given that ``op`` cannot use."""
    return bool(factor != 1.0 and op != horovod.Average)


def times(grad: Any, factor: float) -> Any:
    """``factor * grad`` for a dense, sparse or absent gradient."""
    if grad is None or factor == 1.0:
        return grad
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values * factor, grad.indices, grad.dense_shape)
    return grad * factor


def _each_row_once(grad: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same gradient without repeated indices: their rows are summed."""
    rows, place = tf.unique(grad.indices)
    values = tf.math.unsorted_segment_sum(grad.values, place, tf.shape(rows)[0])
    return tf.IndexedSlices(values, rows, dense_shape=grad.dense_shape)


def gradient_kind(grad: Any) -> str:
    """What ranks must agree on about a gradient before they exchange it."""
    if grad is None:
        return "without gradient"
    return "sparse gradient" if isinstance(grad, tf.IndexedSlices) else "dense gradient"


def _weigh(grad: Any, share: Any) -> Any:
    """``share * grad``, and exactly 0 for share 0 whatever the filler sample gave, NaN included."""
    return grad if share is None else tf.math.multiply_no_nan(grad, tf.cast(share, grad.dtype))


def as_tf_variable(variable: Any) -> Any:
    """The TensorFlow variable inside a Keras variable; anything else as it is."""
    return variable.value if hasattr(variable, "path") else variable


def broadcast_variables(
    variables: Any, root_rank: int, process_set: Any = horovod.global_process_set, inplace: bool = False
) -> Any:
    """Give every rank of a process set the root's values, of TensorFlow's and of Keras' variables.

    Arguments as in Horovod; ``inplace`` is accepted. Horovod's own keeps a function that remembers the variables it was
    first called with, and fails when they are gone.
    """
    plain = [as_tf_variable(v) for v in variables]
    if not plain or not process_set.included():
        return None
    names = tuple(f"hvdkit.broadcast.{i}.{variable_name(v)}" for i, v in enumerate(plain))
    values = [v.read_value() for v in plain]
    if tf.executing_eagerly():
        key = (root_rank, process_set.process_set_id, names)
        if key not in _broadcasts:
            _broadcasts[key] = tf.function(
                lambda tensors: _broadcast(tensors, names, root_rank, process_set),
                reduce_retracing=True,
                autograph=False,
            )
        values = _broadcasts[key](values)
    else:
        values = _broadcast(values, _unique_in_graph(names), root_rank, process_set)
    return tf.group(*[v.assign(value) for v, value in zip(plain, values, strict=True)])


def _broadcast(tensors: list[Any], names: tuple[str, ...], root_rank: int, process_set: Any) -> list[Any]:
    return [
        horovod.broadcast(t, root_rank, name=name, ignore_name_scope=True, process_set=process_set)
        for t, name in zip(tensors, names, strict=True)
    ]


def identity(variable: Any) -> int:
    """The same number for a Keras variable and for the TensorFlow variable inside it."""
    return id(as_tf_variable(variable))


def plain_name(variable: Any) -> str:
    """The path of a variable without the numbers that Keras adds to names it makes up.

    They count all models that a process has made, so a rank that made one more has others.
    """
    name = getattr(variable, "path", None) or getattr(variable, "name", None) or "tensor"
    return re.sub(r"_\d+(?=[/_]|$)", "", str(name).split(":")[0])


def variable_name(variable: Any) -> str:
    """A name for collectives on ``variable``."""
    # Horovod drops what stands before the last slash.
    return re.sub(r"[^A-Za-z0-9_.]", ".", plain_name(variable))


def _unique_in_graph(names: tuple[str, ...]) -> tuple[str, ...]:
    """Give the second use of a name in one graph a number: equal names in flight at once are an error in Horovod."""
    seen = _calls_in_graph.setdefault(tf.compat.v1.get_default_graph(), {})
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
    return tuple(unique)
