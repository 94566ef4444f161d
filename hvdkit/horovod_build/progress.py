"""Shows how far a build is: a bar on a terminal, a plain line every so often elsewhere."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")
PLAIN_STEP = 10  # percent between two plain lines


def percent_of(line: str) -> int | None:
    """The percentage make prints before a step: ``"[ 57%] Building CXX …"`` -> 57."""
    found = _PERCENT.match(line)
    return int(found[1]) if found else None


class Progress(Protocol):
    """Takes what is going on: a phase by name, and how much of it is done (0 to 100)."""

    def phase(self, name: str) -> None: ...

    def percent(self, done: int) -> None: ...


class PlainProgress:
    """One line a phase, and one every ``PLAIN_STEP`` percent, each with the seconds since the start."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream, self._start, self._name, self._shown = stream, time.monotonic(), "", 0

    def phase(self, name: str) -> None:
        self._name, self._shown = name, 0
        self._write(name)

    def percent(self, done: int) -> None:
        if done >= self._shown + PLAIN_STEP:
            self._shown = done - done % PLAIN_STEP
            self._write(f"{self._name}: {done} %")

    def _write(self, text: str) -> None:
        stream = self._stream or sys.stderr
        stream.write(f"[{time.monotonic() - self._start:4.0f} s] {text}\n")
        stream.flush()


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A bar with the time spent on a terminal, plain lines elsewhere. Writes to standard error."""
    if not sys.stderr.isatty():
        yield PlainProgress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with RichProgress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("preparing", total=100)

        class Bar:
            def phase(self, name: str) -> None:
                bars.update(task, description=name, completed=0)

            def percent(self, done: int) -> None:
                bars.update(task, completed=done)

        yield Bar()
