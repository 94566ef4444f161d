"""An interrupted demo leaves nothing behind: no rank, no launcher, no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def ranks_of(output: Path) -> list[int]:
    """Processes that have the demo's output folder on their command line, the demo itself left out."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(output) in word for word in words) and "examples/demo.py" not in words:
            found.append(process.info["pid"])
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_ends_its_ranks(
    number: signal.Signals, clean_environ: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    command = [sys.executable, "examples/demo.py", "--with", "torch", "--output", str(tmp_path / "out")]
    demo = subprocess.Popen(
        command, cwd=ROOT, env=clean_environ(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while len(ranks_of(tmp_path)) < 3 and time.monotonic() < deadline:  # hvdkit run, and ranks
            time.sleep(0.2)
        os.kill(demo.pid, number)
        out, _ = demo.communicate(timeout=60)
    finally:
        demo.kill()
    assert demo.returncode == 128 + number
    assert "demo.py" not in out, "no traceback of the demo's own"
    deadline = time.monotonic() + 15
    while (left := ranks_of(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
