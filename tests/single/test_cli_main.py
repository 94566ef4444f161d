"""The command line itself: help, unknown commands, errors as one line and an exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdkit.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]


def hvdkit(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hvdkit", *words], cwd=ROOT, capture_output=True, text=True)


def test_help_lists_every_command() -> None:
    answer = hvdkit("--help")
    assert answer.returncode == 0
    for name in COMMANDS:
        assert name in answer.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_has_help(name: str) -> None:
    command = cli.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None and command.help


def test_an_unknown_command_is_refused() -> None:
    answer = hvdkit("trian")
    assert answer.returncode == 2 and "trian" in answer.stderr


def test_an_error_is_a_message_and_an_exit_code_without_a_traceback() -> None:
    answer = hvdkit("run", "--hostfile", "/nowhere/hosts", "--", "true")
    assert answer.returncode == 2
    assert "/nowhere/hosts" in answer.stderr and "Traceback" not in answer.stderr
