"""Reads what a scheduler has given this job: Slurm, PBS and LSF, and the plain variable ``HVDKIT_HOSTS``.

The counts are numbers of ranks (tasks); the GPUs of a node are another thing and are not guessed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from hvdkit.errors import HostfileError
from hvdkit.launch.entries import Entry, Position, merge_entries, parse_entry, slot_number
from hvdkit.launch.hostfile import decode_text, parse_host_option
from hvdkit.launch.hosts import Host, HostList, host_key, is_local, printable, require_hosts
from hvdkit.launch.nodelist import bracket_count, expand_counts, expand_nodelist

Scheduler = Literal["slurm", "pbs", "lsf"]
HOSTS_VARIABLE = "HVDKIT_HOSTS"


def read_slurm(environ: Mapping[str, str], default_slots: int | None = None) -> HostList | None:
    """Hosts from ``SLURM_JOB_NODELIST`` and ``SLURM_TASKS_PER_NODE``; None outside of a Slurm job.

    Raises:
        HostfileError: a list cannot be read, or they do not fit each other.
    """
    source = "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST") else "SLURM_NODELIST"
    text = environ.get(source, "")
    if not text.strip():
        return None
    names = expand_nodelist(text, source)
    counts = _slurm_counts(environ, names, default_slots)
    if len(set(counts)) > 1 and bracket_count(text) > 2:
        raise HostfileError(
            "Slurm orders names with three or more brackets in its own way, and the counts per node differ",
            source=source,
            text=printable(text[:160]),
            fix="give the hosts with --hostfile or -H",
        )
    merged: dict[str, Host] = {}
    for name, count in zip(names, counts, strict=True):
        known = merged.get(host_key(name))
        merged[host_key(name)] = (
            known._replace(slots=known.slots + count) if known else Host(name, count, source=source)
        )
    return require_hosts(list(merged.values()), source)


def read_pbs(environ: Mapping[str, str], default_slots: int | None = None) -> HostList | None:
    """Hosts from the file that ``PBS_NODEFILE`` names: a line per rank, a host may return later; None outside of PBS.

    Raises:
        HostfileError: the file cannot be read, or a line is more than a name.
    """
    path = environ.get("PBS_NODEFILE", "")
    return _read_names(path, f"PBS_NODEFILE {path}") if path else None


def read_lsf(
    environ: Mapping[str, str], default_slots: int | None = None, *, skip_launch_host: bool = False
) -> HostList | None:
    """Hosts from ``LSB_MCPU_HOSTS``, else ``LSB_DJOB_HOSTFILE``, else ``LSB_HOSTS``; None outside of LSF.

    ``skip_launch_host`` leaves out the first host, which on some systems only runs the job script.

    Raises:
        HostfileError: the list is not understood, or nothing is left of it.
    """
    if environ.get("LSB_MCPU_HOSTS", "").strip():
        source = "LSB_MCPU_HOSTS"
        hosts = list(_mcpu_hosts(environ[source], source))
    elif environ.get("LSB_DJOB_HOSTFILE"):
        source = f"LSB_DJOB_HOSTFILE {environ['LSB_DJOB_HOSTFILE']}"
        hosts = list(_read_names(environ["LSB_DJOB_HOSTFILE"], source).hosts)
    elif environ.get("LSB_HOSTS", "").strip():
        source = "LSB_HOSTS"
        hosts = list(parse_names(environ[source].split(), source).hosts)
    else:
        return None
    if skip_launch_host:
        return require_hosts(hosts[1:], source, fix="only the launch host was in it; drop --skip-launch-host")
    pool = require_hosts(hosts, source)
    if len(hosts) > 1 and hosts[0].slots == 1 and all(host.slots > 1 for host in hosts[1:]):
        pool.warnings.append(
            f"{source}: {hosts[0].name} has one slot and may be the launch host; --skip-launch-host leaves it out"
        )
    return pool


def read_variable(environ: Mapping[str, str], default_slots: int | None = None) -> HostList | None:
    """Hosts from ``HVDKIT_HOSTS``, written as for ``-H``; None where it is not set."""
    text = environ.get(HOSTS_VARIABLE, "")
    return parse_host_option(text, HOSTS_VARIABLE, default_slots) if text.strip() else None


READERS: dict[Scheduler, Callable[[Mapping[str, str], int | None], HostList | None]] = {
    "slurm": read_slurm,
    "pbs": read_pbs,
    "lsf": read_lsf,
}


def check_within(pool: HostList, allocation: HostList) -> None:
    """Every host of ``pool`` must be in the scheduler's allocation, with at most its slots.

    Raises:
        HostfileError: the first host that is not, with what the allocation has.
    """
    for host in pool.hosts:
        granted = next((other for other in allocation.hosts if _same_host(host.name, other.name)), None)
        have = ", ".join(f"{other.name}:{other.slots}" for other in allocation.hosts[:8]) + (
            " …" if len(allocation.hosts) > 8 else ""
        )
        if granted is None:
            raise HostfileError(
                f"host {host.name} is not in this job's allocation ({allocation.source}: {have})",
                source=host.source or pool.source,
                fix="use hosts of the allocation only, or start outside of the job",
            )
        if host.slots > granted.slots:
            raise HostfileError(
                f"host {host.name} has {host.slots} slots, the allocation ({allocation.source}) has {granted.slots}",
                source=host.source or pool.source,
                fix=f"write at most {granted.slots}, or ask the scheduler for more tasks per node",
            )


def parse_names(names: list[str], source: str) -> HostList:
    """A list that names a host once per rank, as PBS and LSF write it; repeats need not be neighbours."""
    entries: list[Entry] = []
    for number, name in enumerate(names, start=1):
        if not name.strip():
            continue
        where = Position(source, number, name)
        entry = parse_entry(name.strip(), len(name) - len(name.lstrip()), where, f"{source}:{number}")
        if entry.slots is not None or entry.user is not None:
            raise where.error("one host name per line was expected", 0)
        entries.append(entry)
    return require_hosts(merge_entries(entries, 1, bare_adds=True), source)


def _read_names(path: str, source: str) -> HostList:
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise HostfileError(
            f"the node file cannot be read: {error}",
            source=printable(source),
            fix="give the hosts with --hostfile or -H",
        ) from error
    return parse_names(decode_text(data, source).splitlines(), source)


def _slurm_counts(environ: Mapping[str, str], names: list[str], default_slots: int | None) -> list[int]:
    text = environ.get("SLURM_TASKS_PER_NODE", "").strip()
    if text:
        return expand_counts(text, "SLURM_TASKS_PER_NODE", len(names))
    per_node = environ.get("SLURM_NTASKS_PER_NODE", "").strip()
    if per_node:
        return [slot_number(per_node, 0, Position("SLURM_NTASKS_PER_NODE", 1, per_node), "the count")] * len(names)
    if default_slots is None:
        raise HostfileError(
            "Slurm names the nodes but no tasks per node (SLURM_TASKS_PER_NODE is not set)",
            source="SLURM_JOB_NODELIST",
            fix="ask for --ntasks-per-node in the job, or give --slots-per-host N",
        )
    return [default_slots] * len(names)


def _mcpu_hosts(text: str, source: str) -> list[Host]:
    words = text.split()
    where = Position(source, 1, " ".join(words))
    if len(words) % 2:
        raise where.error(
            "a host without a count: names and counts must alternate",
            len(where.text) - len(words[-1]),
            "expected: host n host n …",
        )
    entries, column = [], 0
    for name, count in zip(words[::2], words[1::2], strict=True):
        entry = parse_entry(name, column, where, source)
        slots = slot_number(count, column + len(name) + 1, where, f"the count of {entry.name}:")
        entries.append(entry._replace(slots=slots, counted="colon"))
        column += len(name) + len(count) + 2
    return merge_entries(entries, None)


def _same_host(one: str, other: str) -> bool:
    """Equal names, or a short name and the full one that begins with it, or two names of this machine."""
    a, b = host_key(one), host_key(other)
    if a == b:
        return True
    if (
        ":" not in a + b
        and not a.replace(".", "").isdigit()
        and not b.replace(".", "").isdigit()
        and ("." in a) != ("." in b)
    ):
        return a.partition(".")[0] == b.partition(".")[0]
    return is_local(a) and is_local(b)
