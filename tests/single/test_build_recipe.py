"""The plan: how many jobs, which variables, and a cache key that sees all that a wheel depends on."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit.horovod_build import edits, probe, recipe
from hvdkit.horovod_build.frameworks import Framework
from hvdkit.horovod_build.gpu import Gpu
from hvdkit.horovod_build.mpi import Mpi
from hvdkit.horovod_build.probe import GIB, Facts
from hvdkit.horovod_build.toolchain import Tool

OPENMPI = Mpi("openmpi", "5.0.11", Path("/opt/mpi/bin/mpicxx"), Path("/opt/mpi/bin/mpirun"), (Path("/opt/mpi/lib"),))
FACTS = Facts(
    frameworks=(Framework("torch", "2.13.0+cpu", 17), Framework("tensorflow", "2.21.0", 17, xla_headers=False)),
    compiler=Tool(Path("/usr/bin/g++"), "g++ 12.2.0"),
    c_compiler=Tool(Path("/usr/bin/gcc"), "gcc 12.2.0"),
    cmake=Tool(Path("/usr/bin/cmake"), "4.4.5"),
    make=Tool(Path("/usr/bin/make"), "GNU Make 4.3"),
    mpi=OPENMPI,
    gpu=Gpu("none"),
    cores=8,
    memory_bytes=64 * GIB,
    cpu_flags=("avx", "fma"),
    needs=(),
)
TORCH = FACTS.frameworks[0]


@given(st.integers(1, 512), st.integers(0, 1024 * GIB))
def test_jobs_never_exceed_cores_or_memory_and_are_at_least_one(cores: int, memory: int) -> None:
    jobs = recipe.jobs(cores, memory)
    assert 1 <= jobs <= cores
    assert jobs == 1 or jobs * recipe.BYTES_PER_JOB <= memory
    assert jobs == cores or (jobs + 1) * recipe.BYTES_PER_JOB > memory


CHANGES: dict[str, Facts] = {
    "framework version": replace(FACTS, frameworks=(replace(TORCH, version="2.14.0"), FACTS.frameworks[1])),
    "one framework": replace(FACTS, frameworks=(TORCH,)),
    "standard": replace(FACTS, frameworks=(replace(TORCH, cxx_standard=20), FACTS.frameworks[1])),
    "compiler": replace(FACTS, compiler=Tool(Path("/usr/bin/g++"), "g++ 13.1.0")),
    "no mpi": replace(FACTS, mpi=None),
    "mpi version": replace(FACTS, mpi=replace(OPENMPI, version="5.0.12")),
    "mpi family": replace(FACTS, mpi=replace(OPENMPI, family="mpich")),
    "mpi path": replace(FACTS, mpi=replace(OPENMPI, library_folders=(Path("/opt/other/lib"),))),
    "gpu": replace(FACTS, gpu=Gpu("nccl", {"HOROVOD_GPU_OPERATIONS": "NCCL"})),
    "cpu": replace(FACTS, cpu_flags=("avx",)),
}
SAME: dict[str, Facts] = {
    "jobs": replace(FACTS, cores=2, memory_bytes=4 * GIB),
    "cmake": replace(FACTS, cmake=Tool(Path("/elsewhere/cmake"), "3.25.1")),
    "folder of the compiler": replace(FACTS, compiler=Tool(Path("/elsewhere/g++"), "g++ 12.2.0")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_key_changes_with(name: str) -> None:
    assert recipe.make_plan(CHANGES[name]).key != recipe.make_plan(FACTS).key


@pytest.mark.parametrize("name", SAME)
def test_the_key_does_not_change_with(name: str) -> None:
    assert recipe.make_plan(SAME[name]).key == recipe.make_plan(FACTS).key


def test_every_changed_key_is_different() -> None:
    assert len({recipe.make_plan(facts).key for facts in CHANGES.values()}) == len(CHANGES)


@pytest.mark.parametrize("variable", ["CXXFLAGS", "LDFLAGS", "HOROVOD_BUILD_ARCH_FLAGS"])
def test_the_key_changes_with_the_users_flags(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    before = recipe.make_plan(FACTS).key
    monkeypatch.setenv(variable, "-march=native")
    assert recipe.make_plan(FACTS).key != before


def test_the_key_changes_with_the_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe.make_plan(FACTS).key
    changed = replace(edits.EDITS[4], new=edits.EDITS[4].new + "# more")
    monkeypatch.setattr(edits.situation_edits, "__defaults__", ((*edits.EDITS[:4], changed),))
    assert recipe.make_plan(FACTS).key != before


def test_the_key_changes_with_the_interpreter_and_the_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = recipe.make_plan(FACTS).key, probe.platform_facts()
    keys = {before}
    for name in now:
        monkeypatch.setattr(probe, "platform_facts", lambda name=name: {**now, name: "other"})
        keys.add(recipe.make_plan(FACTS).key)
    assert len(keys) == 1 + len(now)


def test_the_build_gets_exactly_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAKEFLAGS", "w -j16 --jobserver-auth=3,4")
    monkeypatch.setenv("HOROVOD_WITHOUT_GLOO", "1")
    monkeypatch.setenv("HOROVOD_WITHOUT_PYTORCH", "1")
    monkeypatch.setenv("CMAKE_GENERATOR", "Ninja")
    plan = recipe.make_plan(replace(FACTS, frameworks=(TORCH,), cores=3))
    environment = plan.environment()
    assert environment["MAKEFLAGS"] == "-j3"
    assert environment["CMAKE_GENERATOR"] == "Unix Makefiles"
    assert environment["HOROVOD_WITH_PYTORCH"] == environment["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert environment["HOROVOD_WITH_GLOO"] == environment["HOROVOD_WITH_MPI"] == "1"
    assert not {"HOROVOD_WITHOUT_GLOO", "HOROVOD_WITHOUT_PYTORCH", "HOROVOD_WITH_TENSORFLOW"} & set(environment)
    assert environment["HVDKIT_MPICXX"] == "/opt/mpi/bin/mpicxx"
    assert environment["HOROVOD_BUILD_ARCH_FLAGS"] == "-mavx -mfma"
    assert plan.controllers == ("mpi", "gloo")


def test_without_mpi() -> None:
    plan = recipe.make_plan(replace(FACTS, mpi=None))
    assert plan.environment()["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in plan.environment()
    assert plan.controllers == ("gloo",)


def test_gpu_variables_reach_the_build() -> None:
    chosen = Gpu("nccl", {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": "/nccl"})
    environment = recipe.make_plan(replace(FACTS, gpu=chosen)).environment()
    assert (environment["HOROVOD_GPU_OPERATIONS"], environment["HOROVOD_NCCL_HOME"]) == ("NCCL", "/nccl")


def test_the_library_path_is_relative_inside_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    monkeypatch.setattr(recipe.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(recipe.sysconfig, "get_path", lambda name: str(site))
    inside = replace(OPENMPI, library_folders=(tmp_path / "lib", Path("/opt/mpi/lib")))
    assert recipe.library_path(inside) == ["$ORIGIN/../../../..", "/opt/mpi/lib"]


def test_the_plan_is_described() -> None:
    text = recipe.describe(recipe.make_plan(FACTS))
    for edit in recipe.make_plan(FACTS).edits:
        assert edit.name in text and edit.why in text and edit.versions in text
    assert "8 cores, 64.0 GiB" in text
