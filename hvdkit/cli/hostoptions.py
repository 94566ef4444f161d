"""The options that say where a job runs, shared by the commands that take a host list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "-np", "-n", "--ranks", "ranks", type=int, metavar="N", help="Number of processes; default: one on every slot."
    ),
    click.option("--hostfile", "-hostfile", type=str, metavar="FILE", help="Host list in any common spelling."),
    click.option("-H", "--hosts", "hosts", metavar="LIST", help='Host list such as "n1:2,n2:4".'),
    click.option(
        "--source",
        type=click.Choice(["auto", "file", "slurm", "pbs", "lsf"]),
        default="auto",
        help="Where hosts may come from (auto: the first that is there).",
    ),
    click.option("--slots-per-host", type=int, metavar="N", help="Slots of a host that the list gives none."),
    click.option("--include", default="", metavar="FILTER", help="Use only these hosts and slots: w0@w1:0,2"),
    click.option("--exclude", default="", metavar="FILTER", help="Leave out these hosts and slots: w0@w1:0,2"),
    click.option("--skip-launch-host", is_flag=True, help="LSF: the first host only runs the job script."),
)


def host_options(command: _F) -> _F:
    """Add ``ranks hostfile hosts source slots_per_host include exclude skip_launch_host`` to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
