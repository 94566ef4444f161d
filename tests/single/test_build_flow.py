"""When nothing is to be done, and when something is: the decision of ``hvdkit install-horovod``."""

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit.errors import BuildError
from hvdkit.horovod_build import build, cache, edits, frameworks, install, mpi, probe, prove, recipe, stamp
from hvdkit.horovod_build.probe import Request
from hvdkit.horovod_build.process import Answer
from hvdkit.horovod_build.progress import PlainProgress
from hvdkit.horovod_build.stamp import Present, Stamp

STAMP = Stamp(
    horovod=edits.HOROVOD_VERSION,
    key="the-key",
    python="3.11.7",
    abi="cpython-311",
    machine="x86_64",
    libc="glibc 2.36",
    frameworks={"torch": "2.13.0", "tensorflow": "2.21.0"},
    compiler="g++ 12.2.0",
    cmake="4.4.5",
    mpi_family="openmpi",
    mpi_version="5.0.11",
    mpicxx="/venv/bin/mpicxx",
    gpu="none",
    controllers=("mpi", "gloo"),
    edits=("cxx-standard-root",),
    recipe=edits.digest(edits.EDITS),
)
NOW = Present("3.11.7", "cpython-311", "x86_64", dict(STAMP.frameworks), "openmpi", "5.0.11")
BOTH = ("torch", "tensorflow")


class Installed:
    """What is installed, as the decision sees it."""

    def __init__(self) -> None:
        self.stamp: Stamp | None = STAMP
        self.now = NOW
        self.mpi: mpi.Mpi | mpi.MpiProblem = mpi.Mpi("openmpi", "5.0.11", Path("/m/mpicxx"), Path("/m/mpirun"))
        self.proof: dict[str, object] = {"key": "the-key"}
        self.whole = True
        self.needs: list[str] = []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Installed:
    state = Installed()
    monkeypatch.setattr(stamp, "read_stamp", lambda: state.stamp)
    monkeypatch.setattr(stamp, "present", lambda: state.now)
    monkeypatch.setattr(stamp, "read_proof", lambda: state.proof)
    monkeypatch.setattr(mpi, "find", lambda choice: state.mpi)
    monkeypatch.setattr(install, "is_whole", lambda: state.whole)
    monkeypatch.setattr(build.metadata, "requires", lambda name: state.needs)
    monkeypatch.setattr(frameworks, "installed", lambda: dict(STAMP.frameworks))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return state


def why(request: Request | None = None, names: tuple[str, ...] = BOTH) -> str:
    return build.why_not_satisfied(request or Request(), names)


def test_nothing_to_do(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why() == why(names=("torch",)) == why(Request(gpu="none")) == ""
    monkeypatch.setattr(probe, "probe", lambda request: pytest.fail("nothing had to be looked at"))
    said: list[str] = []
    build.install_horovod(Request(), said.append)
    assert "nothing to do" in said[0] and "torch 2.13.0" in said[0] and "mpi, gloo" in said[0]


def test_a_mended_minor_version_of_python_does_not_matter(installed: Installed) -> None:
    installed.now = replace(NOW, python="3.11.9")
    assert why() == ""


def test_reasons(installed: Installed) -> None:
    installed.now = replace(NOW, frameworks={**NOW.frameworks, "torch": "2.14.0"})
    assert "torch 2.13.0" in why() and "torch 2.14.0" in why()
    installed.now = NOW
    assert "--gpu none" in why(Request(gpu="nccl"))
    assert "with openmpi 5.0.11, wanted is no MPI" in why(Request(mpi="none"))
    installed.mpi = mpi.Mpi("mpich", "4.3.2", Path("/m/mpicxx"), Path("/m/mpirun"))
    assert "with openmpi 5.0.11, wanted is mpich 4.3.2" in why()
    installed.mpi = mpi.MpiProblem("no mpicxx", "")
    assert why() == "no mpicxx"
    installed.mpi = mpi.Mpi("openmpi", "5.0.11", Path("/m/mpicxx"), Path("/m/mpirun"))
    installed.needs = ["no_such_package_anywhere>=1", "nor_this; extra == 'spark'"]
    assert why() == "the installed Horovod needs no_such_package_anywhere>=1"
    installed.whole = False
    assert "missing or changed" in why()
    installed.proof = {}
    assert "not been proven" in why()
    installed.stamp = replace(STAMP, recipe="older")
    assert "another recipe" in why()
    installed.stamp = replace(STAMP, frameworks={"torch": "2.13.0"})
    assert "without tensorflow" in why()
    installed.stamp = None
    assert "Horovod" in why()


def test_a_damaged_stamp_is_a_reason_not_an_end(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged() -> Stamp | None:
        return Stamp.from_json("{")

    monkeypatch.setattr(stamp, "read_stamp", damaged)
    assert "cannot be read" in why()


def test_force_builds_whatever_is_installed(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(request: Request) -> None:
        raise BuildError("looked")

    monkeypatch.setattr(probe, "probe", stop)
    said: list[str] = []
    with pytest.raises(BuildError, match="looked"):
        build.install_horovod(Request(force=True), said.append)
    assert said == ["installing Horovod: --force"]


def test_a_failed_proof_is_an_error_and_leaves_the_cache_alone(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = probe.Facts((), None, None, None, None, None, None, 1, 1, (), ())  # type: ignore[arg-type]
    plan = recipe.Plan(facts, (), {}, (), 1, "the-key", {})
    kept = cache.wheel_folder("the-key")
    kept.mkdir(parents=True)
    with zipfile.ZipFile(kept / "horovod.whl", "w") as archive:
        archive.writestr(f"horovod/{stamp.STAMP_FILE}", STAMP.to_json())
    installs: list[Path] = []

    def fail(built: Path, aside: Path, prove: object) -> None:
        installs.append(built)
        raise BuildError("the sum is 2")

    monkeypatch.setattr(probe, "probe", lambda request: facts)
    monkeypatch.setattr(recipe, "make_plan", lambda facts: plan)
    monkeypatch.setattr(recipe, "describe", lambda plan: "")
    monkeypatch.setattr(install, "install", fail)
    installed.whole = False
    for _ in range(2):
        with pytest.raises(BuildError, match=r"the sum is 2\n.*the environment is as it was"):
            build.install_horovod(Request(), lambda text: None)
    assert cache.cached_wheel("the-key") == kept / "horovod.whl"
    assert len(installs) == 2 and not any(path.exists() for path in installs)


def answers(monkeypatch: pytest.MonkeyPatch, code: int, output: str) -> None:
    monkeypatch.setattr(prove, "ask", lambda argv, env, timeout_s: Answer(code, output))


GOOD = "noise\n[1,0]<stdout>:hvdkit-proof:0 of 2: 3\n[1,1]<stdout>:hvdkit-proof:1 of 2: 3\n"


def test_two_threes_are_a_proof_with_any_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, 0, GOOD)
    prove.check_allreduce("torch", "gloo", None)


@pytest.mark.parametrize(
    ("code", "output", "says"),
    [
        (1, GOOD, "exit code 1"),
        (0, GOOD.replace("1 of 2: 3", "1 of 2: 1.5"), "1 of 2: 1.5"),
        (0, "hvdkit-proof:0 of 1: 1\nhvdkit-proof:0 of 1: 1\n", "0 of 1: 1"),
        (0, GOOD.splitlines()[1], "0 of 2: 3"),
        (124, "stalled", "no result"),
    ],
)
def test_anything_else_is_none(monkeypatch: pytest.MonkeyPatch, code: int, output: str, says: str) -> None:
    answers(monkeypatch, code, output)
    with pytest.raises(BuildError, match=r"sum of \[rank \+ 1\] on 2 ranks must be 3") as caught:
        prove.check_allreduce("torch", "mpi", Path("/m/mpirun"))
    assert says in str(caught.value)


def test_a5_a_library_that_is_not_there_or_lacks_a_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, 1, "ImportError: Extension horovod.torch has not been built")
    with pytest.raises(BuildError, match=r"cannot be imported:\n.*has not been built"):
        prove.check_import("torch", ("gloo",))
    answers(monkeypatch, 0, 'hvdkit-proof:{"mpi": false, "gloo": true, "nccl": false}')
    prove.check_import("torch", ("gloo",))
    with pytest.raises(BuildError, match="built without mpi"):
        prove.check_import("torch", ("mpi", "gloo"))


def test_the_proof_runs_every_framework_under_every_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, ...]] = []
    monkeypatch.setattr(prove, "check_import", lambda name, controllers: runs.append((name,)))
    monkeypatch.setattr(prove, "check_allreduce", lambda name, controller, launcher: runs.append((name, controller)))
    prove.prove(STAMP, Path("/m/mpirun"), PlainProgress())
    assert runs == [(n, *c) for n in BOTH for c in ((), ("mpi",), ("gloo",))]


def test_the_proof_starts_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "HOROVOD_CONTROLLER"):
        monkeypatch.setenv(name, "7")
    environment = prove.proof_environment("gloo")
    assert not {"HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"} & set(environment)
    assert environment["HOROVOD_CONTROLLER"] == "gloo"
    assert "HOROVOD_CONTROLLER" not in prove.proof_environment()
