"""Decides where the hosts of a job come from: the command line, a variable, the scheduler, or this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from hvdkit.errors import HostfileError, UsageError
from hvdkit.launch.allocation import READERS, Scheduler, check_within, read_lsf, read_variable
from hvdkit.launch.filters import filter_hosts
from hvdkit.launch.hostfile import parse_host_option, read_hostfile
from hvdkit.launch.hosts import Host, HostList

Source = Literal["auto", "file", "slurm", "pbs", "lsf"]


def find_hosts(
    environ: Mapping[str, str],
    *,
    hostfile: str | Path | None = None,
    hosts: str | None = None,
    ranks: int | None = None,
    source: Source = "auto",
    default_slots: int | None = None,
    include: str = "",
    exclude: str = "",
    skip_launch_host: bool = False,
) -> HostList:
    """The hosts of a job.

    In order: ``hostfile`` or ``hosts`` (as in ``-H``), ``HVDKIT_HOSTS``, Slurm, PBS, LSF, and at last this machine with
    ``ranks`` slots. Inside an allocation the first two must lie within it. ``source`` allows one of them only.

    Raises:
        HostfileError: a list cannot be read, has no hosts, or lies outside of the allocation.
        UsageError: nothing says which hosts or how many ranks, or the arguments contradict each other.
    """
    if default_slots is not None and default_slots < 1:
        raise UsageError(f"--slots-per-host {default_slots} was given; at least 1 was expected.")
    pool = _choose(environ, hostfile, hosts, ranks, source, default_slots, skip_launch_host)
    return filter_hosts(pool, include, exclude)


def scheduler_hosts(
    environ: Mapping[str, str], default_slots: int | None = None, *, skip_launch_host: bool = False
) -> tuple[Scheduler, HostList] | None:
    """The scheduler that this process runs under and its allocation, or None."""
    for name in READERS:
        pool = _read(name, environ, default_slots, skip_launch_host)
        if pool is not None:
            return name, pool
    return None


def _choose(
    environ: Mapping[str, str],
    hostfile: str | Path | None,
    hosts: str | None,
    ranks: int | None,
    source: Source,
    default_slots: int | None,
    skip_launch_host: bool,
) -> HostList:
    if hostfile is not None and hosts is not None:
        raise UsageError("--hostfile and -H were both given; keep one of them.")
    if source == "auto" or source == "file":
        given = _given(environ, hostfile, hosts, default_slots)
        if given is not None:
            # Whatever the job script says of tasks, the allocation can only be compared where its counts are known.
            found = scheduler_hosts(environ, default_slots or 1 << 16, skip_launch_host=skip_launch_host)
            if found is not None:
                check_within(given, found[1])
            return given
        if source == "file":
            raise UsageError("--source file was given without a list; add --hostfile FILE or -H LIST.")
    elif hostfile is not None or hosts is not None:
        raise UsageError(f"--source {source} was given together with --hostfile or -H; keep one of them.")
    else:
        pool = _read(source, environ, default_slots, skip_launch_host)
        if pool is None:
            raise HostfileError(f"this process is in no {source} job: its variables are not set", source=source)
        return pool
    found = scheduler_hosts(environ, default_slots, skip_launch_host=skip_launch_host)
    return found[1] if found is not None else _this_machine(ranks, default_slots)


def _given(
    environ: Mapping[str, str], hostfile: str | Path | None, hosts: str | None, default_slots: int | None
) -> HostList | None:
    if hostfile is not None:
        return read_hostfile(hostfile, default_slots)
    if hosts is not None:
        return parse_host_option(hosts, "-H", default_slots)
    return read_variable(environ, default_slots)


def _read(
    name: Scheduler, environ: Mapping[str, str], default_slots: int | None, skip_launch_host: bool
) -> HostList | None:
    if name == "lsf":
        return read_lsf(environ, default_slots, skip_launch_host=skip_launch_host)
    return READERS[name](environ, default_slots)


def _this_machine(ranks: int | None, default_slots: int | None) -> HostList:
    slots = ranks if ranks is not None else default_slots
    if slots is None:
        raise UsageError(
            "how many processes? Neither -np nor hosts were given (--hostfile, -H, HVDKIT_HOSTS), "
            "and no scheduler runs this job. For one process write -np 1."
        )
    if slots < 1:
        raise UsageError(f"-np {slots} was given; at least 1 process is needed.")
    return HostList((Host("localhost", slots, source="-np"),), "this machine")
