"""The plan of global batches: which sample goes to which rank at which step.

A seed, an epoch and a dataset length give an order. Global batch k of an epoch is ``order[k*G : (k+1)*G]``; rank r
takes its contiguous part, parts differing by at most one sample (the first ranks get the extra one). So the order does
not depend on the number of ranks, and every rank knows every other rank's count without communication.

A *position* is one number: the dataset samples passed since the start of training, ``epoch * length + offset``. It
means the same at every batch size, number of ranks and tail, so a resumed run goes on with the very next sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.arguments import one_of, whole
from hvdkit.errors import UsageError
from hvdkit.log import get_logger
from hvdkit.permutation import MAX_LENGTH, ORDER_VERSION, Permutation
from hvdkit.plan_state import PlainState, check_same_training

TAILS = ("exact", "pad", "drop")
_BLOCK = 2**13  # samples computed ahead by batches(): enough to make numpy's cost per call small
_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """Which sample goes to which rank at which step; a pure function of its arguments, without communication.

    Args:
        length: samples in the dataset, 0 or more.
        size, rank: number of ranks, and this one in ``[0, size)``.
        global_batch: samples per step over all ranks; stays when the size changes.
        batch_per_rank: samples per step and rank; the global batch is this times the size. Give one of the two.
        shuffle: a new order for each epoch; False is the order 0, 1, 2, … every time.
        seed: of the shuffle, in [0, 2**64); equal on all ranks.
        tail: what happens to the last, short global batch. ``"exact"``: it is used as it is, every sample is used once
            (ranks may get no sample in it). ``"pad"``: it is filled up from the start of the epoch's order, so every
            batch has G samples (``padded`` of them repeated). ``"drop"``: it is left out (``dropped`` samples, other
            ones in each epoch when shuffled). In all three an epoch moves the position by ``length``: repeated
            samples do not count, dropped ones do.

    Raises:
        UsageError: a number is not whole or out of range, both or neither batch given, an unknown tail.
    """

    length: int
    size: int
    rank: int
    global_batch: int = None  # type: ignore[assignment]  # None only as an argument: __post_init__ works it out
    batch_per_rank: int | None = None
    shuffle: bool = True
    seed: int = 0
    tail: str = "exact"

    def __post_init__(self) -> None:
        size = whole("size", self.size, 1)
        if not isinstance(self.shuffle, bool | np.bool_):
            raise UsageError(f"shuffle={self.shuffle!r} was given; True or False was expected.")
        checked: dict[str, Any] = {
            "length": whole("length", self.length, 0, MAX_LENGTH),
            "size": size,
            "rank": whole("rank", self.rank, 0, size - 1),
            "shuffle": bool(self.shuffle),
            "seed": whole("seed", self.seed, 0, 2**64 - 1),
            "tail": one_of("tail", self.tail, TAILS),
            **_batches(self.global_batch, self.batch_per_rank, size),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.steps == 0 and self.length and self.rank == 0:
            _log.warning(
                "tail='drop' leaves no step: %d samples are fewer than one global batch of %d. "
                "Use tail='exact' or 'pad', or a smaller batch.",
                self.length,
                self.global_batch,
            )

    @property
    def epoch_length(self) -> int:
        """By how much an epoch moves the position: ``length``, whatever the tail."""
        return self.length

    @property
    def steps(self) -> int:
        """Global batches in a full epoch; the same on all ranks."""
        return self._steps_in(self.length)

    @property
    def padded(self) -> int:
        """Samples repeated in each full epoch (``tail="pad"``, else 0)."""
        return self.steps * self.global_batch - self.length if self.tail == "pad" else 0

    @property
    def dropped(self) -> int:
        """Samples left out of each full epoch (``tail="drop"``, else 0)."""
        return self.length - self.steps * self.global_batch if self.tail == "drop" else 0

    # By epoch and step of full epochs

    def ids(self, epoch: int, step: int) -> _I64:
        """This rank's sample ids in global batch ``step`` of ``epoch``: int64, of shape ``[counts(step)[rank]]``."""
        return self._ids(whole("epoch", epoch), self._offset(step))

    def counts(self, step: int) -> _I64:
        """Every rank's number of samples in global batch ``step``: int64, of shape ``[size]``."""
        return self._counts(self._offset(step))

    def position(self, epoch: int, step: int = 0) -> int:
        """The position before global batch ``step`` of ``epoch``; ``step == steps`` is the start of the next epoch."""
        step = whole("step", step, 0, self.steps)
        offset = self.length if step == self.steps else step * self.global_batch
        return whole("epoch", epoch) * self.length + offset

    # By position, also one that no full epoch of this plan would come to

    def locate(self, position: int) -> tuple[int, int]:
        """``(epoch, offset)`` of the batch that starts at ``position``.

        With ``tail="drop"`` a position too near to the end for one more batch belongs to the next epoch.
        """
        position = whole("position", position)
        if self.length == 0:
            return 0, 0
        epoch, offset = divmod(position, self.length)
        if self.steps and self._steps_in(self.length - offset) == 0:
            return epoch + 1, 0
        return epoch, offset

    def ids_at(self, position: int) -> _I64:
        """This rank's ids in the global batch that starts at ``position``; empty for a plan without steps."""
        return self._ids(*self.locate(position))

    def counts_at(self, position: int) -> _I64:
        """Every rank's number of samples in the global batch that starts at ``position``: int64 of shape ``[size]``."""
        return self._counts(self.locate(position)[1])

    def advance(self, position: int) -> int:
        """The position after the global batch that starts at ``position``; a plan without steps stays where it is.

        A batch ends with its epoch at the latest. With ``tail="drop"`` the last batch's end is the epoch's end.
        """
        if self.steps == 0:
            return whole("position", position)
        epoch, offset = self.locate(position)
        last = self._steps_in(self.length - offset) == 1
        return epoch * self.length + (self.length if last else offset + self.global_batch)

    def remaining_steps(self, position: int) -> int:
        """Global batches from ``position`` to the end of its epoch (see :meth:`locate`)."""
        return self._steps_in(self.length - self.locate(position)[1])

    def batches(self, position: int) -> Iterator[_I64]:
        """This rank's ids for each of the :meth:`remaining_steps`: equal to :meth:`ids_at`, at a fraction of its cost.

        Computes some 2**13 samples at a time, so memory is constant and small batches do not pay for numpy's calls.
        """
        epoch, offset = self.locate(position)
        start, stop = self._bounds(self.global_batch)
        left = self._steps_in(self.length - offset)
        full = (self.length - offset) // self.global_batch
        ahead = max(1, _BLOCK // max(1, stop - start))
        for step in range(0, full, ahead):
            firsts = offset + start + self.global_batch * np.arange(step, min(step + ahead, full), dtype=np.int64)
            yield from self._items(epoch, firsts[:, None] + np.arange(stop - start, dtype=np.int64))
        if left > full:
            yield self._ids(epoch, offset + full * self.global_batch)

    # Another number of ranks, and the saved state

    def replan(self, *, size: int, rank: int) -> ShardPlan:
        """The same training on another number of ranks; with ``batch_per_rank`` the global batch follows the size."""
        same: dict[str, Any] = {"shuffle": self.shuffle, "seed": self.seed, "tail": self.tail, **self._batch()}
        return ShardPlan(length=self.length, size=size, rank=rank, **same)

    def state(self) -> PlainState:
        """What a position means, as plain values: save it beside the position and give it to :meth:`check_state`."""
        mode, batch = next(iter(self._batch().items()))
        return {
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "tail": self.tail,
            "order": ORDER_VERSION,
            "batch_mode": mode,
            "batch": batch,
            "global_batch": self.global_batch,
            "size": self.size,
        }

    def check_state(self, state: Mapping[str, Any], *, allow_batch_change: bool = False) -> None:
        """Refuse to go on from a state that was saved for other data, another order or another batch.

        Free to change: the size and, where the user states ``batch_per_rank``, the global batch that follows it.
        The stated batch itself must be the same, since the learning rate hangs on it; ``allow_batch_change`` says that
        the change is meant (positions do not depend on the batch).

        Raises:
            UsageError: names the first difference with the saved and the present value.
        """
        check_same_training(state, self.state(), allow_batch_change=allow_batch_change)

    def _batch(self) -> dict[str, int]:
        if self.batch_per_rank is None:
            return {"global_batch": self.global_batch}
        return {"batch_per_rank": self.batch_per_rank}

    def _steps_in(self, samples: int) -> int:
        return samples // self.global_batch if self.tail == "drop" else -(-samples // self.global_batch)

    def _offset(self, step: int) -> int:
        if self.steps == 0:
            why = f"length {self.length}, global batch {self.global_batch}, tail {self.tail!r}"
            raise UsageError(f"step={step!r} was asked of a plan without steps ({why}).")
        return whole("step", step, 0, self.steps - 1) * self.global_batch

    def _samples(self, offset: int) -> int:
        """Size of the global batch that starts at ``offset``."""
        if self.steps == 0:
            return 0
        return self.global_batch if self.tail == "pad" else min(self.global_batch, self.length - offset)

    def _bounds(self, samples: int) -> tuple[int, int]:
        """This rank's part of ``samples``, as numpy.array_split cuts them."""
        base, extra = divmod(samples, self.size)
        start = self.rank * base + min(self.rank, extra)
        return start, start + base + (self.rank < extra)

    def _ids(self, epoch: int, offset: int) -> _I64:
        start, stop = self._bounds(self._samples(offset))
        places = np.arange(offset + start, offset + stop, dtype=np.int64)
        return self._items(epoch, places % self.length if places.size and self.tail == "pad" else places)

    def _counts(self, offset: int) -> _I64:
        base, extra = divmod(self._samples(offset), self.size)
        return base + (np.arange(self.size) < extra).astype(np.int64)

    def _items(self, epoch: int, places: _I64) -> _I64:
        return Permutation(self.length, self.seed, epoch)(places) if self.shuffle else places


_log = get_logger("hvdkit.sharding")


def _batches(global_batch: int | None, batch_per_rank: int | None, size: int) -> dict[str, int | None]:
    """The global batch worked out, and the batch per rank if that is what was given."""
    if global_batch is not None and batch_per_rank is not None:
        raise UsageError(
            f"both global_batch={global_batch!r} and batch_per_rank={batch_per_rank!r} were given; give one: "
            "the global batch stays when the number of ranks changes, the batch per rank makes it grow."
        )
    if global_batch is not None:
        return {"global_batch": whole("global_batch", global_batch, 1, MAX_LENGTH), "batch_per_rank": None}
    if batch_per_rank is None:
        raise UsageError("neither global_batch nor batch_per_rank was given; give one of them.")
    batch_per_rank = whole("batch_per_rank", batch_per_rank, 1, MAX_LENGTH)
    return {
        "global_batch": whole("global_batch", batch_per_rank * size, 1, MAX_LENGTH),
        "batch_per_rank": batch_per_rank,
    }
