"""Compilers and build tools: where they are, what they can do, and how to get what is missing."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvdkit.horovod_build import mpi
from hvdkit.horovod_build.process import ask

CMAKE_MINIMUM = (3, 13)
SETUPTOOLS_MINIMUM = (70, 1)  # the first with its own bdist_wheel


@dataclass(frozen=True)
class Need:
    """One thing that a build lacks: its name, what is wrong, what repairs it. ``pip`` names what pip could install."""

    name: str
    problem: str
    remedy: str
    pip: str = ""


@dataclass(frozen=True)
class Tool:
    """A program that was found."""

    path: Path
    version: str

    def __str__(self) -> str:
        return f"{self.version} ({self.path})"


def version_tuple(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``"3.25.1-rc2"`` -> ``(3, 25, 1)``. Works where ``packaging`` is missing."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def find_tool(names: tuple[str, ...], variable: str = "") -> Path | None:
    """The program named by an environment variable, else the first of ``names`` in this environment or on PATH."""
    chosen = os.environ.get(variable, "").strip() if variable else ""
    for name in (chosen,) if chosen else names:
        found = shutil.which(name, path=mpi.search_path())
        if found:
            return Path(found)
    return None


def find_compiler(names: tuple[str, ...], variable: str, label: str, package: str) -> Tool | Need:
    """A C or C++ compiler that answers to its version."""
    path = find_tool(names, variable)
    if path is None:
        chosen = os.environ.get(variable, "")
        where = f"{variable}={chosen} is not a program" if chosen else f"none of {', '.join(names)} on PATH"
        return Need(label, where, f"install it: apt install {package}, dnf install gcc-c++, or set {variable}")
    first = (ask([path, "--version"]).output.splitlines() or ["?"])[0]
    return Tool(path, first.strip())


def lacks_standard(compiler: Tool, standard: int) -> Need | None:
    """A ``Need`` where the compiler cannot compile C++ ``standard`` (17 for C++17)."""
    answer = ask([compiler.path, f"-std=c++{standard}", "-x", "c++", "-fsyntax-only", "-"], stdin="#include <string>\n")
    if answer.ok:
        return None
    said = (answer.output.strip().splitlines() or ["it failed"])[0]
    return Need(
        f"C++{standard}", f"{compiler} cannot compile it: {said}", "use GCC >= 9 or Clang >= 9; name it with CXX=…"
    )


def find_cmake() -> Tool | Need:
    """CMake >= 3.13, named by ``HOROVOD_CMAKE``, of this environment, or on PATH."""
    path = find_tool(("cmake", "cmake3"), "HOROVOD_CMAKE")
    if path is None:
        return Need("cmake", "not found in this environment or on PATH", "python -m pip install cmake", pip="cmake")
    found = re.search(r"cmake3? version (\S+)", ask([path, "--version"]).output)
    if found is None:
        return Need("cmake", f"{path} does not run", "python -m pip install --force-reinstall cmake", pip="cmake")
    if version_tuple(found[1]) < CMAKE_MINIMUM:
        wanted = ".".join(map(str, CMAKE_MINIMUM))
        return Need("cmake", f"{path} is {found[1]}, >= {wanted} is needed", "python -m pip install cmake", pip="cmake")
    return Tool(path, found[1])


def find_make() -> Tool | Need:
    """GNU make."""
    path = find_tool(("make", "gmake"))
    if path is None:
        return Need("make", "not on PATH", "install it: apt install make, dnf install make")
    return Tool(path, (ask([path, "--version"]).output.splitlines() or ["?"])[0].strip())


def python_needs() -> list[Need]:
    """What this interpreter lacks for a build without isolation."""
    needs = [_headers(), _setuptools(), _package("packaging"), _package("pip"), _externally_managed()]
    return [need for need in needs if need is not None]


def distribution_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str) -> Need | None:
    if distribution_version(name) is not None:
        return None
    remedy = "python -m ensurepip --upgrade" if name == "pip" else f"python -m pip install {name}"
    return Need(name, f"not installed for {sys.executable}", remedy, pip="" if name == "pip" else name)


def _setuptools() -> Need | None:
    version = distribution_version("setuptools")
    wanted = "setuptools>=" + ".".join(map(str, SETUPTOOLS_MINIMUM))
    remedy = f"python -m pip install '{wanted}'"
    if version is None:
        return Need(
            "setuptools", f"not installed for {sys.executable} (needed to build, not to run)", remedy, pip=wanted
        )
    if version_tuple(version) < SETUPTOOLS_MINIMUM and distribution_version("wheel") is None:
        return Need(
            "setuptools", f"{version} has no bdist_wheel of its own and wheel is not installed", remedy, pip=wanted
        )
    return None


def _headers() -> Need | None:
    folder = Path(sysconfig.get_path("include"))
    if (folder / "Python.h").is_file():
        return None
    major, minor = sys.version_info[:2]
    return Need(
        "Python headers",
        f"no Python.h in {folder}",
        f"apt install python{major}.{minor}-dev, dnf install python3-devel",
    )


def _externally_managed() -> Need | None:
    """A system Python that pip may not change (PEP 668) would refuse the finished wheel after minutes of building."""
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if sys.prefix != sys.base_prefix or not marker.is_file():
        return None
    return Need(
        "virtual environment", f"{sys.executable} belongs to the system", "python3 -m venv .venv, and use its python"
    )
