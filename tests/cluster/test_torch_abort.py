"""A torch rank that fails ends a job under bare mpirun and horovodrun: soon, with its code, named on the screen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import os, signal, sys
import torch
import hvdkit.torch as hvd

world = hvd.init()
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
for step in range(1000000):
    optimizer.zero_grad()
    weight.sum().backward()
    if step == 3 and world.rank == 1:
        {failure}
    optimizer.step()
"""
ENVIRON = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))},
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
}
LAUNCHERS = {
    "mpirun": ["mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", "2"],
    "horovodrun": ["horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        ("raise ValueError('bad sample 17')", 1, r"rank 1 on \S+ failed .*ValueError: bad sample 17"),
        ("sys.exit(3)", 3, r"rank 1 on \S+ failed .*status 3: sys\.exit\(3\)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", None, ""),
    ],
    ids=["exception", "exit", "kill"],
)
def test_f1_one_failing_rank_ends_the_job(
    launcher: str, failure: str, code: int | None, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(failure=failure))
    start = time.monotonic()
    done = subprocess.run(
        [*LAUNCHERS[launcher], sys.executable, str(script)], env=ENVIRON, capture_output=True, text=True, timeout=100
    )
    output = done.stdout + done.stderr
    assert time.monotonic() - start < 60, output
    assert done.returncode != 0, output
    if code is not None and launcher == "mpirun":  # horovodrun makes 1 of every code
        assert done.returncode == code, output
    assert re.search(message, output), output


def test_b5_two_declared_but_one_started(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import hvdkit.torch as hvd\nhvd.init()\nprint('trained')\n")
    # OMPI_COMM_WORLD_SIZE alone ends Open MPI itself; tests/single has it
    for variable in ("PMI_SIZE", "SLURM_NTASKS"):
        environ = {**ENVIRON, variable: "2"}
        done = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=100)
        assert done.returncode != 0 and "trained" not in done.stdout
        assert re.search(rf"1 process .*declared 2 \({variable}=2\)", done.stderr), done.stderr
