"""Reads hostfiles and ``-H`` lists: the union of what Open MPI, MPICH, Intel MPI, Horovod and DeepSpeed write.

A line is ``[user@]name[:slots] [key=value]...``. Keys, in any order, blanks around ``=`` allowed: ``slots`` (also
``cpu``, ``cpus``, ``count``), ``max_slots`` (also ``max-slots``, ``slots_max`` and the like), ``gpus=0,2,3`` or
``gpus=0-3``, ``user`` (also ``username``), ``port``. Comments are ``# …``, ``// …`` and ``/* … */``.

What the tools understand differently is refused, with the line, the column and a fix: a name without a slot count
in a file where no name repeats, ``slots=`` twice for one host, a word that is no key. What they agree on adds up:
repeated bare names count one slot each, and so do repeated ``name:N``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from hvdkit.errors import HostfileError
from hvdkit.launch.entries import Entry, Position, merge_entries, parse_entry
from hvdkit.launch.hosts import Host, HostList, host_key, printable, require_hosts

# The form that nearly every large file has from end to end; the slow path gives the same result and the messages.
_PLAIN_LINE = re.compile(
    r"^([A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,200}[A-Za-z0-9_])?)[ \t]+slots[ \t]*=[ \t]*([0-9]{1,4})[ \t]*\n",
    re.ASCII | re.MULTILINE,
)
_MAX_BYTES = 64 << 20
_COMMENT = re.compile(r"#|//|/\*")


def read_hostfile(path: str | Path, default_slots: int | None = None) -> HostList:
    """Read a hostfile. ``default_slots`` is the slot count of a name that has none.

    Raises:
        HostfileError: the file is missing, empty, not text, or a line cannot be understood.
    """
    source = str(path)
    try:
        with Path(path).open("rb") as stream:
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise HostfileError(
            f"the hostfile cannot be read: {error.strerror or error}",
            source=source,
            fix="check the path given with --hostfile",
        ) from error
    except ValueError as error:  # a NUL in the path
        raise HostfileError(f"no such path: {error}", source=printable(source)) from error
    if len(data) > _MAX_BYTES:
        raise HostfileError(f"larger than {_MAX_BYTES >> 20} MiB, so hardly a hostfile", source=source)
    return parse_hostfile(data, source=source, default_slots=default_slots)


def parse_hostfile(content: str | bytes, source: str = "hostfile", default_slots: int | None = None) -> HostList:
    """Parse the text of a hostfile; the same results and errors as :func:`read_hostfile`."""
    text = decode_text(content, source) if isinstance(content, bytes) else content
    text = text.removeprefix("\ufeff")
    hosts = _plain_hosts(text, source)
    if hosts is None:
        entries = list(_entries(text, source))
        hosts = merge_entries(entries, default_slots, bare_fix="write `{name} slots=N`, or give --slots-per-host N")
    return require_hosts(hosts, source)


def _plain_hosts(text: str, source: str) -> list[Host] | None:
    """The hosts of a file that is nothing but ``name slots=N`` lines with different names; None for any other file."""
    rows = _PLAIN_LINE.findall(text)
    if len(rows) != text.count("\n") or not text.endswith("\n") or ".." in text:
        return None
    if len({host_key(name) for name, _ in rows}) != len(rows):
        return None
    return [Host(name, int(slots), source=f"{source}:{line}") for line, (name, slots) in enumerate(rows, start=1)]


def parse_host_option(text: str, source: str = "-H", default_slots: int | None = None) -> HostList:
    """Parse a list as in ``-H "n1:2, n2:4"``; a name without a count has one slot, and repeats add up.

    Raises:
        HostfileError: an entry is empty or not understood; the column is the one inside the list.
    """
    if not text.strip():
        raise HostfileError(
            "the list is empty", source=source, text=printable(text), fix='give hosts, e.g. "n1:2,n2:4"'
        )
    entries: list[Entry] = []
    column = 0
    for number, part in enumerate(text.split(","), start=1):
        start = column + len(part) - len(part.lstrip())
        where = Position(source, 1, text)
        if not part.strip():
            fix = "remove the comma that is too many"
            raise where.error(f"empty entry {number}", column, fix)
        words = part.split()
        if len(words) > 1:
            at = column + part.index(words[1], part.index(words[0]) + len(words[0]))
            raise where.error(
                f"stray word {printable(words[1])!r} after {printable(words[0])!r}",
                at,
                'separate hosts by commas: "n1:2,n2:4"',
            )
        entries.append(parse_entry(part.strip(), start, where, f"{source} entry {number}"))
        column += len(part) + 1
    return require_hosts(merge_entries(entries, default_slots or 1, bare_adds=True), source)


def decode_text(data: bytes, source: str) -> str:
    """``data`` as text, without a byte order mark; the error names the place of a byte that is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line_start = before.rfind(b"\n") + 1
        raise HostfileError(
            f"byte 0x{data[error.start]:02x} is not UTF-8 text",
            source=source,
            line=before.count(b"\n") + 1,
            column=len(data[line_start : error.start].decode("utf-8", "replace").removeprefix("\ufeff")) + 1,
            text=printable(data[line_start:].split(b"\n", 1)[0][:200].decode("utf-8", "replace")),
            fix="save the hostfile as plain text",
        ) from error


def _entries(text: str, source: str) -> Iterator[Entry]:
    in_comment: Position | None = None  # where an open /* stands
    for number, line in enumerate(text.split("\n"), start=1):
        where = Position(source, number, line.removesuffix("\r"))
        stripped, in_comment = _strip_comments(where, in_comment)
        if stripped.strip():
            indent = len(stripped) - len(stripped.lstrip())
            yield parse_entry(stripped.strip(), indent, where, f"{source}:{number}")
    if in_comment is not None:
        raise in_comment.error(
            "this comment is never closed", max(in_comment.text.rfind("/*"), 0), "add `*/`, or use `#`"
        )


def _strip_comments(where: Position, opened: Position | None) -> tuple[str, Position | None]:
    """The line with blanks where comments stood, so that columns stay; and where a comment is still open."""
    line, out, at = where.text, "", 0
    while at < len(line):
        if opened is not None:
            end = line.find("*/", at)
            if end < 0:
                return out, opened
            out, at, opened = out + " " * (end + 2 - at), end + 2, None
            continue
        match = _COMMENT.search(line, at)
        if match is None:
            return out + line[at:], None
        out += line[at : match.start()]
        if match[0] != "/*":
            return out, None
        out, at, opened = out + "  ", match.end(), where
    return out, opened
