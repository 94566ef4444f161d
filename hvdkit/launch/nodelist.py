"""Slurm's compressed lists, as hostlist.c and sbatch(1) define them: names ``n[001-003,007]``, counts ``2(x3),1``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from hvdkit.errors import HostfileError
from hvdkit.launch.entries import Position
from hvdkit.launch.hosts import name_problem, printable

MAX_RANGE = 65_536  # Slurm's own limit for one range
MAX_NODES = 131_072
_SEPARATORS = ", \t\n\r"
_ITEM = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?\Z", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?\Z", re.ASCII)


def expand_nodelist(text: str, source: str) -> list[str]:
    """Node names in order, duplicates kept; several brackets give their product, the first one slowest.

    Raises:
        HostfileError: a bracket is not closed, a range runs backwards, an item is empty or no number, a name is none.
    """
    where = Position(source, 1, text)
    names: list[str] = []
    for start, piece in _pieces(text, where):
        parts = _parts(piece, start, where)
        total = 1
        for choices in parts:
            total *= len(choices)
        if total + len(names) > MAX_NODES:
            raise where.error(f"more than {MAX_NODES} nodes", start, "is a range wrong?")
        for combination in itertools.product(*parts):
            name = "".join(combination)
            problem = name_problem(name)
            if problem:
                raise where.error(f"{printable(name)!r}: {problem}", start)
            names.append(name)
    if not names:
        raise HostfileError("no nodes in it", source=source, text=printable(text[:160]))
    return names


def expand_counts(text: str, source: str, nodes: int) -> list[int]:
    """One count per node from ``2(x3),1``.

    Raises:
        HostfileError: an item is no count, or there are not ``nodes`` of them.
    """
    where = Position(source, 1, text)
    counts: list[int] = []
    column = 0
    for item in text.split(","):
        match = _COUNT.match(item.strip())
        if match is None or int(match[1]) > MAX_RANGE or int(match[2] or 1) > MAX_NODES:
            raise where.error(
                f"{printable(item.strip()[:40])!r} is no count",
                column,
                "expected: N or N(xREPEAT), separated by commas",
            )
        counts.extend([int(match[1])] * int(match[2] or 1))
        column += len(item) + 1
        if len(counts) > MAX_NODES:
            raise where.error(f"more than {MAX_NODES} counts", column - 1)
    if len(counts) != nodes:
        raise HostfileError(
            f"{nodes} node{'s' * (nodes != 1)}, {len(counts)} count{'s' * (len(counts) != 1)}",
            source=source,
            text=printable(text[:160]),
            fix="the scheduler's variables disagree; give the hosts with --hostfile or -H",
        )
    return counts


def bracket_count(text: str) -> int:
    """The largest number of brackets in one name of the list: from three on Slurm's own order is unusual."""
    return max((piece.count("[") for piece in re.split(r"[,\s](?![^\[]*\])", text)), default=0)


def _pieces(text: str, where: Position) -> Iterator[tuple[int, str]]:
    """(start, piece) for every name, split at separators outside of brackets."""
    start, depth_at = 0, -1
    for at, char in enumerate(text):
        if char == "[":
            if depth_at >= 0:
                raise where.error("'[' inside brackets", at)
            depth_at = at
        elif char == "]":
            if depth_at < 0:
                raise where.error("']' without '['", at)
            depth_at = -1
        elif char in _SEPARATORS and depth_at < 0:
            if at > start:
                yield start, text[start:at]
            start = at + 1
    if depth_at >= 0:
        raise where.error("this '[' is never closed", depth_at)
    if start < len(text):
        yield start, text[start:]


def _parts(piece: str, start: int, where: Position) -> list[list[str]]:
    """The alternatives of each stretch of a name: ``r[0-1]n`` is ``[["r"], ["0", "1"], ["n"]]``."""
    parts: list[list[str]] = []
    at = 0
    while at < len(piece):
        if piece[at] != "[":
            end = piece.find("[", at)
            end = len(piece) if end < 0 else end
            parts.append([piece[at:end]])
            at = end
            continue
        end = piece.index("]", at)
        parts.append(list(_range_items(piece[at + 1 : end], start + at + 1, where)))
        at = end + 1
    return parts


def _range_items(text: str, column: int, where: Position) -> Iterator[str]:
    for item in text.split(","):
        match = _ITEM.match(item)
        if match is None:
            problem = f"{printable(item[:40])!r} is no number and no range" if item else "an empty item"
            raise where.error(problem, column, "expected: N or A-B, e.g. n[001-003,007]")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise where.error(f"bad range {item}: {low} is above {high}", column)
        if high - low >= MAX_RANGE:
            raise where.error(f"bad range {item}: more than {MAX_RANGE} nodes", column)
        width = len(match[1])
        yield from (f"{number:0{width}d}" for number in range(low, high + 1))
        column += len(item) + 1
