"""From what was found to what will be done: edits, variables, jobs and the cache key. Nothing here has an effect."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import hvdkit
from hvdkit.horovod_build import cache, edits, gpu, mpi, probe
from hvdkit.horovod_build.edits import HOROVOD_VERSION, Edit, Situation
from hvdkit.horovod_build.frameworks import DISTRIBUTIONS, HOROVOD_NAMES

# A translation unit that includes torch's or TensorFlow's headers peaks near this with -O3.
BYTES_PER_JOB = 2 * probe.GIB

# Variables of the caller that would change the build behind our back, and those that may.
_DROPPED = (
    "MAKEFLAGS",
    "MFLAGS",
    "MAKELEVEL",
    "GNUMAKEFLAGS",
    "CMAKE_BUILD_PARALLEL_LEVEL",
    "CMAKE_GENERATOR",
    "DESTDIR",
)
_KEPT_HOROVOD = ("HOROVOD_BUILD_ARCH_FLAGS", "HOROVOD_BUILD_CUDA_CC_LIST", "HOROVOD_CUDA_HOME")
_COMPILER_VARIABLES = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "CUDAFLAGS", "HOROVOD_BUILD_CUDA_CC_LIST")


@dataclass(frozen=True)
class Plan:
    """One build, decided. ``set_variables`` go on top of the caller's environment, less ``dropped_variables``."""

    facts: probe.Facts
    edits: tuple[Edit, ...]
    set_variables: dict[str, str]
    dropped_variables: tuple[str, ...]
    jobs: int
    key: str
    key_facts: dict[str, object]

    @property
    def controllers(self) -> tuple[str, ...]:
        return ("mpi", "gloo") if self.facts.mpi else ("gloo",)

    @property
    def wheel(self) -> Path | None:
        return cache.cached_wheel(self.key)

    def environment(self) -> dict[str, str]:
        """The whole environment of the build."""
        kept = {name: value for name, value in os.environ.items() if name not in self.dropped_variables}
        return {**kept, **self.set_variables}


def make_plan(facts: probe.Facts) -> Plan:
    """Decide a build from ``facts`` with no needs left open."""
    assert not facts.needs
    standards = {f.name: f.cxx_standard for f in facts.frameworks}
    situation = Situation(
        standards.get("torch", 0), standards.get("tensorflow", 0), all(f.xla_headers for f in facts.frameworks)
    )
    chosen = edits.situation_edits(situation)
    number = jobs(facts.cores, facts.memory_bytes)
    variables = build_variables(facts, number)
    key_facts = make_key_facts(facts, chosen, variables)
    return Plan(facts, chosen, variables, dropped_variables(), number, make_key(facts, key_facts), key_facts)


def jobs(cores: int, memory_bytes: int) -> int:
    """Compilers to run at once: one a core, but no more than memory holds."""
    return max(1, min(cores, memory_bytes // BYTES_PER_JOB))


def dropped_variables() -> tuple[str, ...]:
    """Names to take out of the caller's environment: make's own, and the HOROVOD_ switches not asked for here."""
    horovod = [name for name in os.environ if name.startswith("HOROVOD_") and name not in _KEPT_HOROVOD]
    return tuple(sorted({*_DROPPED, *horovod} & set(os.environ)))


def build_variables(facts: probe.Facts, number_of_jobs: int) -> dict[str, str]:
    """Everything the build's environment gets."""
    assert facts.compiler and facts.c_compiler and facts.cmake
    named = {f.name for f in facts.frameworks}
    variables = {
        "PATH": mpi.search_path(),
        "CC": str(facts.c_compiler.path),
        "CXX": str(facts.compiler.path),
        "MAKEFLAGS": f"-j{number_of_jobs}",
        "CMAKE_GENERATOR": "Unix Makefiles",
        "HOROVOD_CMAKE": str(facts.cmake.path),
        "HOROVOD_BUILD_ARCH_FLAGS": os.environ.get(
            "HOROVOD_BUILD_ARCH_FLAGS", " ".join(f"-m{flag}" for flag in facts.cpu_flags)
        ),
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    for name in DISTRIBUTIONS:
        variables[f"HOROVOD_{'WITH' if name in named else 'WITHOUT'}_{HOROVOD_NAMES[name]}"] = "1"
    variables.update(_mpi_variables(facts.mpi))
    variables.update(facts.gpu.environment)
    return variables


def _mpi_variables(found: mpi.Mpi | None) -> dict[str, str]:
    if found is None:
        return {"HOROVOD_WITHOUT_MPI": "1"}
    # mpicc lies beside mpicxx in every family; Gloo's own CMake file asks for it.
    return {
        "HOROVOD_WITH_MPI": "1",
        "HVDKIT_MPICXX": str(found.mpicxx),
        "HVDKIT_MPICC": str(found.mpicxx.with_name("mpicc")),
        "HVDKIT_RPATH": ";".join(library_path(found)),
    }


def library_path(found: mpi.Mpi) -> list[str]:
    """Where Horovod's libraries look for MPI: relative to themselves inside this environment, so that a wheel from the
    cache serves another environment with the same MPI; absolute elsewhere."""
    prefix, site = Path(sys.prefix).resolve(), Path(sysconfig.get_path("platlib"))
    paths = []
    for folder in found.library_folders:
        if folder.is_relative_to(prefix) and os.access(site, os.W_OK):
            paths.append("$ORIGIN/" + os.path.relpath(folder, site.resolve() / "horovod" / "torch"))
        else:
            paths.append(str(folder))
    return paths


def make_key_facts(facts: probe.Facts, chosen: tuple[Edit, ...], variables: dict[str, str]) -> dict[str, object]:
    """All that the finished wheel depends on. Paths count only where they end up in it."""
    assert facts.compiler
    return {
        "horovod": HOROVOD_VERSION,
        "edits": edits.digest(chosen),
        **probe.platform_facts(),
        "frameworks": {f.name: f.version for f in facts.frameworks},
        "mpi": str(mpi.Banner(facts.mpi.family, facts.mpi.version)) if facts.mpi else "none",
        "mpi_path": variables.get("HVDKIT_RPATH", ""),
        "compiler": facts.compiler.version,
        "arch_flags": variables["HOROVOD_BUILD_ARCH_FLAGS"],
        "gpu": {"mode": facts.gpu.mode, **facts.gpu.environment},
        "flags": {name: os.environ[name] for name in _COMPILER_VARIABLES if os.environ.get(name)},
    }


def make_key(facts: probe.Facts, key_facts: dict[str, object]) -> str:
    """Folder name of the wheel: what a person looks for, then a hash over everything."""
    words = [f"horovod-{HOROVOD_VERSION}", f"cp{sys.version_info[0]}{sys.version_info[1]}"]
    words += [f"{f.name}-{f.version.replace('+', '.')}" for f in facts.frameworks]
    words.append(f"{facts.mpi.family}-{facts.mpi.version}" if facts.mpi else "gloo")
    words += [gpu.NCCL] if facts.gpu.mode == gpu.NCCL else []
    text = json.dumps(key_facts, sort_keys=True)
    return "-".join([*words, hashlib.sha256(text.encode()).hexdigest()[:12]])


def describe(plan: Plan) -> str:
    """The plan for a person: what was found, the edits, the variables, the jobs, the cache."""
    f = plan.facts
    lines = [
        f"Horovod {HOROVOD_VERSION} for Python {probe.platform_facts()['python']} in {sys.prefix}",
        f"  by hvdkit    {hvdkit.__version__}",
        f"  frameworks   {', '.join(f'{x.name} {x.version} (C++{x.cxx_standard})' for x in f.frameworks)}",
        f"  MPI          {f.mpi or 'none'}",
        f"  controllers  {', '.join(plan.controllers)}",
        f"  GPU          {f.gpu.mode}",
        f"  compilers    {f.compiler}; {f.c_compiler}",
        f"  cmake        {f.cmake}",
        f"  jobs         {plan.jobs} ({f.cores} cores, {f.memory_bytes / probe.GIB:.1f} GiB of memory free)",
        f"  cache key    {plan.key}",
        f"  cached       {plan.wheel or 'no'}",
        "  edits",
    ]
    lines += [f"    {edit.name} ({edit.file}; for {edit.versions})\n      {edit.why}" for edit in plan.edits]
    lines += ["  variables"] + [f"    {n}={v}" for n, v in sorted(plan.set_variables.items()) if n != "PATH"]
    lines += [f"    {name} is taken out" for name in plan.dropped_variables]
    return "\n".join(lines)
