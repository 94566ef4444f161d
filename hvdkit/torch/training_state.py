"""``TrainingState``: everything that a run needs to go on as if it had not stopped."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import hvdkit
from hvdkit.arguments import whole
from hvdkit.checkpoint import CheckpointFolder
from hvdkit.errors import CheckpointError
from hvdkit.log import get_logger
from hvdkit.torch.buffers import average_buffers
from hvdkit.torch.collectives import broadcast_bytes, gather_objects, on_rank0
from hvdkit.torch.optimizer import Distributed
from hvdkit.torch.random_state import capture_random_state, restore_random_state
from hvdkit.torch.runtime import seed_everything, world
from hvdkit.torch.sync import check_in_sync

FORMAT = 1


class TrainingState:
    """Saves and restores model, optimizer, schedule, loader position and the random states of every rank.

    Rank 0 writes and reads; what it finds is sent to all, so no rank looks at its own disk. A checkpoint holds tensors
    and plain values only and loads with ``torch.load(path)`` (``weights_only``). On the same number of ranks a resumed
    run equals one that did not stop, bit for bit.

    Args:
        folder: where checkpoints lie; made when the first one is saved. None saves and restores nothing.
        model, optimizer, schedule, loader: what to save; each may be left out.
        keep: how many of the newest checkpoints to keep; None keeps all.
        best: ``"max"`` or ``"min"``: also keep the one with the best ``metric`` given to :meth:`save`.
        others: more objects with ``state_dict()`` and ``load_state_dict()``, by name, such as ``scaler=``.
    """

    def __init__(
        self, folder: str | Path | None, *, model: torch.nn.Module | None = None, optimizer: Any = None,
        schedule: Any = None, loader: Any = None, keep: int | None = 3, best: str | None = None, **others: Any,
    ) -> None:  # fmt: skip
        self.folder = None if folder is None else CheckpointFolder(folder, keep, best)
        # The schedule comes after the optimizer: it sets the rates for the present global batch.
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader, **others}
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self._model, self._optimizer, self._loader = model, optimizer, loader
        self._epoch, self._saves, self._in_epoch = 0, 0, False

    @property
    def epoch(self) -> int:
        """The epoch that training is in, from 0: the loader's, or counted by :meth:`epochs` without one."""
        return int(self._loader.epoch) if self._loader is not None else self._epoch

    @property
    def step(self) -> int:
        """Optimizer steps taken, which numbers the checkpoints; without an hvdkit optimizer: the number of saves."""
        if isinstance(self._optimizer, Distributed):
            return self._optimizer._distribution.steps
        return self._saves

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are left of ``count``. A loop body that leaves its epoch unfinished goes on to the next."""
        whole("count", count)
        while (epoch := self.epoch) < count:
            self._in_epoch = True
            yield epoch
            self._in_epoch = False
            if self._loader is None or self.epoch == epoch:
                self._start_epoch(epoch + 1)
                if self.epoch == epoch:  # a loader of no samples stays in epoch 0
                    return

    def save(self, metric: float | None = None) -> Path | None:
        """Write a checkpoint and return its path; every rank must call this.

        Buffers are averaged over ranks first, see average_buffers. May be called at any step, also inside an epoch.
        Without a loader the epoch in progress counts as done.

        Raises:
            CheckpointError: it cannot be written; on every rank, and what was there before is untouched.
        """
        if self._model is not None:
            average_buffers(self._model)
        self._saves += 1
        states = gather_objects(capture_random_state())
        path = on_rank0(lambda: self._write(states, metric))
        return None if path is None else Path(path)

    def restore(self) -> bool:
        """Go on from the newest good checkpoint that rank 0 finds; False if there is none. Every rank must call this.

        Raises:
            CheckpointError: the checkpoint does not fit this model, optimizer or data; on every rank.
            OutOfSyncError: ranks differ after loading.
        """
        found = on_rank0(self._find)
        if found is None:
            get_logger().info("no checkpoint to go on from: a fresh start")
            return False
        held: list[bytes] = []
        on_rank0(lambda: held.append(CheckpointFolder(Path(found).parent).read(found)))
        self._unpack(broadcast_bytes(held[0] if held else b""), found)
        for name in ("model", "optimizer"):
            if name in self.parts:
                check_in_sync(self.parts[name], f"the restored {name}")
        get_logger().info("went on from %s: epoch %d, step %d", found, self.epoch, self.step)
        return True

    # Rank 0 alone runs these two, so a rank that was given another folder, or none, does what rank 0 does.
    def _find(self) -> str | None:
        newest = None if self.folder is None else self.folder.newest_good()
        return None if newest is None else str(newest[1])

    def _write(self, random_states: list[Any], metric: float | None) -> str | None:
        if self.folder is None:
            return None
        return str(self.folder.write(self.step, self._pack(random_states), metric))

    def _pack(self, random_states: list[Any]) -> bytes:
        payload: dict[str, Any] = {
            "format": FORMAT, "hvdkit": hvdkit.__version__, "size": world().size, "step": self.step,
            "saves": self._saves, "epoch": self._epoch + self._in_epoch, "random": random_states,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }  # fmt: skip
        stream = io.BytesIO()
        torch.save(payload, stream)
        return stream.getvalue()

    def _unpack(self, data: bytes, source: str) -> None:
        try:
            payload = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError) as error:
            raise CheckpointError(f"{source} is not a checkpoint of tensors and plain values: {error}") from error
        if not isinstance(payload, dict) or payload.get("format") != FORMAT:
            raise CheckpointError(f"{source} is not a checkpoint that this version of hvdkit.torch wrote.")
        for name in self.parts.keys() ^ payload["parts"].keys():
            side = "in the checkpoint but not given" if name in payload["parts"] else "given but not in the checkpoint"
            get_logger().warning("%s is %s: it is left as it is", name, side)
        for name, part in self.parts.items():
            if name in payload["parts"]:
                _load(name, part.load_state_dict, payload["parts"][name], source)
        self._epoch, self._saves = payload["epoch"], payload["saves"]
        if isinstance(self._optimizer, Distributed):
            self._optimizer._distribution.steps = payload["step"]
        self._restore_random(payload)

    def _restore_random(self, payload: dict[str, Any]) -> None:
        here = world()
        if payload["size"] == here.size:
            restore_random_state(payload["random"][here.rank])
        else:
            # Every rank needs a stream of its own; those saved are of another number of ranks.
            seed_everything(payload["step"], here.rank)

    def _start_epoch(self, epoch: int) -> None:
        if self._loader is not None:
            self._loader.set_epoch(epoch)
        else:
            self._epoch = epoch


def _load(name: str, load: Callable[[Any], Any], state: Any, source: str) -> None:
    try:
        load(state)
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the {name} in {source} does not fit this training: {error}") from error
