"""A failing rank ends its process at once, says who it is, and leaves alone what the script catches."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from hvdkit.abort import install_abort

PRELUDE = """
import atexit, sys
from hvdkit.abort import install_abort
atexit.register(lambda: print("exit handlers ran"))
install_abort(uses_mpi=False, rank=1, size={size})
"""


def run(body: str, size: int = 2) -> subprocess.CompletedProcess[str]:
    code = PRELUDE.format(size=size) + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("raise ValueError('bad batch')", 1, "ValueError: bad batch"),
        ("sys.exit(3)", 3, "sys.exit(3)"),
        ("sys.exit('no data')", 1, "sys.exit('no data')"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_f1_failure_is_named_and_final(body: str, status: int, reason: str) -> None:
    result = run(body)
    assert result.returncode == status
    assert "hvdkit [" in result.stderr and "rank 1 on" in result.stderr and reason in result.stderr
    assert "exit handlers ran" not in result.stdout  # they would wait for the other ranks


def test_traceback_is_still_shown() -> None:
    assert "Traceback (most recent call last)" in run("raise ValueError('bad batch')").stderr


@pytest.mark.parametrize("body", ["sys.exit(0)", "sys.exit()", "pass"])
def test_success_is_ordinary(body: str) -> None:
    result = run(body)
    assert result.returncode == 0 and result.stderr == "" and "exit handlers ran" in result.stdout


def test_caught_exit_is_left_alone() -> None:
    body = """
    try:
        sys.exit(3)
    except SystemExit as stop:
        print("caught", stop.code)
    """
    result = run(body)
    assert result.returncode == 0 and "caught 3" in result.stdout and "exit handlers ran" in result.stdout


def test_forked_child_does_not_end_the_job() -> None:
    body = """
    import os
    if os.fork() == 0:
        raise ValueError("worker trouble")
    print("child ended", os.waitstatus_to_exitcode(os.wait()[1]))
    """
    result = run(body)
    assert result.returncode == 0 and "ends the job" not in result.stderr and "child ended 1" in result.stdout


def test_one_process_is_ordinary_python() -> None:
    result = run("sys.exit(3)", size=1)
    assert result.returncode == 3 and result.stderr == "" and "exit handlers ran" in result.stdout


def test_one_process_installs_nothing() -> None:
    before = (sys.excepthook, sys.exit)
    install_abort(uses_mpi=False, rank=0, size=1)
    assert (sys.excepthook, sys.exit) == before
