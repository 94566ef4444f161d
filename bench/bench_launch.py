"""What `hvdkit run` adds to the bare mpirun command, and how long 10,000 hosts take to be parsed and placed.

python -m bench.bench_launch
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bench import runner

STARTED = "one process, start to end, s"
PLACED = "hosts parsed and placed, s"


def bare_mpirun() -> Mapping[str, float]:
    """mpirun with the arguments that hvdkit gives it, without hvdkit."""
    from hvdkit.launch.mpi import find_mpirun

    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts:
        hosts.write("localhost slots=1\n")
        hosts.flush()
        words = [find_mpirun().path, "-n", "1", "--hostfile", hosts.name, "--bind-to", "none", "--map-by", "slot"]
        return {STARTED: runner.timed(lambda: _run([*words, "true"]))}


def hvdkit_run() -> Mapping[str, float]:
    """The same through `hvdkit run`."""
    return {STARTED: runner.timed(lambda: _run([sys.executable, "-m", "hvdkit", "run", "-np", "1", "--", "true"]))}


def parse_and_place(hosts: int) -> float:
    """Seconds for a hostfile of so many hosts with 4 slots each, from text to the table of ranks."""
    from hvdkit.launch.hostfile import parse_hostfile
    from hvdkit.launch.placement import place

    text = "".join(f"node{number:05d} slots=4\n" for number in range(hosts))
    return runner.timed(lambda: place(parse_hostfile(text)))


def _run(words: list[str]) -> None:
    # Bytecode is written as on a user's machine, whatever this shell's habit is.
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ, check=True)


def main() -> None:
    """Print both tables."""
    arguments = runner.options(__doc__ or "", repeats=11).parse_args()
    hosts = 1_000 if arguments.quick else 10_000
    contenders: dict[str, runner.Contender] = {
        "mpirun": bare_mpirun,
        "hvdkit run": hvdkit_run,
        f"{hosts} hosts": lambda: {PLACED: parse_and_place(hosts)},
    }
    results = runner.interleave(contenders, repeats=arguments.repeats, warmup=arguments.warmup)
    runner.finish("launching", results, "mpirun", arguments.json)


if __name__ == "__main__":
    main()
