"""``hvdkit hosts``: show where each host came from and which rank runs where, or write the list in another spelling."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import click

from hvdkit.cli.hostoptions import host_options
from hvdkit.launch.dialects import DIALECTS, write_hosts
from hvdkit.launch.hosts import Host, HostList
from hvdkit.launch.placement import Placement, place
from hvdkit.launch.sources import find_hosts

_HOST_KEYS = ("host", "slots", "max_slots", "gpus", "user", "port", "source")
_RANK_KEYS = ("rank", "host", "local_rank", "local_size", "cross_rank", "cross_size", "gpu")


@click.command("hosts", context_settings={"help_option_names": ["-h", "--help"]})
@host_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--format", "dialect", type=click.Choice(list(DIALECTS)), help="Write the list as this tool reads it.")
def command(
    ranks: int | None,
    hostfile: str | None,
    hosts: str | None,
    source: Any,
    slots_per_host: int | None,
    include: str,
    exclude: str,
    skip_launch_host: bool,
    as_json: bool,
    dialect: str | None,
) -> int:
    """Show a host list and the rank table it gives. Exit code 2 where the list is bad."""
    pool = find_hosts(
        os.environ,
        hostfile=hostfile,
        hosts=hosts,
        ranks=ranks,
        source=source,
        default_slots=slots_per_host,
        include=include,
        exclude=exclude,
        skip_launch_host=skip_launch_host,
    )
    placement = place(pool, ranks)
    if dialect is not None:
        click.echo(write_hosts(pool.hosts, dialect), nl=False)
    elif as_json:
        click.echo(json.dumps(as_object(pool, placement)))
    else:
        click.echo(_text(pool, placement))
    if not as_json:
        for warning in pool.warnings:
            click.echo(f"hvdkit: {warning}", err=True)
    return 0


def as_object(pool: HostList, placement: Placement) -> dict[str, Any]:
    """What ``--json`` prints: ``hosts``, ``ranks`` and ``warnings``, as lists of plain objects."""
    return {
        "hosts": [dict(zip(_HOST_KEYS, _host_row(host, pool.source), strict=True)) for host in pool.hosts],
        "ranks": [dict(zip(_RANK_KEYS, rank, strict=True)) for rank in placement.ranks],
        "warnings": pool.warnings,
    }


def _host_row(host: Host, source: str) -> tuple[Any, ...]:
    gpus = None if host.gpus is None else list(host.gpus)
    return host.name, host.slots, host.max_slots, gpus, host.user, host.port, host.source or source


def _text(pool: HostList, placement: Placement) -> str:
    hosts = [_host_row(host, pool.source) for host in pool.hosts]
    return f"{_table(_HOST_KEYS, hosts)}\n\n{_table(_RANK_KEYS, placement.ranks)}"


def _table(keys: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns as wide as their widest cell; numbers to the right. Plain text, so that it can be piped and cut."""
    cells = [list(keys)] + [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    numeric = [all(row[i] == "-" or row[i].isdigit() for row in cells[1:]) for i in range(len(keys))]
    lines = []
    for row in cells:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
