"""The batch that training is at: what links an hvdkit loader to the optimizers it feeds.

The loader notes each batch it hands out; a backward pass reads from it by how much this rank's gradient counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Batch:
    """One global batch of samples: ``counts`` per rank, this ``rank``, and the ``global_batch`` of a full one.

    ``is_last`` marks the last one of an epoch.
    """

    counts: Sequence[int]
    rank: int
    global_batch: int
    is_last: bool = False

    @property
    def count(self) -> int:
        """This rank's samples; 0 where the loader hands out fillers because the rank's part is empty."""
        return int(self.counts[self.rank])

    @property
    def weight(self) -> float:
        """What this rank's mean gradient is multiplied by, so that the average over ranks is the mean over samples."""
        return self.count * len(self.counts) / max(1, sum(self.counts))


_current: Batch | None = None


def set_current(batch: Batch | None) -> None:
    """Note the batch just handed out; None when a loader has come to its end."""
    global _current
    _current = batch


def current() -> Batch | None:
    """The training batch handed out last by any hvdkit loader of this process, or None."""
    return _current
