"""One entry of a host list, ``[user@]name[:slots] [key=value]...``, and the merging of entries that name one host."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from hvdkit.errors import HostfileError
from hvdkit.launch.hosts import MAX_SLOTS, Host, host_key, is_ipv6, name_problem, printable, user_problem

# Every spelling that some tool reads -> the word used here.
_KEYS = {"slots": "slots", "slot": "slots", "cpu": "slots", "cpus": "slots", "count": "slots"}
_KEYS |= {f"max{sign}{word}": "max_slots" for sign in "_-" for word in ("slots", "cpu", "cpus", "count")}
_KEYS |= {f"{word}{sign}max": "max_slots" for sign in "_-" for word in ("slots", "cpu", "cpus", "count")}
_KEYS |= {"gpus": "gpus", "gpu": "gpus", "user": "user", "username": "user", "port": "port"}
_PAIR = re.compile(r"[ \t]*([^\s=]+)([ \t]*)(=?)[ \t]*((?:\"[^\"\s]*\"|[^\s=\"]+)?)")
_HEAD = re.compile(r"[^\s=]+")
_NUMBER = re.compile(r"[0-9]{1,9}\Z", re.ASCII)


class Position(NamedTuple):
    """A line of a host list, to point at."""

    source: str
    line: int
    text: str

    def error(self, problem: str, offset: int, fix: str = "") -> HostfileError:
        """The error at ``offset`` (from 0) of this line; a long line is quoted around the offset only."""
        text = self.text
        if len(text) > 160:
            problem += f" (near {printable(text[max(0, offset - 20) : offset + 40])!r})"
            text = ""
        return HostfileError(
            problem, source=self.source, line=self.line, column=offset + 1, text=printable(text), fix=fix
        )


class Entry(NamedTuple):
    """What one entry says. ``counted`` is how the slots were given: ``slots``, ``colon``, ``max``, ``gpus`` or not."""

    name: str
    slots: int | None
    counted: str
    where: Position
    source: str
    offset: int = 0
    max_slots: int | None = None
    gpus: tuple[int, ...] | None = None
    user: str | None = None
    port: int | None = None


def parse_entry(text: str, offset: int, where: Position, source: str) -> Entry:
    """Parse one entry that starts at ``offset`` of its line. ``text`` has no comment and no blank at its ends.

    Raises:
        HostfileError: at the column of what is not understood.
    """
    head = _HEAD.match(text)
    if head is None:
        raise where.error("a host name was expected", offset, "write `name slots=N`")
    _refuse_other_files(text, offset, where)
    user, name, colon_slots = _split_head(head[0], offset, where)
    values: dict[str, str] = {} if user is None else {"user": user}
    columns: dict[str, int] = {} if user is None else {"user": offset}
    _read_pairs(text, head.end(), offset, where, values, columns)
    if colon_slots is not None and "slots" in values:
        raise where.error(
            "the slot count is given twice",
            columns["slots"],
            f"keep one of `:{colon_slots}` and `slots={values['slots']}`",
        )
    return _entry(name, colon_slots, values, columns, offset, where, source)


def _refuse_other_files(text: str, offset: int, where: Position) -> None:
    if text[0] == "^":
        raise where.error(
            "`^host` excludes hosts in some tools and breaks others", offset, "take the line out, or use --exclude NAME"
        )
    if text[0] == "+":
        raise where.error("`+` names hosts relative to an allocation", offset, "write the host's name")
    if re.match(r"rank[ \t]+[0-9]+[ \t]*=", text):
        raise where.error("this is a line of a rankfile", offset, "write a hostfile: `name slots=N`")


def _split_head(head: str, offset: int, where: Position) -> tuple[str | None, str, int | None]:
    """user, name and the number after the colon, from ``user@name:N``, ``user@[IPv6]:N`` or a bare IPv6 address."""
    user: str | None = None
    rest, at = head, offset
    if "@" in head:
        user, _, rest = head.partition("@")
        at += len(user) + 1
        problem = user_problem(user)
        if problem:
            raise where.error(f"user {printable(user)!r}: {problem}", offset, "write user@host")
    if "," in rest and not rest.startswith("["):
        raise where.error("several hosts on one line", at + rest.index(","), "write one host per line")
    name, colon, number = rest, "", ""
    if rest.startswith("["):
        inside, bracket, after = rest[1:].partition("]")
        if not bracket or (after and after[0] != ":") or not is_ipv6(inside):
            raise where.error(
                f"{printable(rest)!r} is not an IPv6 address in brackets", at, "write [fd00::1]:4, or fd00::1 slots=4"
            )
        name, colon, number = inside, after[:1], after[1:]
    elif rest.count(":") == 1:
        name, colon, number = rest.partition(":")
    problem = name_problem(name) if name else "the name is missing"
    if problem:
        raise where.error(
            f"{printable(name[:60])!r}: {problem}", at, "write a host name or address, e.g. `node1 slots=4`"
        )
    if not colon:
        return user, name, None
    return user, name, slot_number(number, at + len(rest) - len(number), where, f"the count after {name!r}:")


def _read_pairs(
    text: str, at: int, offset: int, where: Position, values: dict[str, str], columns: dict[str, int]
) -> None:
    """Collect ``key=value`` into ``values``, under the one word for each key, and their columns."""
    if at < len(text) and text[at] == "=":
        raise where.error("the line starts with a key; the host name is missing", offset, "write `name slots=N`")
    while at < len(text):
        pair = _PAIR.match(text, at)
        start = offset + at + len(text[at:]) - len(text[at:].lstrip())
        if pair is None:
            raise where.error(f"{printable(text[at:].strip()[:40])!r} is not understood", start, "write key=value")
        written, value = pair[1], pair[4].strip('"')
        if not pair[3]:
            raise where.error(
                f"stray word {printable(written)!r}", start, "remove it, or write key=value, e.g. slots=4"
            )
        key = _KEYS.get(written)
        if key is None:
            raise where.error(
                f"unknown key {printable(written)!r}", start, "known are slots, max_slots, gpus, user, port"
            )
        if not value:
            raise where.error(f"{written}= has no value", start, f"write {written}=…")
        if key in values:
            raise where.error(f"{key} is given twice", start, "keep one of them")
        values[key], columns[key] = value, offset + pair.start(4)
        at = pair.end()


def _entry(
    name: str,
    colon_slots: int | None,
    values: dict[str, str],
    columns: dict[str, int],
    offset: int,
    where: Position,
    source: str,
) -> Entry:
    slots, counted = colon_slots, "" if colon_slots is None else "colon"
    if "slots" in values:
        slots, counted = slot_number(values["slots"], columns["slots"], where, "slots="), "slots"
    gpus = _gpu_list(values["gpus"], columns["gpus"], where) if "gpus" in values else None
    if gpus is not None:
        if slots is not None and slots != len(gpus):
            raise where.error(
                f"{slots} slots but {len(gpus)} GPUs", columns["gpus"], "give one GPU per slot, or leave slots out"
            )
        slots, counted = len(gpus), counted or "gpus"
    max_slots = (
        slot_number(values["max_slots"], columns["max_slots"], where, "max_slots=") if "max_slots" in values else None
    )
    if max_slots is not None:
        if slots is None:
            slots, counted = max_slots, "max"
        if max_slots < slots:
            raise where.error(
                f"max_slots={max_slots} is below the {slots} slots",
                columns["max_slots"],
                "raise max_slots or lower slots",
            )
    port = slot_number(values["port"], columns["port"], where, "port=") if "port" in values else None
    if port is not None and not 0 < port < 65_536:
        raise where.error(f"port {port} does not exist", columns["port"], "ports go from 1 to 65535")
    user = values.get("user")
    problem = user_problem(user) if user is not None else None
    if problem:
        raise where.error(f"user {printable(user or '')!r}: {problem}", columns["user"])
    return Entry(name, slots, counted, where, source, offset, max_slots, gpus, user, port)


def slot_number(text: str, offset: int, where: Position, what: str) -> int:
    """A whole number from 0 to :data:`MAX_SLOTS`, or the error that says where it stands."""
    if not _NUMBER.match(text) or int(text) > MAX_SLOTS:
        problem = (
            f"{what} {printable(text)!r} is not a whole number from 0 to {MAX_SLOTS}"
            if text
            else f"{what} the number is missing"
        )
        raise where.error(problem, offset, "write a number, e.g. 4")
    return int(text)


def _gpu_list(text: str, offset: int, where: Position) -> tuple[int, ...]:
    gpus: list[int] = []
    for part in text.split(","):
        low, dash, high = part.partition("-")
        first = slot_number(low, offset, where, "gpus=")
        last = slot_number(high, offset, where, "gpus=") if dash else first
        if last < first or last > 1023:
            raise where.error(
                f"GPU range {printable(part)!r} is not understood", offset, "write gpus=0,2,3 or gpus=0-3"
            )
        gpus.extend(range(first, last + 1))
    doubled = [gpu for gpu, times in Counter(gpus).items() if times > 1]
    if doubled:
        raise where.error(f"GPU {doubled[0]} is listed twice", offset, "give each GPU once")
    return tuple(gpus)


def merge_entries(
    entries: Sequence[Entry], default_slots: int | None, *, bare_adds: bool = False, bare_fix: str = ""
) -> list[Host]:
    """One :class:`Host` per name, in the order of first mention.

    Bare names count one slot each where some bare name repeats and no line gives a count (a PBS node file), or with
    ``bare_adds``; elsewhere each needs ``default_slots``.

    Raises:
        HostfileError: a name without a count, or one host described twice in ways that do not add up.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(host_key(entry.name), []).append(entry)
    node_file = bare_adds or (len(groups) < len(entries) and all(entry.slots is None for entry in entries))
    return [_merge_group(group, default_slots, node_file, bare_adds, bare_fix) for group in groups.values()]


def _merge_group(
    group: list[Entry], default_slots: int | None, node_file: bool, bare_adds: bool, bare_fix: str
) -> Host:
    first = group[0]
    if len(group) > 1:
        _refuse_conflicts(group)
    if first.slots is not None and len(group) == 1:
        return Host(first.name, first.slots, first.max_slots, first.gpus, first.user, first.port, first.source)
    slots = 0
    for entry in group:
        if entry.slots is None and not node_file and default_slots is None:
            raise entry.where.error(
                f"host {entry.name!r} has no slot count", entry.offset, bare_fix.format(name=entry.name)
            )
        bare = 1 if node_file and not (bare_adds and len(group) == 1) else default_slots
        slots += entry.slots if entry.slots is not None else (bare or 1)
    user = next((entry.user for entry in group if entry.user), None)
    port = next((entry.port for entry in group if entry.port), None)
    source = ", ".join(entry.source for entry in group[:3]) + (" …" if len(group) > 3 else "")
    return Host(first.name, slots, None, None, user, port, source)


def _refuse_conflicts(group: list[Entry]) -> None:
    first = group[0]
    for other in group[1:]:
        where = (
            f"lines {first.where.line} and {other.where.line}"
            if first.where.line != other.where.line
            else "in one list"
        )
        counted = {first.counted, other.counted}
        if counted - {"", "colon"} or len(counted) > 1:
            raise other.where.error(
                f"host {other.name!r} is given twice, {where}; tools disagree whether slots add up",
                other.offset,
                "keep one line per host",
            )
        for what, one, two in (("user", first.user, other.user), ("port", first.port, other.port)):
            if one != two and one is not None and two is not None:
                raise other.where.error(
                    f"host {other.name!r} has two {what}s, {one} and {two}, {where}", other.offset, "keep one of them"
                )
