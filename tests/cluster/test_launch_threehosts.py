"""Jobs across three hosts with their own names, addresses and sshd; slots 1, 2 and 1."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = """
import socket
try:
    import horovod.torch as hvd, torch
    def total(value): return hvd.allreduce(torch.tensor([float(value)]), op=hvd.Sum).item()
except ImportError:
    import horovod.tensorflow as hvd, tensorflow as tf
    def total(value): return float(hvd.allreduce(tf.constant([float(value)]), op=hvd.Sum)[0])
hvd.init()
numbers = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
print("job", hvd.rank(), socket.gethostname(), *numbers, total(hvd.rank()), flush=True)
"""
WAIT = """
import os, sys, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
print("ready", rank, flush=True)
if sys.argv[1] == "raise" and rank == 2:
    time.sleep(1)
    raise RuntimeError("boom")
time.sleep(200)
"""
needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")


class Job:
    """``hvdkit run`` on n1, over the three hosts."""

    def __init__(
        self, cluster: Any, environ: dict[str, str], folder: Path, script: str, *words: str, launcher: str = "mpirun"
    ) -> None:
        (folder / "hosts").write_text("n1 slots=1\nn2 slots=2  # two here\nn3 slots=1\n")
        self.script = folder / "script.py"
        self.script.write_text(script)
        self.cluster = cluster
        run = [sys.executable, "-m", "hvdkit", "run", "--hostfile", str(folder / "hosts"), "--launcher", launcher]
        self.process = subprocess.Popen(
            cluster.command("n1", *run, "--", "python", str(self.script), *words),
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        ready = 0
        while ready < 4:
            line = self.process.stdout.readline()
            assert line, "the job ended before its ranks were ready"
            ready += line.startswith("ready")

    def end(self, timeout_s: float) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out

    def left(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = self.cluster.jobs(str(self.script))
        return found


@pytest.fixture
def environ(clean_environ: Any) -> dict[str, str]:
    found: dict[str, str] = clean_environ()
    return found


@needs_horovod
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_horovod_across_hosts(cluster: Any, environ: dict[str, str], tmp_path: Path, launcher: str) -> None:
    job = Job(cluster, environ, tmp_path, TRAIN, launcher=launcher)
    code, out = job.end(150)
    assert code == 0, out
    lines = sorted(line[line.index("job ") :] for line in out.splitlines() if "job " in line)
    assert lines == ["job 0 n1 0 1 0 3 6.0", "job 1 n2 0 2 1 3 6.0", "job 2 n2 1 2 0 1 6.0", "job 3 n3 0 1 2 3 6.0"]


def test_f1_an_exception_on_another_host(cluster: Any, environ: dict[str, str], tmp_path: Path) -> None:
    job = Job(cluster, environ, tmp_path, WAIT, "raise")
    code, out = job.end(60)
    assert code == 1 and job.left() == {}
    last = out[out.rindex("hvdkit: rank") :]
    assert last.startswith("hvdkit: rank 2 on n2 ended with exit code 1") and last.rstrip().endswith(
        "| RuntimeError: boom"
    )


def test_f1_a_host_that_goes_away(cluster: Any, environ: dict[str, str], tmp_path: Path) -> None:
    job = Job(cluster, environ, tmp_path, WAIT, "wait")
    job.wait_until_ready()
    start = time.monotonic()
    with cluster.unplugged("n3"):
        code, out = job.end(60)
        while job.left() and time.monotonic() - start < 60:
            time.sleep(0.2)
        seconds = time.monotonic() - start
    assert code == 1 and "hvdkit: rank 3 on n3 was lost: its host cannot be reached" in out, out
    assert seconds < 30, "a process of the job was still there"


def test_an_interrupt_ends_every_host(cluster: Any, environ: dict[str, str], tmp_path: Path) -> None:
    job = Job(cluster, environ, tmp_path, WAIT, "wait")
    job.wait_until_ready()
    start = time.monotonic()
    for pid in cluster.pids("n1"):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if words[1:4] == ["-m", "hvdkit", "run"]:
            os.kill(pid, signal.SIGINT)
    code, out = job.end(30)
    assert code == 130 and "SIGINT" in out
    assert job.left() == {} and time.monotonic() - start < 30
