"""Looks at the user's command before anything starts: which interpreter, and whether the script is there."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hvdkit.errors import LaunchError, UsageError

_PYTHON = re.compile(r"python(?:3(?:\.[0-9]+)?)?\Z")
# Options of python that take the next word.
_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def resolve_command(command: Sequence[str]) -> tuple[str, ...]:
    """The command with its program found.

    ``python`` or ``python3`` as the first word is the interpreter that runs hvdkit, so that a job uses the environment
    it was started from even where PATH says otherwise; a path to an interpreter stays as it is.

    Raises:
        UsageError: no command.
        LaunchError: the program or the Python script does not exist.
    """
    if not command:
        raise UsageError("no command was given; write it after `--`, e.g. hvdkit run -np 2 -- python train.py")
    if any("\0" in word for word in command):
        raise UsageError("the command has a NUL character in it")
    program = command[0]
    if program in ("python", "python3", f"python3.{sys.version_info[1]}"):
        found: str | None = sys.executable
    elif "/" in program:
        found = program
    else:
        found = shutil.which(program)
    _check_program(program, found)
    if _PYTHON.match(Path(program).name):
        _check_script(command)
    assert found is not None
    return (found, *command[1:])


def _check_program(program: str, found: str | None) -> None:
    if found is not None and shutil.which(found):
        return
    if program.endswith(".py"):
        what = "is not executable" if Path(program).is_file() else "does not exist"
        raise LaunchError(f"{program} {what}; to run a Python script write `-- python {program}`.")
    raise LaunchError(
        f"the program {program!r} was not found{'' if '/' in program else ' on PATH'}; nothing was started."
    )


def _check_script(command: Sequence[str]) -> None:
    """The script is python's first word that is no option; ``-m`` and ``-c`` have none."""
    words = iter(command[1:])
    for word in words:
        if word in _WITH_VALUE:
            next(words, None)
        elif word.startswith("-"):
            if word == "-" or (not word.startswith("--") and ("m" in word or "c" in word)):
                return
        elif not Path(word).exists():
            raise LaunchError(f"the script {word!r} does not exist in {Path.cwd()}; nothing was started.")
        else:
            return
