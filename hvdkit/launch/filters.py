"""``--include`` and ``--exclude`` in DeepSpeed's syntax: ``host@host:slot,slot`` with slots numbered as GPUs are."""

from __future__ import annotations

from hvdkit.errors import HostfileError, UsageError
from hvdkit.launch.entries import Position, slot_number
from hvdkit.launch.hosts import Host, HostList, host_key, printable


def filter_hosts(pool: HostList, include: str = "", exclude: str = "") -> HostList:
    """Keep only what ``include`` names, or drop what ``exclude`` names; the order of the list stays.

    A host without slots stands for all of its slots. Where some host is named with slots, every host kept has its GPU
    list spelled out, so that local rank i uses the i-th slot kept.

    Raises:
        HostfileError: a host or slot that the list does not have, or a filter that cannot be read.
        UsageError: both filters are given.
    """
    if include and exclude:
        raise UsageError("--include and --exclude were both given; keep one of them.")
    if not include and not exclude:
        return pool
    option = "--include" if include else "--exclude"
    named = _parse(include or exclude, option, pool)
    by_slot = any(slots is not None for slots in named.values())
    kept = []
    for host in pool.hosts:
        slots = named.get(host_key(host.name), ())
        chosen = host.slot_ids if slots is None else slots
        left = tuple(i for i in host.slot_ids if (i in chosen) == bool(include))
        if left:
            gpus = left if by_slot else host.gpus
            kept.append(host._replace(slots=len(left), gpus=gpus))
    if not kept:
        raise HostfileError("no host is left", source=option, text=printable(include or exclude))
    return HostList(tuple(kept), pool.source, pool.warnings)


def _parse(text: str, option: str, pool: HostList) -> dict[str, tuple[int, ...] | None]:
    """host key -> the slots named, None for all of them."""
    where = Position(option, 1, text)
    known = {host_key(host.name): host for host in pool.hosts}
    named: dict[str, tuple[int, ...] | None] = {}
    column = 0
    for spec in text.split("@"):
        start = column + len(spec) - len(spec.lstrip())
        name, slots = _split(spec.strip(), known)
        host = known.get(host_key(name))
        if host is None:
            have = ", ".join(other.name for other in pool.hosts[:8])
            raise where.error(
                f"no host {printable(name)!r} in {pool.source}", start, f"it has {have}; separate hosts by '@'"
            )
        if host_key(name) in named:
            raise where.error(f"host {name!r} is named twice", start, "join its slots: host:0,2")
        named[host_key(name)] = (
            None if slots is None else _slots(slots, start + spec.strip().rindex(":") + 1, where, host)
        )
        column += len(spec) + 1
    return named


def _split(spec: str, known: dict[str, Host]) -> tuple[str, str | None]:
    """name and slots; an IPv6 address may stand in brackets, or bare where the list has it."""
    if host_key(spec) in known:
        return spec, None
    name, colon, slots = spec.rpartition(":")
    if spec.startswith("["):
        inside, _, rest = spec[1:].partition("]")
        return inside, rest[1:] if rest.startswith(":") else None
    return (name, slots) if colon else (spec, None)


def _slots(text: str, column: int, where: Position, host: Host) -> tuple[int, ...]:
    chosen: list[int] = []
    for part in text.split(","):
        number = slot_number(part.strip(), column, where, f"slot of {host.name}:")
        if number not in host.slot_ids:
            have = ",".join(map(str, host.slot_ids[:16]))
            raise where.error(f"host {host.name} has no slot {number}", column, f"it has {have}")
        if number in chosen:
            raise where.error(f"slot {number} of {host.name} is named twice", column)
        chosen.append(number)
        column += len(part) + 1
    return tuple(chosen)
