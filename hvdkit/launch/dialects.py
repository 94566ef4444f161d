"""Writes a host list in the spelling that one tool reads, strictly, or says why that tool cannot be told."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hvdkit.errors import LaunchError
from hvdkit.launch.hosts import Host

_NO_USER_OR_PORT = "put `User` and `Port` for it into ~/.ssh/config"


def write_hosts(hosts: Sequence[Host], dialect: str) -> str:
    """The host list as text in ``dialect``, one of :data:`DIALECTS`.

    Raises:
        LaunchError: a host has something that the dialect cannot say.
    """
    write = DIALECTS[dialect]
    return "".join(f"{write(host)}\n" for host in hosts)


def _openmpi(host: Host) -> str:
    """``[user@]name slots=N [max_slots=M] [port=P]``; an IPv6 address stands without brackets."""
    user = f"{host.user}@" if host.user else ""
    most = f" max_slots={host.max_slots}" if host.max_slots is not None else ""
    port = f" port={host.port}" if host.port is not None else ""
    return f"{user}{host.name} slots={host.slots}{most}{port}"


def _hydra(host: Host) -> str:
    """``name:N [user=U]``."""
    _refuse_ipv6(host, "the Hydra launcher of MPICH and Intel MPI")
    if host.port is not None:
        raise LaunchError(
            f"host {host.name}: an MPICH or Intel host file has no ssh port; "
            f"give one for all with --ssh-port, or {_NO_USER_OR_PORT}."
        )
    return f"{host.name}:{host.slots}" + (f" user={host.user}" if host.user else "")


def _horovod(host: Host) -> str:
    """``name slots=N`` and nothing else: no comment, no user, no port."""
    _refuse_ipv6(host, "horovodrun")
    if not re.fullmatch(r"[\w.-]+", host.name):
        raise LaunchError(f"horovodrun cannot be told the host {host.name}.")
    if host.user or host.port is not None:
        raise LaunchError(f"host {host.name}: horovodrun cannot be told a user or port per host; {_NO_USER_OR_PORT}.")
    return f"{host.name} slots={host.slots}"


def _deepspeed(host: Host) -> str:
    """``name slots=N``; ssh settings belong into ~/.ssh/config there."""
    return f"{host.name} slots={host.slots}"


def _hvdkit(host: Host) -> str:
    """All that a host list can say, as hvdkit itself reads it."""
    name = f"[{host.name}]" if host.is_ipv6 else host.name
    gpus = f" gpus={','.join(map(str, host.gpus))}" if host.gpus is not None else ""
    return _openmpi(host._replace(name=name)) + gpus


def _refuse_ipv6(host: Host, tool: str) -> None:
    if host.is_ipv6:
        raise LaunchError(
            f"host {host.name}: {tool} cuts names at ':' and takes no IPv6 address; give it a name in /etc/hosts."
        )


DIALECTS: dict[str, Callable[[Host], str]] = {
    "openmpi": _openmpi,
    "mpich": _hydra,
    "intel": _hydra,
    "horovod": _horovod,
    "deepspeed": _deepspeed,
    "hvdkit": _hvdkit,
}
