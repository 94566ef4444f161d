"""`hvdkit run` with the launchers that are installed, on this machine: real mpirun, real horovodrun, real Horovod."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest

# One framework per process: torch where Horovod has it, else TensorFlow.
ALLREDUCE = """
import os, sys
try:
    import horovod.torch as hvd, torch
    def total(value): return hvd.allreduce(torch.tensor([float(value)]), op=hvd.Sum).item()
except ImportError:
    import horovod.tensorflow as hvd, tensorflow as tf
    def total(value): return float(hvd.allreduce(tf.constant([float(value)]), op=hvd.Sum)[0])
hvd.init()
print("ranks", hvd.rank(), hvd.size(), hvd.local_rank(), total(hvd.rank() + 1), flush=True)
print("words", ascii(sys.argv[2:]), ascii(os.environ["V"]), flush=True)
if sys.argv[1] == "fail" and hvd.rank() == 1:
    raise RuntimeError("rank one gives up")
for step in range(100):
    total(step)
"""
VALUE = "a b'c"
PLAIN = "import os, sys, time; rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("job") / "allreduce.py"
    path.write_text(ALLREDUCE)
    return str(path)


def is_open_mpi() -> bool:
    from hvdkit.launch.mpi import find_mpirun

    return find_mpirun().family == "openmpi"


needs_horovod = pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")


@needs_horovod
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_f1_horovod_sums_and_the_rank_that_failed_first_is_last_on_the_screen(
    hvdkit_run: Any, script: str, launcher: str
) -> None:
    """One job for all of it, since horovodrun takes seconds to start: sums, words, values, and a failure (B8, F1)."""
    words = ["a b", "$(id)", "'\"", ";", "*", ":"]
    start = time.monotonic()
    options = ["-np", "2", "--launcher", launcher, "--env", "V=a b'c"]
    done = hvdkit_run(*options, "--", "python", script, "fail", *words)
    assert done.returncode == 1, done.stdout + done.stderr
    for line in ("ranks 0 2 0 3.0", "ranks 1 2 1 3.0", f"words {words!a} {VALUE!a}"):
        assert line in done.stdout
    last = done.stderr[done.stderr.rindex("hvdkit: rank") :]
    assert last.startswith("hvdkit: rank 1 on localhost ended with exit code 1"), done.stderr
    assert last.rstrip().endswith("| RuntimeError: rank one gives up")
    assert time.monotonic() - start < 100


@needs_horovod
def test_horovod_ends_well(hvdkit_run: Any, script: str) -> None:
    done = hvdkit_run("-np", "2", "--env", f"V={VALUE}", "--", "python", script, "no")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks 1 2 1 3.0" in done.stdout and "hvdkit: rank" not in done.stderr


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), 9)", 137),
        ("import no_such_module", 1),
        ("os._exit(0) if rank else sys.exit(5)", 5),
    ],
)
def test_f1_exit_codes(hvdkit_run: Any, failure: str, code: int) -> None:
    script = f"{PLAIN}if rank == 1 or {'if rank' in failure}: {failure}\ntime.sleep(100)"
    done = hvdkit_run("-np", "2", "--launcher", "mpirun", "--", "python", "-c", script)
    assert done.returncode == code, done.stderr
    assert f"hvdkit: rank {0 if code == 5 else 1} on localhost" in done.stderr


def test_one_process(hvdkit_run: Any) -> None:
    done = hvdkit_run(
        "-np",
        "1",
        "--launcher",
        "mpirun",
        "--",
        "python",
        "-c",
        f"{PLAIN}print(rank, os.environ['OMPI_COMM_WORLD_SIZE'])",
    )
    assert (done.returncode, done.stdout) == (0, "0 1\n"), done.stderr


def test_more_ranks_than_cores(hvdkit_run: Any) -> None:
    import os

    ranks = len(os.sched_getaffinity(0)) + 2
    done = hvdkit_run("-np", str(ranks), "--launcher", "mpirun", "--", "python", "-c", f"{PLAIN}print(rank)")
    assert done.returncode == 0, done.stderr
    assert sorted(map(int, done.stdout.split())) == list(range(ranks))
    assert "more ranks than" in done.stderr


def test_b8_words_and_values_arrive_unchanged(hvdkit_run: Any) -> None:
    words = ["a b", "", ":", "--", "-np", "$(id)", "\n", "'\"", ";", "*"]
    value = "a b'c\"\n$(id)"
    script = "import os, sys; print(ascii(sys.argv[1:]), ascii(os.environ['V']))"
    done = hvdkit_run(
        "-np", "1", "--launcher", "mpirun", "--env", f"V={value}", "--", "python", "-c", script, *words, **{"A.B": "1"}
    )
    assert done.stdout == f"{words!a} {value!a}\n", done.stderr
    assert "A.B" in done.stderr


@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_hostile_host_names_start_nothing(hvdkit_run: Any, tmp_path: Path, launcher: str) -> None:
    touch = f"touch {tmp_path}/ran"
    path = tmp_path / "hosts"
    for name in (f"$({touch})", f"-oProxyCommand=touch${{IFS}}{tmp_path}/ran", f"a\n{touch}"):
        path.write_text(f"{name} slots=1\n")
        done = hvdkit_run("--hostfile", str(path), "--launcher", launcher, "--", sys.executable, "-c", "1")
        assert done.returncode == 2, done.stderr
    done = hvdkit_run("-H", f";{touch};:1", "--launcher", launcher, "--", sys.executable, "-c", "1")
    assert done.returncode == 2, done.stderr
    assert not (tmp_path / "ran").exists()
