"""``TrainingState``: everything that a run needs to go on as if it had not stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.arguments import whole
from hvdkit.checkpoint import CheckpointFolder, pack, unpack
from hvdkit.errors import CheckpointError
from hvdkit.log import get_logger
from hvdkit.schedule import Scaling
from hvdkit.tf.random_state import capture_random_state, restore_random_state
from hvdkit.tf.runtime import seed_generators, world
from hvdkit.tf.start import broadcast_state, scale_learning_rate
from hvdkit.tf.statistics import average_statistics
from hvdkit.tf.sync import check_in_sync, exchange, on_rank0

FORMAT = 1
_log = get_logger("hvdkit.tf")


class TrainingState:
    """Saves and restores a Keras model, its optimizer, the data position and the random states of every rank.

    Rank 0 writes and reads; what it finds is sent to all, so no rank looks at its own disk. A checkpoint holds arrays
    and plain values only.

    Args:
        folder: where checkpoints lie; made when the first one is saved.
        model: a Keras model, built; optimizer: its optimizer, by default the one it was compiled with.
        schedule: accepted for the likeness to torch; a Keras schedule has no state but the optimizer's step.
        loader: the ``hvd.dataset`` that is trained on.
        keep: how many of the newest checkpoints to keep; None keeps all.
        best: ``"max"`` or ``"min"``: also keep the one with the best ``metric`` given to :meth:`save`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: Any,
        optimizer: Any = None,
        schedule: Any = None,
        loader: Any = None,
        keep: int | None = 3,
        best: str | None = None,
    ) -> None:
        self.folder = CheckpointFolder(folder, keep, best)
        self._model, self._loader = model, loader
        self._optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self._epoch, self._saves, self._in_epoch = 0, 0, False

    @property
    def epoch(self) -> int:
        """The epoch that training is in, from 0: the loader's, or counted by :meth:`epochs` without one."""
        return self._epoch if self._loader is None else int(self._loader.epoch)

    @property
    def step(self) -> int:
        """Batches that the optimizer has seen, which numbers the checkpoints; without an optimizer: the saves."""
        return self._saves if self._optimizer is None else int(self._optimizer._iterations.numpy())

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of ``count``. A loop body that leaves its epoch unfinished goes on to the next."""
        whole("count", count)
        while (epoch := self.epoch) < count:
            self._in_epoch = True
            yield epoch
            self._in_epoch = False
            if self._loader is None:
                self._epoch = epoch + 1
            elif self.epoch == epoch:
                self._loader.set_epoch(epoch + 1)
                if self.epoch == epoch:  # a loader of no samples stays in epoch 0
                    return

    def save(self, metric: float | None = None) -> Path:
        """Write a checkpoint; every rank must call this. Moving statistics are averaged over ranks first.

        May be called at any step, also inside an epoch. Without a loader the epoch in progress counts as done.

        Raises:
            CheckpointError: it cannot be written; on every rank, and what was there before is untouched.
        """
        average_statistics(self._model)
        self._saves += 1
        states = exchange(capture_random_state(self._model))
        return Path(on_rank0(lambda: str(self.folder.write(self.step, pack(self._content(states)), metric))))

    def restore(self) -> bool:
        """Go on from the newest good checkpoint that rank 0 finds; False if there is none. Every rank must call this.

        Raises:
            CheckpointError: the checkpoint does not fit this model, optimizer or data; on every rank.
            OutOfSyncError: ranks differ after loading.
        """
        self._build_optimizer()
        small = on_rank0(self._read)
        if small is None:
            _log.info("no checkpoint in %s: a fresh start", self.folder.path)
            return False
        broadcast_state(self._model.weights, self._optimizer, root_rank=0)
        self._apply(small)
        check_in_sync(self._model)
        if self._optimizer is not None:
            check_in_sync(self._optimizer)
        _log.info("went on from %s: epoch %d, step %d", small["source"], self.epoch, self.step)
        return True

    def _build_optimizer(self) -> None:
        # Slots exist only once the optimizer is built, and what does not exist is not restored.
        if self._optimizer is not None and not self._optimizer.built:
            self._optimizer.build(self._model.trainable_variables)
        if self._optimizer is not None and hasattr(self._optimizer, "_hvd"):
            scale_learning_rate(self._optimizer)

    def _content(self, random_states: list[Any]) -> dict[str, Any]:
        hvd = getattr(self._optimizer, "_hvd", None)
        return {
            "format": FORMAT,
            "framework": "tensorflow",
            "hvdkit": hvdkit.__version__,
            "size": world().size,
            "step": self.step,
            "saves": self._saves,
            "epoch": self._epoch + self._in_epoch,
            "data": None if self._loader is None else self._loader.state_dict(),
            "base_lr": None if hvd is None else hvd.base_lr,
            "factor": 1.0 if hvd is None or hvd.scaling is None else hvd.scaling.factor,
            "random": random_states,
            "weights": _values(self._model.weights),
            "optimizer": None if self._optimizer is None else _values(self._optimizer.variables),
        }

    def _read(self) -> dict[str, Any] | None:
        """On rank 0: load the tensors from the newest good checkpoint and return the rest of it."""
        newest = self.folder.newest_good()
        if newest is None:
            return None
        content = unpack(self.folder.read(newest[1]))
        if not isinstance(content, dict) or content.get("format") != FORMAT or content.get("framework") != "tensorflow":
            raise CheckpointError(f"{newest[1]} is not a checkpoint that this version of hvdkit.tf wrote.")
        _assign(self._model.weights, content.pop("weights"), f"the model in {newest[1]}")
        slots = content.pop("optimizer")
        if self._optimizer is not None and slots is not None:
            _assign(self._optimizer.variables, slots, f"the optimizer in {newest[1]}")
        return {**content, "source": str(newest[1])}

    def _apply(self, content: dict[str, Any]) -> None:
        self._epoch, self._saves = content["epoch"], content["saves"]
        if self._loader is not None and content["data"] is not None:
            self._loader.load_state_dict(content["data"])
        hvd = getattr(self._optimizer, "_hvd", None)
        if hvd is not None:
            _restore_rate(self._optimizer, hvd, content)
        if content["size"] == world().size:
            restore_random_state(content["random"][world().rank], self._model)
        else:
            # Every rank needs a stream of its own; those saved are of another number of ranks.
            seed_generators(content["step"], world().rank)


def _restore_rate(optimizer: Any, hvd: Any, content: dict[str, Any]) -> None:
    """The saved rate, scaled to the present global batch: once, from the saved base rate."""
    scaling: Scaling = hvd.scaling
    if content["base_lr"] is None or hvd.base_lr is None:
        return
    if hvd.base_lr != content["base_lr"]:
        _log.warning("going on with the saved base learning rate %g, not %g", content["base_lr"], hvd.base_lr)
    hvd.base_lr = content["base_lr"]
    if scaling.factor != content["factor"]:
        rate = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
        rate.assign(rate * scaling.factor / content["factor"])


def _values(variables: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(v.path, v.numpy()) for v in variables]


def _assign(variables: Sequence[Any], saved: Sequence[tuple[str, Any]], where: str) -> None:
    if len(variables) != len(saved):
        raise CheckpointError(f"{where} has {len(saved)} variables; this one has {len(variables)}.")
    for variable, (name, value) in zip(variables, saved, strict=True):
        if tuple(variable.shape) != value.shape:
            raise CheckpointError(f"{where} has {name} of shape {value.shape}; here it is {tuple(variable.shape)}.")
    for variable, (_, value) in zip(variables, saved, strict=True):
        variable.assign(value)
