"""The plan of global batches as a tf.data pipeline: for arrays, with epochs that advance by themselves and resume."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

from hvdkit.arguments import whole
from hvdkit.errors import UsageError
from hvdkit.sharding import ShardPlan
from hvdkit.tf.arrays import as_array, common_length
from hvdkit.tf.collectives import batch_share
from hvdkit.tf.iterator import NotingIterator, positions
from hvdkit.tf.runtime import world

_numbers = itertools.count()
_active: weakref.ref[ShardedDataset] | None = None


def dataset(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_per_rank: int | None = None,
    global_batch: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    tail: str = "exact",
    train: bool = True,
    prefetch: int = 2,
) -> ShardedDataset:
    """This rank's part of arrays as batches: the same global batches on any number of ranks.

    In training all ranks make the same number of steps, epochs follow each other with new orders, and gradients that
    hvdkit reduces are weighted by samples, the short last batch included. A rank whose part of a short batch is empty
    gets two filler samples that weigh nothing in the gradient (two, since batch normalisation may refuse one); metrics
    do count them. ``map`` and ``prefetch`` keep all this; methods of ``tf.data.Dataset`` that would change the batches
    are refused. An iteration that is left early begins again where it began.

    With ``train=False`` each sample is seen exactly once over all ranks, in order unless ``shuffle=True``; ranks
    may make different numbers of steps, a rank may have none, and nothing is weighted or remembered.

    Args:
        x, y, sample_weight: arrays with samples along axis 0, or dicts, tuples or lists of them, all of one length.
        batch_per_rank: samples per step and rank; the global batch grows with the ranks. Or
        global_batch: samples per step over all ranks.
        shuffle: a new order per epoch; by default in training only.
        seed: of the order; the same on all ranks, and the same order in PyTorch.
        tail: ``"exact"``, ``"pad"`` or ``"drop"``, see :class:`hvdkit.ShardPlan`.
        prefetch: batches made ahead.

    Raises:
        UsageError: arrays of different lengths, bad batch, seed or tail.
    """
    parts = tuple(part for part in (x, y, sample_weight) if part is not None)
    arrays = tf.nest.map_structure(as_array, parts)
    plan = ShardPlan(
        length=common_length(arrays),
        size=world().size,
        rank=world().rank,
        global_batch=global_batch,  # type: ignore[arg-type]
        batch_per_rank=batch_per_rank,
        shuffle=train if shuffle is None else shuffle,
        seed=seed,
        tail=tail if train else "exact",
    )
    spec = tf.nest.map_structure(lambda a: tf.TensorSpec((None, *a.shape[1:]), tf.as_dtype(a.dtype)), arrays)

    def take(ids: Any) -> Any:
        batch = tf.nest.map_structure(lambda a: a[ids], arrays)
        return batch if len(parts) > 1 else batch[0]

    # Keras' fit says so of every tf.data.Dataset; this one is shuffled as it should be.
    warnings.filterwarnings("ignore", message="`shuffle=True` was passed, but will be ignored")
    source = _Source(plan, take, spec if len(parts) > 1 else spec[0], train)
    return ShardedDataset(source, source.pipeline.prefetch(prefetch))


def active_dataset() -> ShardedDataset | None:
    """The training dataset that was iterated, or handed to ``fit``, last; None if there is none any more."""
    return None if _active is None else _active()


class _Source:
    """The plan, the position in it, and the pipeline of ``(element, share, position after)`` from there."""

    def __init__(self, plan: ShardPlan, take: Callable[[Any], Any], spec: Any, training: bool) -> None:
        self.plan, self.training, self.number = plan, training, next(_numbers)
        self.start = 0  # where the current epoch was begun or resumed
        self._take = take
        self._drawn = 0  # by Python's next() since then
        with tf.init_scope(), tf.device("/CPU:0"):
            self._position = tf.Variable(0, trainable=False, dtype=tf.int64, name="hvdkit_position")
        positions[self.number] = self._position
        signature = (spec, tf.TensorSpec((), tf.float32), tf.TensorSpec((), tf.int64))
        self.pipeline = tf.data.Dataset.from_generator(self._batches, output_signature=signature)

    @property
    def position(self) -> int:
        """Samples passed: up to the batch that was handed out last."""
        return int(self._position.numpy())

    def seek(self, position: int) -> None:
        """Go on from ``position``; an iteration that is under way is not moved."""
        self.start, self._drawn = position, 0
        self._position.assign(position)

    def begin(self) -> None:
        """Where the next iteration starts: after a finished epoch the next one, else again where this one began."""
        position = self.position
        # A single next() is a look at the data, not an epoch of one step.
        finished = position == self._end() and self._drawn != 1
        self.seek(position if finished and self.training else self.start)
        batch_share().assign(1.0)  # nothing of this data is in hand

    def on_draw(self, has_element: bool) -> None:
        """A draw by Python's ``next()``; the end of the data leaves no doubt that the epoch is done."""
        self._drawn = self._drawn + 1 if has_element else 0
        if not has_element:
            batch_share().assign(1.0)

    def _end(self) -> int:
        return (self.plan.locate(self.start)[0] + 1) * self.plan.epoch_length

    def _batches(self) -> Iterator[tuple[Any, Any, Any]]:
        plan, position = self.plan, self.start
        for ids in plan.batches(position):
            counts = plan.counts_at(position)
            position = plan.advance(position)
            share = counts[plan.rank] * plan.size / max(1, counts.sum())
            if ids.size:
                yield self._take(ids), np.float32(share), np.int64(position)
            elif self.training:
                yield self._take(np.array([0, min(1, plan.length - 1)])), np.float32(0.0), np.int64(position)


class ShardedDataset(tf.data.Dataset):  # type: ignore[misc]
    """What :func:`dataset` returns: a ``tf.data.Dataset`` of this rank's batches that knows its plan and position."""

    def __init__(self, source: _Source, inner: tf.data.Dataset) -> None:
        self._source, self._inner = source, inner
        self._plain = inner.map(lambda element, share, position: element)
        super().__init__(self._plain._variant_tensor)

    @property
    def plan(self) -> ShardPlan:
        """The plan of global batches."""
        return self._source.plan

    @property
    def position(self) -> int:
        """Samples passed since the start of training, up to the batch that was handed out last."""
        return self._source.position

    @property
    def epoch(self) -> int:
        """The epoch that :attr:`position` is in; at its end, the next one."""
        return self.plan.locate(self.position)[0]

    @property
    def steps(self) -> int:
        """Batches in a full epoch: equal on all ranks in training, this rank's own in evaluation."""
        if self._source.training or self.plan.steps == 0:
            return self.plan.steps
        # Only the last batch can be short, so only it can be empty where others are not.
        has_samples = [bool(self.plan.counts(step)[self.plan.rank]) for step in (0, self.plan.steps - 1)]
        return (self.plan.steps - 1) * has_samples[0] + has_samples[1]

    @property
    def global_batch(self) -> int:
        """Samples per step over all ranks."""
        return self.plan.global_batch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. Not needed in a training loop: epochs advance by themselves."""
        self._source.seek(self.plan.position(whole("epoch", epoch)))

    def state_dict(self) -> dict[str, Any]:
        """The position and what it means, as plain values."""
        return {"position": self.position, **self.plan.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the very next sample, on any number of ranks.

        Raises:
            UsageError: the state is of other data, another order or another batch; with both values.
        """
        self.plan.check_state(state)
        self._source.seek(whole("position", state.get("position")))

    @property
    def element_spec(self) -> Any:
        """The type of a batch."""
        return self._plain.element_spec

    def _inputs(self) -> list[Any]:
        return [self._plain]

    def cardinality(self) -> tf.Tensor:
        """Batches in a full epoch, as a scalar int64 tensor; Keras asks for it as ``fit`` begins."""
        self._activate()
        return tf.constant(self.steps, tf.int64)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Any:
        self._activate()
        if not self._source.training:
            return iter(self._plain)
        self._source.begin()
        with ops.colocate_with(self._inner._variant_tensor):
            return NotingIterator(self._inner, number=self._source.number, on_draw=self._source.on_draw)

    def map(self, map_func: Callable[..., Any], *args: Any, **kwargs: Any) -> ShardedDataset:
        """As ``tf.data.Dataset.map``: ``map_func`` gets and gives a batch, not a sample."""

        def mapped(element: Any, share: Any, position: Any) -> Any:
            result = map_func(*element) if isinstance(element, tuple) else map_func(element)
            return result, share, position

        return ShardedDataset(self._source, self._inner.map(mapped, *args, **kwargs))

    def prefetch(self, *args: Any, **kwargs: Any) -> ShardedDataset:
        """As ``tf.data.Dataset.prefetch``."""
        return ShardedDataset(self._source, self._inner.prefetch(*args, **kwargs))

    def with_options(self, *args: Any, **kwargs: Any) -> ShardedDataset:
        """As ``tf.data.Dataset.with_options``."""
        return ShardedDataset(self._source, self._inner.with_options(*args, **kwargs))

    def _activate(self) -> None:
        global _active
        if self._source.training:
            _active = weakref.ref(self)


def _refusing(name: str) -> Callable[..., Any]:
    inherited = getattr(tf.data.Dataset, name)

    def method(self: ShardedDataset, *args: Any, **kwargs: Any) -> Any:
        if self._source.training:
            _refuse(name)
        return inherited(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"Refused in training: ``{name}`` would lose the plan of global batches."
    return method


def _refuse(name: str) -> NoReturn:
    advice = {
        "reduce": "Loop over it in Python and put the step, not the loop, into tf.function.",
        "scan": "Loop over it in Python and put the step, not the loop, into tf.function.",
        "take": "To look at a batch, use next(iter(dataset)); fit takes steps_per_epoch.",
        "repeat": "Epochs follow each other by themselves: iterate again, or give fit the epochs.",
        "shuffle": "Give hvd.dataset shuffle=True and a seed.",
        "batch": "Give hvd.dataset batch_per_rank or global_batch.",
        "shard": "It holds only this rank's samples already.",
    }.get(name, "Do it on the arrays before hvd.dataset, or in map.")
    raise UsageError(
        f"{name}() was called on a training dataset of hvd.dataset; it would lose the plan of global batches. {advice}"
    )


_CHANGES_BATCHES = (
    "apply batch bucket_by_sequence_length cache concatenate enumerate filter flat_map group_by_window interleave "
    "padded_batch ragged_batch rebatch reduce rejection_resample repeat sample_from_datasets scan shard shuffle skip "
    "snapshot sparse_batch take take_while unbatch unique window"
)
for _name in _CHANGES_BATCHES.split():
    if hasattr(tf.data.Dataset, _name):
        setattr(ShardedDataset, _name, _refusing(_name))
