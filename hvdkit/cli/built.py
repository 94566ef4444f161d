"""Asks in a light way what the installed Horovod was built with: from hvdkit's stamp, else from its library files."""

from __future__ import annotations

import importlib.util
import mmap
from pathlib import Path


def horovod_has_mpi() -> bool | None:
    """True or False where a Horovod is installed and says so, None where there is none (or it has no library).

    A library that calls MPI names ``libmpi`` among the libraries it needs, so no framework has to be imported to know.
    """
    spec = importlib.util.find_spec("horovod")
    folders = (
        []
        if spec is None or not spec.submodule_search_locations
        else [Path(p) for p in spec.submodule_search_locations]
    )
    libraries = [library for folder in folders for library in folder.glob("*/mpi_lib*.so")]
    if not libraries:
        return None
    return any(_mentions(library, b"libmpi.so") for library in libraries)


def _mentions(library: Path, name: bytes) -> bool:
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(name) >= 0
