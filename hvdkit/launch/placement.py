"""Places ranks on hosts: host by host in the order of the list, each filled to its slots, as ``--map-by slot`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvdkit.errors import PlacementError
from hvdkit.launch.hosts import Host, HostList

_SHOWN = 20


class Rank(NamedTuple):
    """One process: ``local_rank`` of ``local_size`` on its host, ``cross_rank`` of ``cross_size`` among the hosts that
    have this local rank, and the GPU number that the host list gives it (None: not said)."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    gpu: int | None


class Placement(NamedTuple):
    """The hosts that are used, in rank order, with ``slots`` the number of ranks each runs, and all ranks."""

    hosts: tuple[Host, ...]
    ranks: tuple[Rank, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


def place(pool: HostList, ranks: int | None = None) -> Placement:
    """Place ``ranks`` processes (default: one on every slot).

    Raises:
        PlacementError: ``ranks`` is below 1 or above the slots; the message lists what each host offers.
    """
    size = pool.slots if ranks is None else ranks
    if size < 1:
        raise PlacementError(f"-np {size} was given; at least 1 process is needed.")
    if size > pool.slots:
        raise PlacementError(_too_many(pool, size))
    used = []
    left = size
    for host in pool.hosts:
        take = min(host.slots, left)
        if take == 0:
            break
        used.append(host if take == host.slots else host._replace(slots=take, gpus=host.gpus and host.gpus[:take]))
        left -= take
    return Placement(tuple(used), _rank_table(used))


def _rank_table(hosts: Sequence[Host]) -> tuple[Rank, ...]:
    cross_sizes = [0] * max(host.slots for host in hosts)
    for host in hosts:
        for local in range(host.slots):
            cross_sizes[local] += 1
    seen = [0] * len(cross_sizes)
    rows: list[tuple[int, str, int, int, int, int, int | None]] = []
    for host in hosts:
        name, local_size, gpus = host.name, host.slots, host.gpus
        for local in range(local_size):
            gpu = None if gpus is None else gpus[local]
            rows.append((len(rows), name, local, local_size, seen[local], cross_sizes[local], gpu))
            seen[local] += 1
    return tuple(map(Rank._make, rows))  # calling Rank for each of 40,000 ranks takes three times as long


def _too_many(pool: HostList, size: int) -> str:
    width = max(len(host.name) for host in pool.hosts[:_SHOWN])
    rows = [f"  {host.name:<{width}}  {host.slots:>5}  ({host.source or pool.source})" for host in pool.hosts[:_SHOWN]]
    if len(pool.hosts) > _SHOWN:
        rows.append(f"  … and {len(pool.hosts) - _SHOWN} hosts more")
    table = "\n".join([f"  {'host':<{width}}  slots", *rows])
    return (
        f"-np {size} was given, but {pool.source} offers {pool.slots} slot{'s' * (pool.slots != 1)}:\n{table}\n"
        f"  Ask for at most {pool.slots}, or raise the slots of a host (more ranks than cores are allowed)."
    )
