"""The stamp: written into the wheel, read without importing Horovod, compared with what runs now (case A7)."""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hvdkit.errors import BuildError
from hvdkit.horovod_build import mpi, stamp, wheel
from hvdkit.horovod_build.stamp import Mismatch, Present, Stamp

STAMP = Stamp(
    horovod="0.28.1",
    key="horovod-0.28.1-abc",
    python="3.11.7",
    abi="cpython-311-x86_64-linux-gnu",
    machine="x86_64",
    libc="glibc 2.36",
    frameworks={"torch": "2.13.0+cpu", "tensorflow": "2.21.0"},
    compiler="g++ 12.2.0",
    cmake="4.4.5",
    mpi_family="openmpi",
    mpi_version="5.0.11",
    mpicxx="/venv/bin/mpicxx",
    gpu="none",
    controllers=("mpi", "gloo"),
    edits=("cxx-standard-root",),
    hvdkit="0.1.0",
)
NOW = Present("3.11.9", STAMP.abi, "x86_64", dict(STAMP.frameworks), "openmpi", "5.0.11")


def test_round_trip() -> None:
    assert Stamp.from_json(STAMP.to_json()) == STAMP


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"horovod": "0.28.1"}'])
def test_a_damaged_stamp_says_what_to_do(text: str) -> None:
    with pytest.raises(BuildError, match=r"stamp of the installed Horovod cannot be read.*\n.*--force"):
        Stamp.from_json(text)


def test_a_stamp_of_a_newer_hvdkit_is_read() -> None:
    assert Stamp.from_json(json.dumps({**json.loads(STAMP.to_json()), "colour": "blue"})) == STAMP


def test_the_same_is_no_mismatch() -> None:
    assert stamp.compare(STAMP, NOW) == []


def one(built: Stamp, now: Present) -> Mismatch:
    (found,) = stamp.compare(built, now)
    return found


@pytest.mark.parametrize("name", ["torch", "tensorflow"])
def test_a7_another_framework_version_shows_both(name: str) -> None:
    found = one(STAMP, replace(NOW, frameworks={**NOW.frameworks, name: "9.9"}))
    assert found.fatal
    assert f"{name} {STAMP.frameworks[name]}" in str(found) and f"{name} 9.9" in str(found)
    assert "hvdkit install-horovod" in str(found)


def test_a7_a_framework_that_is_gone() -> None:
    assert one(STAMP, replace(NOW, frameworks={"torch": "2.13.0+cpu"})).now == "no tensorflow"


def test_a7_another_interpreter() -> None:
    found = one(STAMP, replace(NOW, python="3.12.1", abi="cpython-312-x86_64-linux-gnu"))
    assert (found.what, found.fatal) == ("Python", True)
    assert "3.11.7" in found.built and "3.12.1" in found.now


@pytest.mark.parametrize(
    ("family", "version", "fatal"),
    [("openmpi", "5.0.10", False), ("openmpi", "4.1.4", True), ("mpich", "5.0.11", True), ("unknown", "", True)],
)
def test_the_mpi_of_build_and_launch_are_compared(family: str, version: str, fatal: bool) -> None:
    found = one(STAMP, replace(NOW, mpi_family=family, mpi_version=version))
    assert found.fatal is fatal
    assert found.built == "openmpi 5.0.11" and found.now == f"{family} {version}".strip()


def test_no_launcher_is_fatal_only_without_gloo() -> None:
    gone = replace(NOW, mpi_family="", mpi_version="")
    assert not one(STAMP, gone).fatal
    assert one(replace(STAMP, controllers=("mpi",)), gone).fatal


def test_a_build_without_mpi_needs_none() -> None:
    gloo = replace(STAMP, mpi_family="", mpi_version="", mpicxx="", controllers=("gloo",))
    assert stamp.compare(gloo, replace(NOW, mpi_family="openmpi", mpi_version="4.1.4")) == []


def make_package(folder: Path) -> None:
    """A Horovod that cannot be imported, with a stamp in it."""
    (folder / "horovod").mkdir()
    (folder / "horovod" / "__init__.py").write_text("raise SystemError('imported')\n")
    (folder / "horovod" / stamp.STAMP_FILE).write_text(STAMP.to_json())


def test_the_stamp_is_read_without_importing_anything(tmp_path: Path) -> None:
    make_package(tmp_path)
    script = (
        "import sys; from hvdkit.horovod_build import stamp; print(stamp.read_stamp().key); stamp.present();"
        "print(sorted({'horovod', 'torch', 'tensorflow', 'numpy', 'rich'} & set(sys.modules)))"
    )
    path = f"{tmp_path}:{Path(stamp.__file__).parents[2]}"
    argv = [sys.executable, "-c", script]
    said = subprocess.run(
        argv, env={"PYTHONPATH": path, "PATH": "/nowhere"}, capture_output=True, text=True, check=True
    )
    assert said.stdout.splitlines() == [STAMP.key, "[]"]


def test_no_horovod_no_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamp.importlib.util, "find_spec", lambda name: None)
    assert stamp.package_folder() is None and stamp.read_stamp() is None


def test_present_asks_the_launcher_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    mpirun.chmod(0o755)
    monkeypatch.setattr(mpi, "search_path", lambda: str(tmp_path))
    now = stamp.present({"torch": "1.0"})
    assert (now.mpi_family, now.mpi_version, now.frameworks) == ("openmpi", "4.1.4", {"torch": "1.0"})
    mpirun.unlink()
    assert stamp.present({}).mpi_family == ""


def test_the_stamp_goes_into_the_wheel_and_its_record(tmp_path: Path) -> None:
    path = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/__init__.py", "a = 1\n")
        archive.writestr("x-1.dist-info/RECORD", "x/__init__.py,,\nx-1.dist-info/RECORD,,\n")
    wheel.add_file(path, f"x/{stamp.STAMP_FILE}", STAMP.to_json())
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert Stamp.from_json(archive.read(f"x/{stamp.STAMP_FILE}").decode()) == STAMP
        record = archive.read("x-1.dist-info/RECORD").decode().splitlines()
        assert archive.read("x/__init__.py") == b"a = 1\n"
        assert len(archive.namelist()) == 3
    assert [line.split(",")[0] for line in record] == [
        "x/__init__.py",
        "x-1.dist-info/RECORD",
        "x/hvdkit_stamp.json",
    ]
    assert record[-1].endswith(f",{len(STAMP.to_json())}")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_proof_of_rubbish_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distribution:
        def __init__(self, text: str | None) -> None:
            self.text = text

        def read_text(self, name: str) -> str | None:
            return self.text

    for text, expected in [(json.dumps({"key": "k"}), {"key": "k"}), ("{", {}), ("[]", {}), (None, {})]:
        monkeypatch.setattr(stamp.metadata, "distribution", lambda name, text=text: Distribution(text))
        assert stamp.read_proof() == expected
