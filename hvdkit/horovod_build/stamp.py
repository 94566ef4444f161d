"""The stamp inside an installed Horovod: what it was built against. It lives and dies with the installation.

:func:`read_stamp` and :func:`compare` import neither Horovod nor a framework, so they are fit for the start of a job.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.horovod_build import frameworks as fw
from hvdkit.horovod_build import mpi

STAMP_FILE = "hvdkit_stamp.json"  # in the package folder horovod/
PROOF_FILE = "hvdkit_proof.json"  # in its .dist-info folder
REBUILD = "hvdkit install-horovod"


@dataclass(frozen=True)
class Stamp:
    """What one Horovod was built against. ``mpi_family`` is empty for a build without MPI.

    ``recipe`` is the digest of the table of edits; ``left_out`` names what this build does not have.
    """

    horovod: str
    key: str
    python: str
    abi: str
    machine: str
    libc: str
    frameworks: dict[str, str]
    compiler: str
    cmake: str
    mpi_family: str
    mpi_version: str
    mpicxx: str
    gpu: str
    controllers: tuple[str, ...]
    edits: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    recipe: str = ""
    hvdkit: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> Stamp:
        """Raises ``BuildError`` for a text that is not a stamp. What a newer hvdkit added to it is passed over."""
        try:
            names = {field.name for field in fields(Stamp)}
            told = {name: value for name, value in dict(json.loads(text)).items() if name in names}
            for name in ("controllers", "edits", "left_out"):
                told[name] = tuple(told[name])
            return Stamp(**told)
        except (ValueError, TypeError, KeyError) as error:
            raise BuildError(
                f"the stamp of the installed Horovod cannot be read: {error}\n  fix: {REBUILD} --force"
            ) from error


@dataclass(frozen=True)
class Present:
    """What runs now, in the stamp's terms. ``mpi_family`` is empty where no launcher is found."""

    python: str
    abi: str
    machine: str
    frameworks: dict[str, str] = field(default_factory=dict)
    mpi_family: str = ""
    mpi_version: str = ""


@dataclass(frozen=True)
class Mismatch:
    """One difference between build and now. Where not ``fatal``, the two are meant to work together."""

    what: str
    built: str
    now: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.what}: Horovod was built with {self.built}, here is {self.now}; {self.remedy}"


def package_folder() -> Path | None:
    """Folder of the installed Horovod, found without importing it."""
    spec = importlib.util.find_spec("horovod")
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def read_stamp() -> Stamp | None:
    """The stamp of the installed Horovod; ``None`` where Horovod is absent or was not built by hvdkit.

    Raises ``BuildError`` for a damaged stamp.
    """
    folder = package_folder()
    path = folder / STAMP_FILE if folder else None
    return Stamp.from_json(path.read_text()) if path is not None and path.is_file() else None


def read_proof() -> dict[str, object]:
    """What was proven of the installed Horovod after its installation; empty where nothing was."""
    try:
        text = metadata.distribution("horovod").read_text(PROOF_FILE)
        told = json.loads(text) if text else {}
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def present(names: Mapping[str, str] | None = None) -> Present:
    """What runs on this host now; nothing is imported. ``names``: framework versions, where they are known already."""
    launcher = mpi.find_launcher()
    banner = launcher[1] if launcher else mpi.Banner("", "")
    versions = dict(names) if names is not None else fw.installed()
    abi = str(sysconfig.get_config_var("SOABI"))
    return Present(platform.python_version(), abi, platform.machine(), versions, banner.family, banner.version)


def compare(stamp: Stamp, now: Present) -> list[Mismatch]:
    """Every difference that matters between a stamp and what runs now, both versions shown."""
    found = []
    if stamp.abi != now.abi or stamp.machine != now.machine:
        built, here = f"Python {stamp.python} ({stamp.abi})", f"Python {now.python} ({now.abi})"
        found.append(Mismatch("Python", built, here, f"run {REBUILD} with this Python"))
    for name, version in stamp.frameworks.items():
        current = now.frameworks.get(name)
        if current != version:
            remedy = f"install {name} {version} again, or run {REBUILD}"
            here = f"{name} {current}" if current else f"no {name}"
            found.append(Mismatch(name, f"{name} {version}", here, remedy))
    if stamp.mpi_family:
        found += _compare_mpi(stamp, now)
    return found


def _compare_mpi(stamp: Stamp, now: Present) -> list[Mismatch]:
    built, here = f"{stamp.mpi_family} {stamp.mpi_version}", f"{now.mpi_family} {now.mpi_version}".strip()
    if built == here:
        return []
    if not here:
        remedy = "put its mpirun on PATH, or start the job with horovodrun --gloo"
        return [Mismatch("MPI", built, "no mpirun", remedy, fatal="gloo" not in stamp.controllers)]
    # Within one family a major version keeps its binary interface, across them it does not.
    same = stamp.mpi_family == now.mpi_family and stamp.mpi_version.split(".")[0] == now.mpi_version.split(".")[0]
    return [Mismatch("MPI", built, here, f"launch with the MPI of the build, or run {REBUILD}", fatal=not same)]
