"""What people see: one rank speaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from hvdkit.log import current_rank

T = TypeVar("T")


def progress(iterable: Iterable[T], description: str = "", total: int | None = None) -> Iterator[T]:
    """Iterate with a progress bar on rank 0, and without one elsewhere. Never communicates.

    ``total`` is the number of items if the iterable has no length. On no terminal the bar keeps quiet.
    """
    if current_rank() != 0:
        yield from iterable
        return
    from rich.progress import track  # only the rank that shows it pays for it

    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    yield from track(iterable, description=description or "working", total=total)
