"""The outputs of one rank: passed on line by line, tagged, logged, and their last lines kept. Standard library only."""

from __future__ import annotations

import os
import time

TAIL_LINES = 20
CHUNK = 1 << 16
TRACEBACK = b"Traceback (most recent call last)"


class Stream:
    """One of the command's two outputs: passes whole lines on, with a tag and to a log file where wanted."""

    def __init__(self, source: int, target: int, tag: bytes, log: int | None, tail: list[bytes]) -> None:
        self.source, self.target, self.tag, self.log, self.tail = source, target, tag, log, tail
        self.partial = b""
        self.at_line_start = True
        self.tracebacks = 0
        self.partial_since = 0.0

    def read(self) -> bool:
        """Pass on what is there; False at the end."""
        try:
            data = os.read(self.source, CHUNK)
        except OSError:
            data = b""
        if not data:
            self.flush()
            return False
        lines = _lines(self.partial + data)
        self.partial = b"" if lines[-1].endswith(b"\n") else lines.pop()
        self.partial_since = time.monotonic() if self.partial else 0.0
        if lines:
            self.tail.extend(lines[-TAIL_LINES:])
            del self.tail[:-TAIL_LINES]
            self.tracebacks += sum(line.startswith(TRACEBACK) for line in lines)
            self.write(lines)
        if len(self.partial) > CHUNK:
            self.flush()
        return True

    def flush(self) -> None:
        """Pass on an unfinished line."""
        if self.partial:
            self.tail.append(self.partial)
            del self.tail[:-TAIL_LINES]
            self.write([self.partial])
        self.partial, self.partial_since = b"", 0.0

    def write(self, lines: list[bytes]) -> None:
        text = b"".join(lines)
        if self.log is not None:
            write_all(self.log, text)
        if self.tag:
            first = b"" if not self.at_line_start else self.tag
            text = first + self.tag.join(lines)
        self.at_line_start = lines[-1].endswith(b"\n")
        write_all(self.target, text)


def _lines(data: bytes) -> list[bytes]:
    """Split at newlines, which stay. A progress bar's lone carriage return ends no line: the next one overwrites it."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def write_all(target: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            time.sleep(0.005)
        except OSError:  # the reader has gone: the rank goes on, as a program in a pipeline would not notice either
            return
