"""Runs on every rank under ``mpirun`` on mpi4py, without Horovod and without a framework.

    mpirun -n 2 python -m hvdkit.doctor.probe

Rank 0 prints one line of JSON behind the mark ``hvdkit-probe:``: the facts of every rank, and the latency and bandwidth
of an all-reduce. What differs between ranks is for the reader to judge (:func:`hvdkit.doctor.ranks.differences`).
"""

from __future__ import annotations

import json
import platform
import socket
import sys
import time
from importlib import metadata
from typing import Any

MARK = "hvdkit-probe:"
VERSIONS_OF = ("hvdkit", "torch", "tensorflow", "tensorflow-cpu", "keras", "horovod", "numpy", "mpi4py")
SMALL_BYTES, LARGE_BYTES = 8, 16 * 2**20


def facts(library: str) -> dict[str, Any]:
    """What this rank runs: host, interpreter, versions of the packages, the MPI library that mpi4py loaded."""
    versions = {}
    for name in VERSIONS_OF:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": versions,
        "mpi": library,
    }


def main() -> None:
    """Gather the facts of all ranks on rank 0 and print them."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    told = comm.gather(facts(MPI.Get_library_version().splitlines()[0].strip("\x00 ,")), root=0)
    small = _seconds(comm, MPI.SUM, SMALL_BYTES, repeats=200)
    large = _seconds(comm, MPI.SUM, LARGE_BYTES, repeats=5)
    if comm.rank == 0:
        # Bus bandwidth of a ring all-reduce of S bytes on n ranks: 2 (n - 1) / n * S / t.
        bus = 2 * (comm.size - 1) / comm.size * LARGE_BYTES / large
        line = {"ranks": told, "allreduce_8_bytes_s": small, "allreduce_16_mib_bus_bytes_per_s": bus}
        print(MARK + json.dumps(line), flush=True)


def _seconds(comm: Any, operation: Any, size: int, repeats: int) -> float:
    """Median time of an all-reduce of ``size`` bytes, the slowest rank's."""
    import numpy as np

    sent, received = np.ones(size, np.uint8), np.empty(size, np.uint8)
    times = []
    for _ in range(repeats + 1):
        comm.Barrier()
        start = time.perf_counter()
        comm.Allreduce(sent, received, op=operation)
        times.append(time.perf_counter() - start)
    return float(comm.allreduce(float(np.median(times[1:]))) / comm.size)


if __name__ == "__main__":
    main()
