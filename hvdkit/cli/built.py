"""Asks in a light way what the installed Horovod was built with: from its library files, without importing anything.

A library that calls MPI names ``libmpi`` with its version among the libraries it needs: 40 is Open MPI, 12 is MPICH
and Intel MPI. hvdkit's stamp tells more, but only of a Horovod that hvdkit has built.
"""

from __future__ import annotations

import importlib.util
import mmap
from pathlib import Path
from typing import Literal

_LIBRARIES: tuple[tuple[bytes, Literal["openmpi", "mpich"]], ...] = (
    (b"libmpi.so.40", "openmpi"),
    (b"libmpi.so.12", "mpich"),
)


def horovod_mpi() -> Literal["openmpi", "mpich", "other", "none"] | None:
    """The MPI that the installed Horovod calls, ``none`` for a build without, None where there is no Horovod."""
    spec = importlib.util.find_spec("horovod")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec is not None else []
    libraries = [library for folder in folders for library in folder.glob("*/mpi_lib*.so")]
    if not libraries:
        return None
    for name, family in _LIBRARIES:
        if any(_mentions(library, name) for library in libraries):
            return family
    return "other" if any(_mentions(library, b"libmpi") for library in libraries) else "none"


def mismatch(launcher_family: str) -> str | None:
    """One line where Horovod calls another MPI than the launcher's: each rank would then be alone (rank 0 of 1)."""
    built = horovod_mpi()
    launched = "mpich" if launcher_family == "intel" else launcher_family
    if built not in ("openmpi", "mpich") or launched not in ("openmpi", "mpich") or built == launched:
        return None
    names = {"openmpi": "Open MPI", "mpich": "MPICH or Intel MPI"}
    return (
        f"Horovod was built with {names[built]}, but {names[launched]} starts this job: each rank would train alone. "
        "Use its own mpirun (--launcher-path), or run `hvdkit install-horovod --force`"
    )


def _mentions(library: Path, name: bytes) -> bool:
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(name) >= 0
