"""Writes the launcher's command line as a list of arguments: a pure function of the job, pinned by golden files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hvdkit.errors import LaunchError, UsageError
from hvdkit.launch.dialects import write_hosts
from hvdkit.launch.environment import CHANNEL_VARIABLE, Forwarding, without_private
from hvdkit.launch.hosts import is_local
from hvdkit.launch.mpi import Launcher, with_own_folder
from hvdkit.launch.placement import Placement

Binding = Literal["none", "core", "socket", "numa"]
WRAPPER = str(Path(__file__).with_name("rank_wrapper.py"))
_LAST_VARIABLE = "HVDKIT_ENVIRONMENT_ENDS"
_MANY_HOSTS = 64  # from here on the first host opens every ssh connection itself, all at once, as Horovod does


@dataclass(frozen=True)
class JobRequest:
    """All that decides a command line. ``cores`` is this machine's core count, None where it does not matter;
    ``remote_hosts`` the used hosts that are not this machine."""

    launcher: Launcher
    placement: Placement
    command: tuple[str, ...]
    forwarding: Forwarding
    remote_hosts: tuple[str, ...] = ()
    ssh_port: int | None = None
    ssh_identity: str | None = None
    ssh_user: str | None = None
    interface: str | None = None
    bind: Binding = "none"
    tag_output: bool = False
    log_dir: str | None = None
    launcher_arguments: tuple[str, ...] = ()
    cores: int | None = None
    is_root: bool = False
    python: str = sys.executable
    wrapper: str = WRAPPER


@dataclass(frozen=True)
class Command:
    """What is run: ``argv`` with ``environ``, after ``hostfile`` was written to the path that ``argv`` names."""

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    hostfile: str
    notes: tuple[str, ...] = field(default=())


def build_command(job: JobRequest, hostfile: str) -> Command:
    """The command line for the job's launcher, its host list to be found in the file ``hostfile``.

    Raises:
        LaunchError: the launcher cannot do what the job asks for.
        UsageError: an ssh setting would not arrive as it was given.
    """
    _check_ssh(job)
    dialect, build = _BUILDERS[job.launcher.family]
    environ = dict(job.forwarding.environ)
    notes = list(job.forwarding.notes)
    if job.interface is not None:
        environ.setdefault("NCCL_SOCKET_IFNAME", job.interface)
        environ.setdefault("HOROVOD_GLOO_IFACE", job.interface)
    head = build(job, hostfile, environ, notes)
    if "OMP_NUM_THREADS" not in environ and job.cores is not None and (most := _most_local_ranks(job)) > 1:
        share = max(1, job.cores // most)
        notes.append(
            f"OMP_NUM_THREADS is not set: each of the {most} ranks here may start {job.cores} threads, "
            f"with {job.cores} cores for all of them; --env OMP_NUM_THREADS={share} shares the cores out"
        )
    argv = [job.launcher.path, *head, *job.launcher_arguments, *rank_command(job)]
    return Command(tuple(argv), environ, write_hosts(job.placement.hosts, dialect), tuple(notes))


def rank_command(job: JobRequest) -> list[str]:
    """What every rank executes: the wrapper that reports to the launcher, then the user's command."""
    options = []
    if job.tag_output:
        options += ["--tag", "1"]
    if job.log_dir is not None:
        options += ["--log-dir", str(Path(job.log_dir).absolute())]
    gpus = gpu_spec(job.placement)
    if gpus:
        options += ["--gpus", gpus]
    # A lone ':' starts another program for every mpirun, and an empty word gets lost in some.
    if any(word in (":", "") for word in job.command):
        return [job.python, "-I", "-S", job.wrapper, *options, "--json", json.dumps(job.command), "--"]
    return [job.python, "-I", "-S", job.wrapper, *options, "--", *job.command]


def gpu_spec(placement: Placement) -> str:
    """The hosts' GPU lists by their range of ranks, ``0-1:0,2;2-2:5``; empty where no host has one."""
    parts, first = [], 0
    for host in placement.hosts:
        if host.gpus is not None:
            parts.append(f"{first}-{first + host.slots - 1}:{','.join(map(str, host.gpus))}")
        first += host.slots
    return ";".join(parts)


def remote_hosts(placement: Placement) -> tuple[str, ...]:
    """The used hosts that are not this machine."""
    return tuple(host.name for host in placement.hosts if not is_local(host.name))


def _ssh_words(job: JobRequest) -> list[str]:
    words = []
    if job.ssh_port is not None:
        words += ["-p", str(job.ssh_port)]
    if job.ssh_identity is not None:
        words += ["-i", job.ssh_identity]
    if job.ssh_user is not None:
        words += ["-l", job.ssh_user]
    return words


def _check_ssh(job: JobRequest) -> None:
    """Launchers cut their ssh options at blanks, and horovodrun hands them to a shell."""
    from hvdkit.launch.hosts import printable, user_problem

    if job.ssh_port is not None and not 0 < job.ssh_port < 65_536:
        raise UsageError(f"--ssh-port {job.ssh_port} was given; a port from 1 to 65535 was expected.")
    if job.ssh_user is not None and user_problem(job.ssh_user):
        raise UsageError(f"--ssh-user {printable(job.ssh_user)!r}: {user_problem(job.ssh_user)}.")
    for option, value, extra in (("--ssh-identity", job.ssh_identity, "/~+@%"), ("--interface", job.interface, ",/:")):
        if value is not None and (
            not value or value[0] == "-" or not all(c.isascii() and (c.isalnum() or c in "._-" + extra) for c in value)
        ):
            raise UsageError(
                f"{option} {printable(value)!r}: letters, digits and ._-{extra} only; launchers cut the rest."
            )


def _openmpi(job: JobRequest, hostfile: str, environ: dict[str, str], notes: list[str]) -> list[str]:
    five = job.launcher.version[:1] >= (5,)
    argv = ["-n" if five else "-np", str(job.placement.size), "--hostfile", hostfile]
    argv += ["--bind-to", job.bind, "--map-by", "slot"]
    argv += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp" if five else "^openib"]
    argv += _openmpi_hosts(job, five)
    if job.cores is not None and _most_local_ranks(job) > job.cores:
        argv += ["--mca", "mpi_yield_when_idle", "1"]
        notes.append(f"more ranks than the {job.cores} cores here: ranks that wait give their core away")
    if job.remote_hosts:
        if job.launcher.prefix not in ("/usr", "/usr/local", "/"):
            argv += ["--prefix", job.launcher.prefix]
        for name in _forwarded(job, environ):
            argv += ["-x", name]
    if job.is_root and not environ.get("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        notes.append("running as root: OMPI_ALLOW_RUN_AS_ROOT and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM are set for mpirun")
    return argv


def _openmpi_hosts(job: JobRequest, five: bool) -> list[str]:
    """How to reach the hosts: interface, full names, ssh. In version 5 PRRTE does it, with other names."""
    ssh, runtime = ("ssh", "--prtemca") if five else ("rsh", "--mca")
    hosts = job.placement.hosts
    argv = []
    odd = next((host.name for host in hosts if "_" in host.name and not five), None)
    if odd is not None:
        raise LaunchError(
            f"host {odd}: Open MPI 4 takes no underscore in a host name; give it another one in /etc/hosts."
        )
    if job.interface is not None:
        argv += ["--mca", "btl_tcp_if_include", job.interface]
        argv += [runtime, "prte_if_include" if five else "oob_tcp_if_include", job.interface]
    if any("." in host.name and not host.is_ipv6 for host in hosts):
        argv += [runtime, "prte_keep_fqdn_hostnames" if five else "orte_keep_fqdn_hostnames", "1"]
    words = _ssh_words(job)
    if words:
        argv += [runtime, f"plm_{ssh}_args", " ".join(words)]
    if len(hosts) >= _MANY_HOSTS:
        argv += [runtime, f"plm_{ssh}_no_tree_spawn", "1", runtime, f"plm_{ssh}_num_concurrent", str(len(hosts))]
    return argv


def _mpich(job: JobRequest, hostfile: str, environ: dict[str, str], notes: list[str]) -> list[str]:
    argv = ["-n", str(job.placement.size), "-f", hostfile, "-bind-to", job.bind]
    if job.interface is not None:
        argv += ["-iface", job.interface]
    if job.remote_hosts:
        argv += ["-launcher", "ssh", "-genvlist", ",".join(_forwarded(job, environ))]
        _keep_public(job, environ)
        environ[_LAST_VARIABLE] = "1"  # MPICH 5.0.2 drops whatever variable stands last when it is given a list
    words = _ssh_words(job)
    if words:
        environ["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(words)
    return argv


def _intel(job: JobRequest, hostfile: str, environ: dict[str, str], notes: list[str]) -> list[str]:
    environ["PATH"] = with_own_folder(job.launcher.path, environ.get("PATH", os.defpath))
    environ.setdefault("I_MPI_ROOT", job.launcher.prefix)
    argv = ["-n", str(job.placement.size), "-machinefile", hostfile]
    if job.remote_hosts:
        argv += ["-bootstrap", "ssh"]
    words = _ssh_words(job)
    if words:
        argv += ["-bootstrap-exec-args", " ".join(words)]
    if job.interface is not None:
        argv += ["-iface", job.interface]
    if job.bind == "none":
        argv += ["-genv", "I_MPI_PIN", "0"]
    else:
        argv += ["-genv", "I_MPI_PIN", "1", "-genv", "I_MPI_PIN_DOMAIN", job.bind]
    if job.remote_hosts:
        argv += ["-genvlist", ",".join(_forwarded(job, environ))]
        _keep_public(job, environ)
    return argv


def _horovodrun(job: JobRequest, hostfile: str, environ: dict[str, str], notes: list[str]) -> list[str]:
    if job.bind != "none":
        raise LaunchError(f"--bind {job.bind} was given, but horovodrun --gloo binds nothing; use --launcher mpirun.")
    if job.ssh_user is not None:
        raise LaunchError(
            "--ssh-user was given, but horovodrun takes no user; put `User` for these hosts into ~/.ssh/config."
        )
    argv = ["-np", str(job.placement.size), "--gloo", "--hostfile", hostfile]
    if job.ssh_port is not None:
        argv += ["-p", str(job.ssh_port)]
    if job.ssh_identity is not None:
        argv += ["-i", job.ssh_identity]
    if job.interface is not None:
        argv += ["--network-interfaces", job.interface]
    if job.remote_hosts:
        # It forwards all of its environment, on the command line of ssh, and goes to this directory through a shell.
        _keep_public(job, environ)
        cwd = str(Path.cwd())
        if not all(c.isalnum() or c in "/._-+@%=:," for c in cwd):
            raise LaunchError(
                f"horovodrun cannot go to the directory {cwd!r} on other hosts; "
                "start from one without blanks and quotes."
            )
    return argv


def _forwarded(job: JobRequest, environ: Mapping[str, str]) -> list[str]:
    added = {name for name in ("NCCL_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE") if name in environ}
    return sorted({*job.forwarding.names, *added, CHANNEL_VARIABLE})


def _keep_public(job: JobRequest, environ: dict[str, str]) -> None:
    """For launchers that send their whole environment to other hosts, whatever they then do with it."""
    kept = without_private(environ, job.forwarding.names)
    environ.clear()
    environ.update(kept)


def _most_local_ranks(job: JobRequest) -> int:
    """The number of ranks on this machine, as far as it is among the hosts."""
    return max((host.slots for host in job.placement.hosts if host.name not in job.remote_hosts), default=0)


_Builder = Callable[[JobRequest, str, dict[str, str], list[str]], list[str]]
_BUILDERS: dict[str, tuple[str, _Builder]] = {
    "openmpi": ("openmpi", _openmpi),
    "mpich": ("mpich", _mpich),
    "intel": ("intel", _intel),
    "horovodrun": ("horovod", _horovodrun),
}
