"""Runs other programs: short questions with a time limit, long builds line by line. Never through a shell."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Answer:
    """What a program said. ``code`` is its exit code; 127 where it could not be started, 124 where it took too long."""

    code: int
    output: str

    @property
    def ok(self) -> bool:
        return self.code == 0


def ask(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
    timeout_s: float = 60,
) -> Answer:
    """Run ``argv``, feed it ``stdin`` and return what it wrote to both streams. Raises nothing of its own.

    The program gets a session of its own and dies with everything it started when its time is over.
    """
    try:
        child = subprocess.Popen(
            [str(a) for a in argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        return Answer(127, str(error))
    try:
        raw, _ = child.communicate(stdin.encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(child)
        raw, _ = child.communicate()
        return Answer(124, raw.decode(errors="replace") + f"\n(stopped after {timeout_s:g} s)")
    except BaseException:
        _kill(child)
        raise
    return Answer(child.returncode, raw.decode(errors="replace"))


def stream(argv: Sequence[str | Path], *, env: Mapping[str, str], cwd: Path, on_line: Callable[[str], None]) -> int:
    """Run ``argv``, hand over every line of its output as it comes, and return the exit code.

    The child's standard input is a pipe that closes when this process dies, however it dies: a child that watches it
    can end its own children (see ``wheel.DRIVER``). On an exception here the child's whole session is killed.
    """
    child = subprocess.Popen(
        [str(a) for a in argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(env),
        cwd=cwd,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        for raw in child.stdout:
            on_line(raw.decode(errors="replace").rstrip("\n"))
        return child.wait()
    except BaseException:
        _kill(child)
        child.wait()
        raise


def _kill(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        child.kill()
