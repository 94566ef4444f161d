"""A host and its slots: the one form that every spelling of a host list is read into."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hvdkit.errors import HostfileError

# A leading '-' would be an option to ssh; everything outside this alphabet could mean something to a shell.
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?\Z", re.ASCII)
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z", re.ASCII)
_ZONE = re.compile(r"[A-Za-z0-9_.-]+\Z", re.ASCII)
MAX_NAME = 253
MAX_SLOTS = 65_536
LOCAL_NAMES = frozenset({"localhost", "localhost.localdomain", "127.0.0.1", "::1"})


class Host(NamedTuple):
    """One host. ``slots`` is the number of ranks it may run, ``max_slots`` an upper bound that the file gives,
    ``gpus`` the GPU numbers that its ranks use in the order of their local rank (None: not said),
    ``user`` and ``port`` are for ssh, ``source`` says where the host was named (``hosts:3``)."""

    name: str
    slots: int
    max_slots: int | None = None
    gpus: tuple[int, ...] | None = None
    user: str | None = None
    port: int | None = None
    source: str = ""

    @property
    def slot_ids(self) -> tuple[int, ...]:
        """What a filter may name: the GPU numbers, or 0 .. slots-1 where the list does not give GPUs."""
        return tuple(range(self.slots)) if self.gpus is None else self.gpus

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.name


@dataclass
class HostList:
    """Hosts in the order of their first mention, each name once, and what the reader wants to say about them."""

    hosts: tuple[Host, ...]
    source: str
    warnings: list[str] = field(default_factory=list)

    @property
    def slots(self) -> int:
        """Slots of all hosts together."""
        return sum(host.slots for host in self.hosts)


def host_key(name: str) -> str:
    """What makes two spellings the same host: names know no upper case and may end in the root's dot."""
    return name.lower().rstrip(".")


def name_problem(name: str) -> str | None:
    """Why ``name`` is no host name or address, or None where it is one.

    Letters, digits, ``_``, ``.`` and ``-``, starting and ending with none of the signs, as in RFC 1123 plus the
    underscore that some clusters use; or an IPv4 or IPv6 address, without brackets, a zone allowed.
    """
    if _NAME.match(name):
        if len(name) > MAX_NAME:
            return f"a host name has at most {MAX_NAME} characters, this one {len(name)}"
        return "'..' is not allowed in a host name" if ".." in name else None
    if ":" in name:
        return None if is_ipv6(name) else "neither a host name nor an IPv6 address"
    if name.startswith("-"):
        return "a host name cannot start with '-' (ssh would take it for an option)"
    return "a host name has letters, digits, '.', '-' and '_' only"


def is_ipv6(text: str) -> bool:
    """True for an IPv6 address, with or without a zone such as ``%eth0``."""
    import ipaddress

    address, percent, zone = text.partition("%")
    if percent and not _ZONE.match(zone):
        return False
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def user_problem(user: str) -> str | None:
    """Why ``user`` cannot be an ssh user name, or None where it can."""
    return (
        None
        if _USER.match(user)
        else "a user name has letters, digits, '.', '-' and '_' only and starts with none of the signs"
    )


def is_local(name: str) -> bool:
    """True where ``name`` is this machine by one of the names it always has, or by its host name."""
    import socket

    key = host_key(name)
    own = host_key(socket.gethostname())
    return key in LOCAL_NAMES or key == own or key == own.partition(".")[0]


def printable(text: str) -> str:
    """``text`` on one line of equal length, safe for a terminal: what does not print becomes ``�`` (a tab, a blank)."""
    return "".join(c if c.isprintable() else (" " if c == "\t" else "�") for c in text)


def require_hosts(hosts: Sequence[Host], source: str, warnings: Iterable[str] = (), *, fix: str = "") -> HostList:
    """A :class:`HostList` without the hosts of zero slots, each of which gets a warning.

    Raises:
        HostfileError: nothing is left.
    """
    notes = list(warnings)
    notes += [
        f"{host.source or source}: host {host.name} has 0 slots and is left out" for host in hosts if host.slots == 0
    ]
    kept = tuple(host for host in hosts if host.slots)
    if not kept:
        problem = "every host has 0 slots" if hosts else "no hosts in it"
        raise HostfileError(problem, source=source, fix=fix or "write one host per line, e.g. `node1 slots=4`")
    return HostList(kept, source, notes)
